"""``package.module:Class`` is imported with the flag of this command line, and nowhere without it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks import CONFIG, Cli

FLAG = "--allow-import"
CODE = """\
from pathlib import Path
Path({mark!r}).touch()
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))


class Net(nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        self.inlet = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        hidden = self.inlet(x)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def example_inputs(micro_batch):
    return {{"x": torch.randn(micro_batch, 8), "labels": torch.randint(0, 4, (micro_batch,))}}


def small():
    return Net(depth=1)


built = Net()
"""
REFERENCE = "ownnets.plain:Net"
RECIPE = (
    f"model: {{reference: '{REFERENCE}', trust_remote_code: true}}\nbatch: {{micro_batch: 2}}\nsteps: 2\n"
)
HARDWARE = ("--profile", "cpu-gloo", "--gpus", "2", "--no-search")


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Appears when the module has been imported; recipe and configuration lie beside it."""
    mark = tmp_path / "imported"
    (tmp_path / "ownnets").mkdir()
    (tmp_path / "ownnets" / "__init__.py").touch()
    (tmp_path / "ownnets" / "plain.py").write_text(CODE.format(mark=str(mark)))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "accelerate.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield mark
    sys.path[:] = path
    for name in [name for name in sys.modules if name.partition(".")[0] == "ownnets"]:
        del sys.modules[name]


def test_a_module_is_inspected_planned_and_started(here: Cli, mark: Path) -> None:
    answer = here("detect", REFERENCE, FLAG, "--override", "depth=5", "--format", "json")
    assert answer.code == 0, answer
    found = json.loads(answer.out)
    # 8 to 16, five blocks of 16 to 32 and back, 16 to 4: weights and biases.
    assert found["parameters"]["total"] == 144 + 5 * 1072 + 68
    assert found["wrap"]["classes"] == ["Block"]
    assert here("detect", "ownnets.plain:small", FLAG, "--strict", "--no-cache").code in (0, 1)
    answer = here("train", "recipe.yaml", "--config", "accelerate.yaml", FLAG, "--dry-run")
    assert answer.code == 0, answer
    # Inputs that the recipe lists take the place of the function's.
    (mark.parent / "listed.yaml").write_text(
        RECIPE + "objective: {options: {inputs: {x: {shape: [5, 8]}, target: {shape: [5, 4]}}}}\n"
    )
    assert here("plan", "--recipe", "listed.yaml", FLAG, *HARDWARE).code == 0


def test_nothing_is_imported_without_the_flag(here: Cli, mark: Path) -> None:
    plan = mark.parent / "plan.json"
    assert here("plan", "--recipe", "recipe.yaml", FLAG, *HARDWARE, "-o", plan).code == 0
    assert mark.exists()
    for name in [name for name in sys.modules if name.partition(".")[0] == "ownnets"]:
        del sys.modules[name]
    mark.unlink()
    (mark.parent / "silent.yaml").write_text(RECIPE.replace(", trust_remote_code: true", ""))
    for arguments in (
        ("detect", REFERENCE),
        ("plan", REFERENCE, *HARDWARE),
        ("plan", "--recipe", "recipe.yaml", *HARDWARE),
        ("plan", "--recipe", "silent.yaml", *HARDWARE),
        ("plan", "--check", plan),
        ("emit-config", "--plan", plan),
        ("emit-config", REFERENCE),
        ("validate", "accelerate.yaml", "--model", REFERENCE),
        ("train", "recipe.yaml", "--config", "accelerate.yaml"),
        ("train", "silent.yaml", "--config", "accelerate.yaml"),
        ("launch", "recipe.yaml", "--config", "accelerate.yaml"),
    ):
        answer = here(*arguments)
        assert answer.code == 2, arguments
        assert not mark.exists(), arguments
        error, advice = answer.err.splitlines()
        assert REFERENCE in error, arguments
        assert FLAG in advice, arguments


def test_what_cannot_be_built_is_one_line(here: Cli, mark: Path) -> None:
    for reference, words in (
        ("ownnets.plain:built", "already built"),
        ("ownnets.plain:Absent", "does not exist"),
        ("ownnets.absent:Net", "No module named"),
        ("ownnets.plain:example_inputs", "missing 1 required positional argument"),
    ):
        answer = here("detect", reference, FLAG)
        assert answer.code == 2
        assert words in answer.err.splitlines()[0]
