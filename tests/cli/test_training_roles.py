"""What people do from first to last, in one process: from a model and data to a run that could start."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fsdptool_diffusion.objectives import FlowMatching

from fsdptool.api.starter import look_at, prepare_starter
from fsdptool.cli.app import run
from fsdptool.config.recipe import read_recipe
from fsdptool.errors import ConfigError
from fsdptool.families.objectives import TRANSFORMERS
from fsdptool.families.protocol import Objective
from fsdptool.launch.options import StartOptions
from fsdptool.launch.start import open_run
from fsdptool.planning.plan import chosen_candidate, make_plan
from fsdptool.planning.request.inputs import Request

GPUS = ("--gpu", "RTX-4090-24GB", "--gpus", "2")
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "x" * 700}]}
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "vocab_size": 264},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64},
}
MODULE = """\
import torch
from torch import nn


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.ReLU())


class Net(nn.Sequential):
    def __init__(self, depth=3):
        super().__init__(*(Block() for _ in range(depth)), nn.Linear(8, 4))


def example_inputs(micro_batch):
    return {"input": torch.randn(micro_batch, 8), "labels": torch.randint(0, 4, (micro_batch,))}
"""


def rows(path: Path, row: dict[str, object]) -> Path:
    path.write_text(f"{json.dumps(row)}\n" * 3)
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must succeed, and return its answer."""
    assert run(list(arguments)) == 0, capsys.readouterr().err
    return capsys.readouterr().out


