"""What commands print in terminals of 60, 80 and 120 columns: no line is too long, no name is broken."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run
from fsdptool.planning.plan import read_plan
from fsdptool.records.command_documents import Comparison
from fsdptool.records.detection import Detection
from fsdptool.records.diagnostic import read_answer
from fsdptool.records.family_documents import FamilyList
from fsdptool.records.run import Summary
from fsdptool.report.console import tables
from fsdptool.report.console.detection import print_detect
from fsdptool.report.console.families import print_families
from fsdptool.report.console.plan import print_comparison, print_plan
from fsdptool.report.console.tables import cell_len, print_command, print_lines, wrap_line
from fsdptool.report.console.train import closing_text

WIDTHS = (60, 80, 120)
GPUS = ["--gpu", "H100-80GB-SXM", "--gpus", "8"]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that calls another for a pipe and for every width, and checks all lines."""

    def check(call: Any, *, pipe: bool = True) -> dict[int, str]:
        capsys.readouterr()
        monkeypatch.setenv("NO_COLOR", "1")
        call()
        whole = "".join(capsys.readouterr()) if pipe else None
        texts = {}
        for width in WIDTHS:
            monkeypatch.setenv("COLUMNS", str(width))
            terminal = Terminal()
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stdout", terminal)
                patch.setattr(sys, "stderr", terminal)
                call()
            texts[width] = re.sub("\x1b\\[[0-9;]*[A-Za-z]", "", terminal.getvalue())
            for line in texts[width].splitlines():
                assert cell_len(line) <= width or len(line.split()) == 1, (width, line)
            if whole is not None:
                assert _words(texts[width]) <= _words(whole) | {"\\"}, width
        return texts

    return check


def _words(text: str) -> set[str]:
    """Return the words of an answer, without curves and what only a narrow terminal says."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("not shown at this width")]
    return {
        word.rstrip(",;")
        for line in lines
        if not set(line) & set("▁▂▃▄▅▆▇█") and ", at most " not in line
        for word in line.split()
    }


def test_the_answers_of_detect_and_families(shown: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["detect", "llama3:tiny", "--world-size", "7", "--format", "json"]) == 0
    detection = read_answer(Detection, json.loads(capsys.readouterr().out))
    texts = shown(lambda: print_detect(detection))
    assert "not shown at this width: example, each" in texts[60]
    for arguments in ([], ["llama3"]):
        run(["families", *arguments, "--format", "json"])
        listed = read_answer(FamilyList, json.loads(capsys.readouterr().out))
        shown(lambda listed=listed: print_families(listed))


@pytest.mark.slow
def test_a_plan_and_a_comparison(
    shown: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "plan.json")
    narrowed = ["--checkpointing", "none", "--no-offload"]
    assert run(["plan", "llama3:tiny", *GPUS, "--seq-len", "128", *narrowed, "-o", path]) == 0
    plan = read_plan(Path(path))
    command = ["fsdptool", "plan", "llama3:tiny", *GPUS, "--seq-len", "128"]
    for explain in (False, True):
        shown(lambda explain=explain: print_plan(plan, explain=explain, command=command))
    capsys.readouterr()
    run(["compare", path, path, "--format", "json"])
    compared = read_answer(Comparison, json.loads(capsys.readouterr().out)).body
    shown(lambda: print_comparison(compared))


def test_findings_explanations_and_rules(shown: Any, tmp_path: Path) -> None:
    path = tmp_path / "a-configuration-of-a-team.yaml"
    wrapped = ",".join(f"LlamaDecoderLayer{n}" for n in range(12))
    path.write_text(
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_use_orig_params: true\n"
        f"  fsdp_transformer_layer_cls_to_wrap: {wrapped}\n"
    )
    for arguments in (["validate", str(path)], ["explain", str(path)], ["rule", "FSD301"], ["rule"]):
        # A source line is cut around its caret where the terminal is narrow.
        texts = shown(lambda arguments=arguments: run(arguments), pipe=False)
        assert all(texts.values())
    assert "fsdp_use_orig_params has no effect" not in texts[60]


def test_mistakes_and_their_advice(shown: Any) -> None:
    shown(lambda: run(["plan", "llama3:8", "--gpu", "H100", "--gpus", "8", "--seq-len", "4096"]))
    shown(lambda: run(["plan", "llama3:8b", "--gpu", "H100-of-a-name-that-nobody-gave", "--gpus", "8"]))


def test_the_summary_of_a_run(shown: Any) -> None:
    from fsdptool.training.memory_meter import CpuMeter, CudaMeter

    for instrument in (CpuMeter.instrument, CudaMeter.instrument):
        summary = Summary(
            status="completed",
            exit_code=0,
            resumable=True,
            steps=60,
            world_size=2,
            mesh={"dp_replicate": 1, "dp_shard": 2},
            units=5,
            sharding_proof={
                "units": 5,
                "parameters": 31,
                "placements": {"[Shard(dim=0)]": 31},
                "local_bytes": [19 << 20, 19 << 20],
                "examples": [
                    {
                        "fqn": "model.layers.0.self_attn.q_proj.weight",
                        "shape": [256, 256],
                        "local_shapes": [[128, 256], [128, 256]],
                        "placements": ["Shard(dim=0)"],
                    }
                ],
            },
            predicted_peak_bytes=100 << 20,
            measured_peak_bytes=(99 << 20, 99 << 20),
            error_percent=1.0,
            instrument=instrument,
            throughput={"step_seconds_median": 0.5, "step_seconds_p95": 0.6, "tokens_per_second": 900},
            last_checkpoint="checkpoints/step-00000060",
            last_good_step=60,
            export="export",
            restarts=1,
            failure=None,
            memory_report=None,
        )
        text = closing_text(summary, "runs/main_job", [5.0, 4.0])
        assert max(map(len, text.splitlines())) <= 110
        single = closing_text(replace(summary, steps=1, world_size=1), "runs/main_job", [5.0])
        assert single.splitlines()[0].endswith(": 1 step on 1 rank")
        shown(lambda text=text: print_lines(text))


def test_a_command_continues_after_a_backslash_and_keeps_options_with_their_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    command = ["fsdptool", "plan", "a b", "--gpu", "H100-80GB-SXM", "--gpus", "8", "--no-offload"]
    print_command("command", command)
    lines = terminal.getvalue().splitlines()
    assert all(line.endswith(" \\") for line in lines[:-1])
    import shlex

    assert shlex.split(terminal.getvalue().replace("\\\n", "")) == ["command:", *command]
    assert not [line for line in lines if line.removesuffix(" \\").endswith(("--gpu", "--gpus"))]


def test_long_lines_continue_below_their_text_and_figures_keep_their_units() -> None:
    assert wrap_line("  sharding     5 units, 31 parameters of the model", 30) == [
        "  sharding     5 units, 31",
        "               parameters of",
        "               the model",
    ]
    assert wrap_line("each rank needs 67.5 GiB of 79.1 GiB", 23) == [
        "each rank needs",
        "  67.5 GiB of 79.1 GiB",
    ]
    assert tables.wrap_line("short", 23) == ["short"]
