"""A model whose folder comes with code: detected, planned and started, with the flag and never without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from own_models import own_transformers_model

from fsdptool.cli.app import run

FLAG = "--trust-remote-code"
RECIPE = """\
model: {reference: tally, weights: random}
batch: {micro_batch: 2, sequence_length: 16}
steps: 2
"""
CONFIG = (Path(__file__).parents[2] / "examples/configs/two_cpu_processes.yaml").read_text()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    own_transformers_model(tmp_path / "tally")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "accelerate.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_flag_reaches_every_command(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # 64 x 32 for the embedding and for the head, and 8,352 per block.
    override = ("--override", "num_hidden_layers=5")
    assert run(["detect", "./tally", FLAG, *override, "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"]["total"] == 4096 + 5 * 8352
    hardware = ("--profile", "cpu-gloo", "--gpus", "2", "--no-search")
    assert run(["plan", "./tally", FLAG, *hardware, "--seq-len", "16"]) == 0
    assert run(["plan", "--recipe", "recipe.yaml", FLAG, *hardware]) == 0
    assert run(["train", "recipe.yaml", "--config", "accelerate.yaml", "--dry-run", FLAG]) == 0
    assert FLAG in capsys.readouterr().out.splitlines()[-1]


def test_without_the_flag_one_line_names_it(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["plan", "./tally", "--profile", "cpu-gloo", "--gpus", "2"],
        ["plan", "--recipe", "recipe.yaml", "--profile", "cpu-gloo", "--gpus", "2"],
        ["train", "recipe.yaml", "--config", "accelerate.yaml", "--dry-run"],
    ):
        assert run(arguments) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 2
        assert "auto_map" in said[0]
        assert FLAG in said[1]


def test_code_that_fails_is_one_line(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "tally" / "tally.py").write_text("raise RuntimeError('not today')\n")
    assert run(["detect", "./tally", FLAG]) == 2
    assert "not today" in capsys.readouterr().err.splitlines()[0]
