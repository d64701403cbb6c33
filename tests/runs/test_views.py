"""Runs as they stand, read from their folders: live, ended, dead, damaged; as lists, lines and pages."""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run as fsdptool
from fsdptool.files.values import check
from fsdptool.launch.outcome import planned_peak
from fsdptool.records.codec import to_json
from fsdptool.records.plan import Candidate, ComponentBytes, Phase, SearchPoint
from fsdptool.records.run import RankProgress, RunPhase, Start, Summary
from fsdptool.records.trace import Component
from fsdptool.report.console.runs import sparkline
from fsdptool.report.page.run import axis_ticks
from fsdptool.runs.diagnose import checkpoint_note
from fsdptool.runs.events import event_path
from fsdptool.runs.folder import write_start
from fsdptool.runs.view import as_it_ran, read_view
from fsdptool.runs.watchdog import ProgressFile, read_progress, silent_ranks, waits_for_others

NAME = "</title>[red]\x1b[31m"


class Folder:
    """A run folder as ``fsdptool train`` writes it, two ranks on a CPU."""

    def __init__(self, path: Path, *, steps: int = 20) -> None:
        self.path = path
        self.now = time.time()
        for name in ("events", "logs", "checkpoints"):
            (path / name).mkdir(parents=True)
        (path / ".lock").touch()
        recipe = {"model": {"reference": NAME}, "method": {"name": "lora"}, "steps": 100, "epochs": None}
        (path / "recipe.json").write_text(json.dumps(recipe))
        (path / "prediction.json").write_text("null")
        (path / "metrics.jsonl").write_text("".join(self.step(n) for n in range(1, steps + 1)))
        for rank in (0, 1):
            self.event(rank, "started", world_size=2, node="here")
            self.event(rank, "memory", moments={"backward": 1000 + rank})
        self.event(0, "length", steps=60)
        self.event(0, "evaluation", step=10, loss=4.5)
        write_start(path, Start(2, "cpu"), None)
        os.utime(path / "run.json", (self.now - 100, self.now - 100))

    def step(self, number: int) -> str:
        figures = {"loss": 6.0 - number / 100, "lr": 1e-4, "step_seconds": 0.5, "data_seconds": 0.0}
        line = {"step": number, "time": self.now - 30 + number, "tokens": 256, "samples": 4, **figures}
        return json.dumps(line) + "\n"

    def event(self, rank: int, kind: str, **fields: Any) -> None:
        head = {"kind": kind, "time": self.now - 90, "rank": rank, "attempt": 0, "pid": 1}
        with event_path(self.path, rank).open("a") as stream:
            stream.write(json.dumps({**head, **fields}) + "\n")

    def end(self, status: str, **fields: Any) -> None:
        base: dict[str, Any] = {
            **{"status": status, "exit_code": 0, "resumable": False, "steps": 20, "world_size": 2},
            **{"mesh": {"dp_replicate": 1, "dp_shard": 2}, "units": 3, "sharding_proof": {}},
            **{"predicted_peak_bytes": 900, "measured_peak_bytes": (1000, 1001), "instrument": "none"},
            **{"error_percent": None, "throughput": {}, "last_checkpoint": None, "last_good_step": None},
            **{"export": None, "restarts": 0, "failure": None, "memory_report": None},
        }
        from fsdptool.launch.outcome import write_summary

        write_summary(self.path, Summary(**{**base, **fields}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path / "locks"))
    monkeypatch.chdir(tmp_path)
    return Folder(tmp_path / "runs" / "one")


