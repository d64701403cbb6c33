"""Values that the shell completes, asked as bash asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdptool.cli import completion
from fsdptool.cli.app import run
from fsdptool.cli.completion import VARIABLE
from fsdptool.cli.rule import all_rules


def environment(line: str) -> dict[str, str]:
    """Return what bash sets for a line, the cursor at its end: it splits ``llama3:8`` and ``--gpu=L4``."""
    words = line.replace(":", " : ").replace("=", " = ").split(" ")
    return {
        VARIABLE: "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }


def values(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(line).items():
            patch.setenv(name, value)
        assert run([]) == 0
    return capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("fsdptool plan x --method ", ["full", "lora", "qlora", "distillation"]),
        ("fsdptool init x --method q", ["qlora"]),
        ("fsdptool plan x --gpu RTX-4090-", ["RTX-4090-24GB"]),
        ("fsdptool plan x --gpu=RTX-4090-", ["RTX-4090-24GB"]),
        ("fsdptool plan x --objective ep", ["epsilon"]),
        ("fsdptool plan x --precision b", ["bf16"]),
        ("fsdptool plan x --dtype bf", ["bfloat16"]),
        ("fsdptool plan x --checkpointing o", ["optimal"]),
        ("fsdptool plan x --checkpointing selective:e", ["every-2-matmuls"]),
        ("fsdptool validate x --consumer ax", ["axolotl"]),
        ("fsdptool plan llama3:7", ["70b"]),
        ("fsdptool detect llama3.3", ["llama3.3:70b"]),
        ("fsdptool families gener", ["generic"]),
        ("fsdptool rule FSD301", ["FSD301"]),
        ("fsdptool validate --select FSD999,FSD301", ["FSD999,FSD301"]),
        ("fsdptool migrate --to acc", ["accelerate"]),
        ("fsdptool emit-config --preset two", ["two-nodes-hybrid"]),
        ("fsdptool schema rec", ["recipe"]),
        ("fsdptool train r.yaml --launcher t", ["torchrun"]),
        ("fsdptool det", ["detect"]),
        ("fsdptool plan no-such-family:", []),
    ],
)
def test_values(line: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert values(line, capsys) == expected


@pytest.mark.parametrize(
    ("shell", "line", "expected"),
    [
        ("zsh", "fsdptool plan llama3:7", """_arguments '*: :(("llama3\\\\:70b"))'"""),
        ("zsh", "fsdptool plan x --gpu=RTX-4090-", """_arguments '*: :(("--gpu=RTX-4090-24GB"))'"""),
        ("fish", "fsdptool plan x --gpu=RTX-4090-", "--gpu=RTX-4090-24GB"),
        ("fish", "fsdptool validate --select FSD30", "FSD301\nFSD302"),
        (
            "fish",
            "fsdptool det",
            "detect\tShow a model’s wrap classes with reasons, exact totals and hazards, …\n",
        ),
    ],
)
def test_zsh_and_fish(
    shell: str, line: str, expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both replace the whole word, and show what a command does."""
    monkeypatch.setenv(VARIABLE, f"complete_{shell}")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    assert run([]) == 0
    assert capsys.readouterr().out.startswith(expected)


def test_descriptions_stay_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fish takes every line for a value."""
    monkeypatch.setenv(VARIABLE, "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    for line, begin in (("fsdptool ", ""), ("fsdptool train --", "--"), ("fsdptool plan --", "--")):
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        assert run([]) == 0
        found = capsys.readouterr().out.splitlines()
        assert len(found) > 15
        assert all(item.startswith(begin) and "\t" in item for item in found)


def test_several_families_are_offered_with_their_colon(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"llama3:", "llama3.1:"} <= set(values("fsdptool plan llama3", capsys))


def test_run_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/first", "runs/na\x1b[31mme", "runs/empty"):
        (tmp_path / name).mkdir(parents=True)
        if name != "runs/empty":
            (tmp_path / name / "run.json").touch()
    (tmp_path / "runs/first/checkpoints/step-00000004").mkdir(parents=True)
    for command in ("export ", "watch runs/f", "report ", "compare a ", "diagnose "):
        assert values(f"fsdptool {command}", capsys) == ["runs/first"]
    resumed = ["auto", "runs/first/checkpoints/step-00000004"]
    assert values("fsdptool train r.yaml --resume ", capsys) == resumed


def test_every_table_lists_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure while the shell waits is not shown; here it is raised."""
    monkeypatch.chdir(tmp_path)
    tables = {*completion._VALUES.values(), *completion._OWN.values()} - {completion._run_folders}
    assert all(list(table("")) for table in tables)
    assert set(completion._codes("")) == set(all_rules())


@pytest.mark.slow
def test_the_shell_does_not_wait_for_torch() -> None:
    code = "import sys; from fsdptool.cli.app import run; run([]); assert 'torch' not in sys.modules"
    line = environment("fsdptool plan llama3:7")
    answer = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | line, capture_output=True, text=True, check=True
    )
    assert answer.stdout.split() == ["70b"]