@pytest.mark.slow
def test_lora_on_two_gpus_of_24_gb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "chat.jsonl", CHAT)
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(LLAMA))
    text = said(capsys, "init", "./small", "--data", "chat.jsonl", "--method", "lora", *GPUS)
    assert "conversations" in text
    recipe = read_recipe("recipe.yaml")
    assert (recipe.data.source, recipe.data.tokenizer) == ("jsonl", "bytes")
    # 702 characters at three per token.
    assert (recipe.method.name, recipe.batch.sequence_length) == ("lora", 256)
    assert "null" not in Path("recipe.yaml").read_text()
    files = ("recipe.yaml", "--config", "accelerate.yaml")
    said(capsys, "plan", "--recipe", *files, *GPUS, "--no-search", "-o", "plan.json")
    said(capsys, "emit-config", "--plan", "plan.json", "-o", "fsdp.yaml", "--recipe-output", "again.yaml")
    assert read_recipe("again.yaml") == recipe
    said(capsys, "validate", "--strict", "accelerate.yaml", "fsdp.yaml")
    assert "--nproc-per-node 2" in said(capsys, "train", *files, "--dry-run")
    assert run(["init", "llama3:tiny"]) == 2, "files are not replaced unasked"


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 40, 4000])
def test_a_starter_saves_at_an_interval_that_was_planned(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small").mkdir()
    Path("small/config.json").write_text(json.dumps(LLAMA))
    Path("chat.jsonl").write_text(f"{json.dumps(CHAT)}\n" * count)
    options = {"reference": "./small", "gpu": "RTX-4090-24GB", "gpus": 2}
    starter = prepare_starter(options, data="chat.jsonl")
    assert starter.recipe is not None
    Path("recipe.yaml").write_text(starter.recipe)
    recipe = read_recipe("recipe.yaml")
    # About 790 characters a row, three to a token.
    batch = recipe.batch
    rows = max(count * 790 / 3 / (batch.sequence_length or 1), 1.0)
    steps = max(rows / (2 * batch.micro_batch * batch.accumulation), 1.0)
    assert recipe.checkpoints.every_steps is not None
    assert 1 <= recipe.checkpoints.every_steps <= max(steps / 2, 1.0)
    assert recipe.checkpoints.mode == "async"
    # The copies of an asynchronous save are in host memory.
    chosen = chosen_candidate(starter.plan)
    inputs = starter.plan.inputs
    unsaved = replace(inputs.recipe, checkpoints=replace(inputs.recipe.checkpoints, every_steps=None))
    without = make_plan(Request(replace(inputs, recipe=unsaved)))
    same = next(item for item in without.candidates if item.settings == chosen.settings)
    needs = [sum(phase.host_bytes_per_rank for phase in item.phases) for item in (chosen, same)]
    assert needs[0] > needs[1]


@pytest.mark.slow
def test_a_recipe_in_another_folder_finds_its_files_from_anywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data", "small", "jobs", "elsewhere"):
        (tmp_path / name).mkdir()
    rows(tmp_path / "data" / "chat.jsonl", CHAT)
    (tmp_path / "small" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "jobs" / "recipe.schema.json").write_text("{}")
    said(capsys, "init", "./small", "--data", "data/chat.jsonl", "-o", "jobs")
    text = Path("jobs/recipe.yaml").read_text()
    assert "reference: ../small" in text
    assert "path: ../data/chat.jsonl" in text
    assert text.startswith("# yaml-language-server: $schema=recipe.schema.json\n"), (
        "it lies beside the recipe"
    )
    assert "$schema" not in Path("jobs/accelerate.yaml").read_text(), "no schema of its own lies there"
    for start, folder in ((".", "jobs"), ("jobs", "."), ("elsewhere", "../jobs")):
        monkeypatch.chdir(tmp_path / start)
        said(capsys, "train", f"{folder}/recipe.yaml", "--config", f"{folder}/accelerate.yaml", "--dry-run")
    files = ("../jobs/recipe.yaml", "--config", "../jobs/accelerate.yaml")
    said(capsys, "plan", "--recipe", *files, "-o", "plan.json")
    said(capsys, "emit-config", "--plan", "plan.json", "--recipe-output", "../jobs/again.yaml")
    assert read_recipe("../jobs/again.yaml") == read_recipe("../jobs/recipe.yaml")


@pytest.mark.slow
def test_a_model_of_your_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "rolenet.py").write_text(MODULE)
    own = ("rolenet:Net", "--allow-import")
    assert "wrap: Block" in said(capsys, "detect", *own)
    assert "allow-import" in said(capsys, "init", *own)
    said(
        capsys, "plan", *own, "--profile", "cpu-gloo", "--gpus", "2", "--micro-batch", "4", "-o", "plan.json"
    )
    emitted = ("-o", "fsdp.yaml", "--recipe-output", "planned.yaml")
    said(capsys, "emit-config", "--plan", "plan.json", "--allow-import", *emitted)
    said(capsys, "validate", "accelerate.yaml", "fsdp.yaml")
    for name, config in (("recipe", "accelerate"), ("planned", "fsdp")):
        files = (f"{name}.yaml", "--config", f"{config}.yaml")
        said(capsys, "train", *files, "--allow-import", "--dry-run")
    monkeypatch.delitem(sys.modules, "rolenet")


def objective_named(name: str) -> Objective:
    return TRANSFORMERS[name]() if name in TRANSFORMERS else FlowMatching(denoise=lambda *_: None)


@pytest.mark.parametrize(
    ("row", "objective", "kind", "column", "options"),
    [
        ({"talk": CHAT["messages"]}, "causal_lm", "chat", "text", {"messages_column": "talk"}),
        ({"question": "a", "answer": "b"}, "causal_lm", "prompts", "answer", {"prompt_column": "question"}),
        ({"id": "7", "story": "long text"}, "causal_lm", "text", "story", {}),
        ({"body": "good", "class": "1"}, "classification", "labels", "body", {"label_column": "class"}),
        ({"source": "a", "target": "b"}, "seq2seq", "pairs", "text", {}),
    ],
)
def test_columns_are_recognised(
    tmp_path: Path, row: dict[str, object], objective: str, kind: str, column: str, options: dict[str, str]
) -> None:
    look = look_at(str(rows(tmp_path / "rows.jsonl", row)), objective_named(objective))
    assert (look.kind, look.data.text_column, dict(look.data.options)) == (kind, column, options)