@pytest.fixture
def locked(folder: Folder) -> Iterator[Folder]:
    with (folder.path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def test_a_live_run_has_an_eta_from_its_steps_and_the_ranks_own_total(locked: Folder) -> None:
    view = read_view(locked.path, now=locked.now)
    assert (view.state, view.step, view.total_steps, view.exit_code) == ("running", 20, 60, None)
    assert view.step_seconds == 0.5
    # One second from step to step, evaluations included; the last one was ten seconds ago.
    assert view.eta_seconds == pytest.approx(39.0)
    assert view.tokens_per_second == 512.0
    assert view.measured_peak_bytes == 1001
    assert [(phase.name, phase.measured_bytes) for phase in view.memory] == [("backward", 1001)]
    assert view.nodes == ("here",)


PLANNED = {RunPhase.LOAD: 5, RunPhase.FIRST_STEP: 990, RunPhase.BACKWARD: 1010, RunPhase.SAVE: 30}
"""Bytes of phases; the copy of a save has 10."""


def planned_candidate() -> Candidate:
    """Return a candidate with the phases of ``PLANNED``."""
    point: dict[str, Any] = {
        **{"cluster": 0, "layout": "native", "wrap_policy": "none", "wrap_classes": (), "micro_batch": 1},
        **{"accumulation": 1, "checkpointing": "none", "reshard_after_forward": True, "dp_replicate": 1},
        **{"dp_shard": 2, "cp": 1, "cpu_offload": False, "optimizer_implementation": "auto", "prefetch": 1},
        **{"reduce_dtype": None, "gradients": "sharded"},
    }
    names = (
        *("allocated_peak_bytes", "reserved_peak_bytes", "device_total_bytes", "usable_bytes", "slack_bytes"),
        *("host_bytes_per_node", "peak", "step_seconds", "tokens_per_second", "rejected_by"),
    )
    fields: dict[str, Any] = {
        **dict.fromkeys(names),
        **{"id": "requested", "settings": SearchPoint(**point), "timeline": ()},
        "components": (ComponentBytes(Component.STAGED, 10, "exact"),),
        "phases": tuple(Phase(name, size, 0, 0, "exact", "") for name, size in PLANNED.items()),
    }
    return Candidate(**fields)


def test_the_copy_of_a_save_is_planned_once_a_save_has_made_it(locked: Folder) -> None:
    (locked.path / "prediction.json").write_text(json.dumps(to_json(planned_candidate())))
    before = {phase.name: phase.predicted_bytes for phase in read_view(locked.path, now=locked.now).memory}
    assert before == {"load": 5, "first step": 990, "backward": 1000, "save": 20}
    locked.event(0, "checkpoint_started", step=5, asynchronous=True)
    locked.event(0, "memory", moments={"save": 30, "backward": 1010})
    after = {phase.name: phase.predicted_bytes for phase in read_view(locked.path, now=locked.now).memory}
    assert after == PLANNED


def test_a_run_is_compared_with_what_was_planned_of_it(folder: Folder) -> None:
    """A plan of epochs counts the copy of a save: a run whose only save was its last made none."""
    candidate = replace(planned_candidate(), allocated_peak_bytes=1010)
    folder.event(0, "checkpoint_started", step=20, asynchronous=False)
    assert planned_peak(candidate, folder.path) == 1000
    early = replace(candidate, allocated_peak_bytes=995)
    assert planned_peak(early, folder.path) == 990, "the first step has no copy"
    folder.event(0, "checkpoint_started", step=20, asynchronous=True)
    assert planned_peak(candidate, folder.path) == 1010


def test_a_run_of_one_step_is_compared_with_the_first_step_alone(folder: Folder) -> None:
    """Later steps find the optimizer's states, and the only save makes no copy."""
    damaged = '{"step": [1]}\n{"step": null}\n'
    (folder.path / "metrics.jsonl").write_text(damaged + folder.step(1))
    candidate = replace(planned_candidate(), allocated_peak_bytes=1010)
    ran = as_it_ran(candidate, folder.path)
    assert ran.allocated_peak_bytes == 990
    assert ran.reserved_peak_bytes is None, "that of the first step alone is not known"
    assert {phase.name: phase.allocated_bytes for phase in ran.phases}[RunPhase.SAVE] == 20


@pytest.mark.parametrize(("lost", "said"), [(1, "loses the step of"), (3, "loses the 3 steps of")])
def test_what_starting_again_loses_is_counted(folder: Folder, lost: int, said: str) -> None:
    view = replace(read_view(folder.path, now=folder.now), last_checkpoint=None, lost_steps=lost)
    assert said in str(checkpoint_note(view))


def test_a_run_on_another_machine_lives_while_its_ranks_write(folder: Folder) -> None:
    assert read_view(folder.path, now=folder.now).state == "dead"
    rank = RankProgress(1, "training", 21, folder.now - 10, folder.now - 11, True, 1.0)
    ProgressFile(folder.path, 1).write(rank)
    view = read_view(folder.path, now=folder.now)
    assert view.state == "running"
    assert view.ranks[1] == rank
    assert read_view(folder.path, now=folder.now + 120).state == "dead"


def test_ends_and_exit_statuses(folder: Folder, capsys: pytest.CaptureFixture[str]) -> None:
    folder.event(1, "failure", message="out of memory in backward", exit_code=4, help="read the plan")
    assert fsdptool(["watch", "runs/one"]) == 4
    said = capsys.readouterr().out
    assert "runs/one: dead, step 20/60" in said
    assert "rank 1: out of memory in backward" in said
    assert "help: read the plan" in said
    assert "no checkpoint exists: 20 steps are lost; --resume auto --start-over starts over" in said
    assert "continue with" not in said
    (folder.path / "checkpoints" / "step-00000020").mkdir(parents=True)
    folder.end("stopped", exit_code=75, resumable=True)
    assert fsdptool(["watch", "runs/one"]) == 75
    assert "continue with --resume auto" in capsys.readouterr().out
    # A summary of an earlier start says nothing about this one.
    later = time.time() + 10
    os.utime(folder.path / "run.json", (later, later))
    assert read_view(folder.path).state == "dead"
    assert fsdptool(["watch", "runs"]) == 2
    assert "is not a run folder" in capsys.readouterr().err


def test_a_copy_of_a_run_says_what_the_run_says(folder: Folder) -> None:
    """Copying sets new times, in any order."""
    write_start(folder.path, Start(2, "cpu", started=folder.now - 100), None)
    folder.end("completed")
    later = time.time() + 10
    for number, name in enumerate(("summary.json", "run.json")):
        os.utime(folder.path / name, (later + number, later + number))
    view = read_view(folder.path)
    assert (view.state, view.measured_peak_bytes, len(view.nodes)) == ("completed", 1001, 1)


def test_a_pipe_follows_a_run_line_by_line_and_ends_with_it(
    locked: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: Any = sys.stdout

    def go_on() -> None:
        while "step 20/60" not in printed.getvalue():
            time.sleep(0.01)
        with (locked.path / "metrics.jsonl").open("a") as stream:
            stream.write(locked.step(60))
        locked.event(0, "checkpoint", step=60, path="", seconds=1.5)
        locked.end("completed")

    threading.Thread(target=go_on, daemon=True).start()
    assert fsdptool(["watch", "runs/one"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("runs/one: running, step 20/60, ")
    assert any(line.startswith("step 60/60  loss 5.4000") for line in lines)
    assert "step 60  checkpoint written in 1.5 s" in lines
    assert any(line.startswith("runs/one: completed, step 60/60") for line in lines)
    assert not any("\x1b" in line for line in lines)


def test_the_list_of_runs_names_what_runs_and_what_ended_how(
    locked: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Folder(tmp_path / "runs" / "deeper" / "two").end("completed")
    damaged = tmp_path / "runs" / "three"
    damaged.mkdir()
    (damaged / "run.json").write_text("{")
    assert fsdptool(["runs", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check(document, "runs", where="the answer")
    states = [(Path(run["folder"]).name, run["state"]) for run in document["runs"]]
    assert states == [("one", "running"), ("two", "completed")]
    assert "three" in document["unreadable"][0]
    assert fsdptool(["runs"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"runs/one +running +20/60 +5\.8000 +\d+ s left", text), text
    assert "\x1b" not in text
    assert fsdptool(["runs", "runs", "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("folder,state,step,total_steps,")
    assert fsdptool(["runs", "nowhere"]) == 2


def test_a_page_of_a_run_fetches_nothing_and_escapes_names(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    folder.event(0, "failure", message="<script>alert(1)</script>", help=None)
    assert fsdptool(["report", "runs/one", "-o", "run.html"]) == 0
    page = Path("run.html").read_text()
    tags: list[str] = []

    class Tags(HTMLParser):
        def handle_starttag(self, tag: str, attributes: Any) -> None:
            tags.append(tag)

    Tags().feed(page)
    assert "script" not in tags
    assert tags.count("polyline") == 4, "the curves of loss and throughput, for broad and narrow screens"
    assert 'viewBox="0 0 380 ' in page and "min-width:38rem" not in page, "a telephone shows all steps"
    assert "http" not in page.replace("http-equiv", "")
    assert "\x1b" not in page
    assert "step 10: 4.5" in page
    assert fsdptool(["report", "runs/one", "-o", "run.html"]) == 2, "an existing page is kept"
    assert "already exists" in capsys.readouterr().err
    for words, complaint in (
        (("runs/one", "-o", "run.txt"), "written as .html"),
        (("plan.json", "-o", "x.html"), "plan.json does not exist"),
    ):
        assert fsdptool(["report", *words]) == 2
        assert complaint in capsys.readouterr().err


def test_damaged_figures_of_a_folder_are_passed_over(folder: Folder) -> None:
    with (folder.path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": "x", "time": null}\n[1]\n{"step": 21\n')
    folder.event(0, "memory", moments={"forward": "much"})
    (folder.path / "recipe.json").write_text("[]")
    view = read_view(folder.path)
    assert (view.step, view.model) == (20, None)


def seen(rank: int, ago: float, *, waiting: bool, step: int = 7, alive: float = 0.5) -> RankProgress:
    return RankProgress(rank, "training", step, 1000.0 - alive, 1000.0 - ago, waiting, 1.0)


@pytest.mark.parametrize(
    ("others", "stopped", "silent"),
    [
        # rank 0 waited 20 s in a collective of step 7
        ({1: seen(1, 20, waiting=True), 2: seen(2, 21, waiting=True)}, [2], (2,)),
        ({1: seen(1, 20, waiting=True), 2: None}, [], (2,)),
        ({1: seen(1, 20, waiting=True), 2: seen(2, 21, waiting=False, alive=20)}, [], (2,)),
        ({1: seen(1, 20, waiting=True), 2: seen(2, 21, waiting=False)}, [], (2,)),
        ({1: seen(1, 20, waiting=True), 2: seen(2, 1, waiting=False)}, [], ()),
        ({1: seen(1, 20, waiting=True), 2: seen(2, 25, waiting=True, step=6)}, [], (2,)),
        ({1: seen(1, 20, waiting=True), 2: seen(2, 25, waiting=True)}, [], ()),
    ],
    ids=["stopped", "never started", "gone", "stuck", "slow", "behind", "unclear"],
)
def test_the_silent_rank_is_told_from_those_that_wait_for_it(
    others: dict[int, RankProgress | None], stopped: list[int], silent: tuple[int, ...]
) -> None:
    ranks = {0: seen(0, 20, waiting=True), **others}
    assert silent_ranks(ranks, reporters=[0], stopped=stopped, now=1000.0) == silent


def test_the_progress_of_an_earlier_start_gives_way_to_the_events_of_this_one(folder: Folder) -> None:
    old = RankProgress(0, "training", 90, folder.now - 500, folder.now - 500, False, 1.0)
    ProgressFile(folder.path, 0).write(old)
    now = read_progress(folder.path, 0)
    assert now is not None
    assert (now.phase, now.step) == ("starting", None)
    ProgressFile(folder.path, 0).write(new := RankProgress(0, "x" * 40, 9, folder.now, folder.now, True, 1.0))
    assert to_json(read_progress(folder.path, 0)) == to_json(new)


def test_axes_and_sparklines_hold_for_flat_and_missing_values() -> None:
    assert axis_ticks(0.0, 0.0)[0] <= 0.0 < axis_ticks(0.0, 0.0)[-1]
    assert axis_ticks(4.5, 5.6) == [4.5, 5.0, 5.5, 6.0]
    assert axis_ticks(1e-9, 1e-9)
    assert sparkline([1.0]) == ""
    assert sparkline([1.0, None, 2.0]) == "▁ █"


def test_a_run_folder_is_diagnosed_from_events_logs_plan_and_checkpoints(
    folder: Folder, capsys: pytest.CaptureFixture[str]
) -> None:
    frames = ["  File '/venv/torch/optim/adamw.py', line 3, in step\n"]
    memory = {"moment": "optimizer step", "live": [], "largest": []}
    told = {"message": "out of memory in optimizer step", "out_of_memory": True, "exit_code": 4}
    folder.event(1, "failure", **told, memory=memory, traceback=frames, secondary=False)
    gone = {"message": "Connection closed by peer", "secondary": True, "exit_code": 4, "traceback": []}
    folder.event(0, "failure", **gone)
    (folder.path / "logs" / "rank-00001.log").write_text("some library said hello\n")
    step = {"change": "full checkpointing", "device_total_bytes": 2**30, "cost": "time"}
    account = {
        **{"rank": 1, "seen": {**memory, "live": [{"name": "parameters", "bytes": 2**20}]}},
        **{"planned_moment": None, "planned_bytes": None, "peak_moment": None, "peak_bytes": None},
        "next_steps": [step],
    }
    (folder.path / "logs" / "out-of-memory.json").write_text(json.dumps(account))
    assert fsdptool(["diagnose", "runs/one"]) == 0
    said = capsys.readouterr().out
    assert "GPU out of memory in optimizer (rank 1) [RUN001]" in said
    assert "1.00 MiB  parameters" in said, "what was alive"
    assert "next step: full checkpointing: 1.00 GiB per rank" in said, "the plan's suggestion"
    assert "consequence: another rank went away (rank 0) [RUN013]" in said
    assert "note: the processes are gone without a summary: the machine went down" in said
    (folder.path / "logs" / "rank-00000.log").write_text("OSError: [Errno 28] No space left on device\n")
    assert fsdptool(["diagnose", "runs/one"]) == 0
    assert "without a summary: it could not be written either" in capsys.readouterr().out
    folder.end("completed")
    assert fsdptool(["diagnose", "runs/one"]) == 0
    assert "the run has not failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "waits"),
    [
        ("torch.distributed.distributed_c10d", True),
        ("fsdptool.distributed.session", True),
        ("fsdptool.training.step", True),
        ("fsdptool.training.data.loader", False),
        ("fsdptool.training.trainer", False),
    ],
)
def test_a_rank_that_reads_the_result_of_a_collective_waits_for_others(module: str, waits: bool) -> None:
    """On a GPU the host hangs there, and not in the call that started the collective."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    assert waits_for_others(spec.origin) == waits
