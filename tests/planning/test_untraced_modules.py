"""A module whose activations are unknown: the plan says why in front, and its states stay exact."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run

CODE = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.cast, self.up = CAST, nn.Linear(16, 16)

    def forward(self, x):
        return x + self.up(x.float() if self.cast else x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
"""
INPUTS = """

def example_inputs(micro_batch):
    return {"x": torch.randn(micro_batch, 16), "target": torch.randn(micro_batch, 16)}
"""
CASTS = CODE.replace("CAST", "True") + INPUTS
BARE = CODE.replace("CAST", "False")
METHOD = BARE + "\n    def example_inputs(self):\n        return {'x': torch.randn(1, 16)}\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, text in (("casts", CASTS), ("bare", BARE), ("whole", BARE + INPUTS), ("method", METHOD)):
        (tmp_path / f"untraced_{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("untraced_")]:
        del sys.modules[name]


def planned(capsys: pytest.CaptureFixture[str], name: str, *more: str) -> tuple[int, str]:
    hardware = ("--gpu", "RTX-4090-24GB", "--gpus", "2", "--no-search", "--allow-import")
    status = run(["plan", f"untraced_{name}:Net", *hardware, *more])
    return status, capsys.readouterr().out


def states(text: str) -> dict[str, Any]:
    parts = json.loads(text)["candidates"][0]["components"]
    return {item["name"]: item for item in parts if item["name"] in ("parameters", "optimizer")}


def test_a_product_of_two_dtypes_names_module_line_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = planned(capsys, "casts")
    assert status == 5
    lines = text.splitlines()
    number = next(at for at, line in enumerate(CASTS.splitlines(), 1) if "x.float()" in line)
    cause = f"in Net.blocks.0.up, line {number} of untraced_casts.py (a matrix product of torch.float32 and"
    assert cause in lines[1]
    assert ".to(w.dtype)" in lines[1]
    assert text.count("a matrix product") == 1, "the end does not say again what the beginning says"
    assert "--precision no" in lines[1]
    (command,) = (line for line in lines if line.startswith("command: "))
    assert "--allow-import" in command and "--trust-remote-code" not in command
    assert planned(capsys, "casts", "--precision", "no")[0] == 0, "the remedy helps"
    module = Path("untraced_casts.py")
    module.write_text(CASTS.replace("x.float() if self.cast else x", "x.float().to(self.up.weight.dtype)"))
    del sys.modules["untraced_casts"]
    assert planned(capsys, "casts")[0] == 0, "the other remedy helps"


def test_a_module_without_inputs_has_states_and_an_unknown_verdict(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, text = planned(capsys, "bare")
    assert status == 5
    assert "the inputs of untraced_bare:Net are not known" in text.splitlines()[1]
    assert "define example_inputs(micro_batch)" in text.splitlines()[1]
    status, bare = planned(capsys, "bare", "--format", "json")
    assert status == 5
    assert len(states(bare)) == 2
    assert states(bare) == states(planned(capsys, "whole", "--format", "json")[1])


def test_inputs_from_a_method_are_refused_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "untraced_method:Net", "--gpu", "L4", "--gpus", "2", "--allow-import"]) == 2
    assert "is called without an instance and takes self\nhelp: make it a static" in capsys.readouterr().err


def test_a_module_without_inputs_is_not_started(capsys: pytest.CaptureFixture[str]) -> None:
    model = "{reference: 'untraced_bare:Net', trust_remote_code: true}"
    Path("recipe.yaml").write_text(f"model: {model}\nbatch: {{micro_batch: 2}}\nsteps: 2\n")
    Path("fsdp.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\nmixed_precision: bf16\n"
        "fsdp_config: {fsdp_version: 2, fsdp_transformer_layer_cls_to_wrap: Block}\n"
    )
    assert run(["train", "recipe.yaml", "--config", "fsdp.yaml", "--allow-import"]) == 2
    assert "the inputs of untraced_bare:Net are not known" in capsys.readouterr().err
    assert not Path("runs").exists()