@pytest.mark.parametrize(
    ("name", "row", "objective", "words"),
    [
        ("a.jsonl", {"talk": [{"from": "human", "value": "hi"}]}, "causal_lm", "keys from, value"),
        ("a.jsonl", {}, "causal_lm", "the first row is empty"),
        ("a.jsonl", {"n": 1}, "causal_lm", "none of the columns n holds text"),
        ("a.jsonl", {"text": "x"}, "classification", "no label among the columns text"),
        ("a.jsonl", {"text": "x"}, "flow_matching", "is trained on images"),
        ("a.png", {}, "causal_lm", "is trained on text"),
        ("a.bin", {}, "causal_lm", "no file of a known kind"),
    ],
)
def test_data_that_do_not_suit(
    tmp_path: Path, name: str, row: dict[str, object], objective: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        look_at(str(rows(tmp_path / name, row)), objective_named(objective))


def test_a_file_that_is_not_there_is_no_dataset_of_the_hub() -> None:
    with pytest.raises(ConfigError, match=r"--data chats\.jsonl does not exist"):
        look_at("chats.jsonl", objective_named("causal_lm"))
    assert look_at("someone/corpus-v1.1", objective_named("causal_lm")).kind == "unread"


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"messages": 5}, "messages is a list of turns only in some rows"),
        ({"messages": "hi"}, "messages is a list of turns only in some rows"),
        ({"messages": [3]}, "messages is a list of turns only in some rows"),
        (
            {"messages": [*CHAT["messages"], {"content": "hi"}]},
            "a turn of messages has the keys content, not role",
        ),
    ],
)
def test_every_row_of_chats_is_looked_at(tmp_path: Path, second: dict[str, object], words: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{json.dumps(CHAT)}\n{json.dumps(second)}\n")
    with pytest.raises(ConfigError, match=words):
        look_at(str(path), objective_named("causal_lm"))


def test_pages_about_the_data_and_folders_do_not_count_as_data(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# About these rows")
    (tmp_path / "LICENSE.txt").write_text("Anybody may use these rows.\n" * 99)
    (tmp_path / "changes.txt").write_text("New")
    (tmp_path / "notes.txt").write_text("Old")
    (tmp_path / "parts.json").mkdir()
    rows(tmp_path / "rows.jsonl", {"story": "long text"})
    look = look_at(str(tmp_path), objective_named("causal_lm"))
    assert (look.data.source, look.data.text_column) == ("jsonl", "story")


SMALL_RUN = """\
model: {reference: "qwen3:tiny"}
data: {source: synthetic}
batch: {micro_batch: 1, sequence_length: 16}
steps: 400
"""


@pytest.mark.slow
def test_nobody_starts_over_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(SMALL_RUN)
    assert run(["emit-config", "--preset", "cpu", "-o", "fsdp.yaml"]) == 0
    command = ["train", "recipe.yaml", "--config", "fsdp.yaml", "--cpu", "--dry-run", "--resume", "auto"]
    assert run(command) == 0, "there is no run yet, as in the first start of a job script"
    with open_run(Path("recipe.yaml"), Path("fsdp.yaml"), StartOptions(cpu=True, predict=False)) as ready:
        folder = ready.folder
    assert run(command) == 0, "no step was made"
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n + 1}}}\n' for n in range(158)))
    capsys.readouterr()
    assert run(command) == 2
    said = capsys.readouterr().err
    assert f"error: no checkpoint exists in {folder}: 158 steps are lost\n" in said
    assert "--start-over" in said
    assert run([*command, "--start-over"]) == 0
    assert run([*command[:-2], "--start-over"]) == 2, "it belongs to --resume auto"
    for answer, status in (("n", 2), ("y", 0)):
        assert _at_terminal(command, answer) == status
    (folder / "checkpoints" / "step-00000100").mkdir()
    assert run(command) == 0


def _at_terminal(command: list[str], answer: str) -> int:
    """Run a command at a terminal, answer its question, and return its status."""
    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdptool", *command], stdin=there, stdout=subprocess.DEVNULL, stderr=there
    )
    os.close(there)
    said = b""
    while b"start over?" not in said:
        said += os.read(here, 4096)
    assert b"158 steps are lost" in said
    os.write(here, f"{answer}\n".encode())
    with contextlib.suppress(OSError):
        while os.read(here, 4096):
            pass
    status = process.wait()
    os.close(here)
    return status
