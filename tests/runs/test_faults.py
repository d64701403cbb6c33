"""Whatever happens to a run, it goes on, and ends bit for bit where the undisturbed one does."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from real_runs import STEPS, Run, Work, blocked, digests, losses, release

from fsdptool.cli.app import run as fsdptool
from fsdptool.runs.manifest import list_checkpoints, step_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def same_end(run: Run, undisturbed: Run) -> None:
    assert losses(run.folder) == losses(undisturbed.folder)
    assert len(losses(run.folder)) == STEPS
    assert digests(run.folder) == digests(undisturbed.folder)


def test_a_full_disk_a_bad_value_a_signal_to_one_rank_and_damage(
    work: Work, undisturbed: Run, tmp_path: Path
) -> None:
    """One run that ends four times; each time it goes on with what it has."""

    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    run = work.start("unlucky", "--max-restarts", "2", before=small_disk)
    assert run.end() == 2, run.said()
    assert run.summary()["restarts"] == 0, "another start cannot help"
    assert "the checkpoint cannot be written: rank" in run.said()
    assert "File too large" in run.said()
    assert "Traceback" not in run.said()

    flag = tmp_path / "poison"
    flag.write_text("")
    (tmp_path / "sitecustomize.py").write_text(Path(__file__).with_name("poison_step.py").read_text())
    poison = {"PYTHONPATH": str(tmp_path), "POISON_STEP": "7", "POISON_WHILE": str(flag)}
    run = work.start("unlucky", "--resume", "auto", "--start-over", environment=poison)
    assert run.end() == 4, run.said()
    assert "step 7: the loss is not finite" in run.said()
    assert run.summary()["last_good_step"] == 4
    flag.unlink()

    block = blocked(tmp_path / "block", ranks="0", step=5)
    run = work.start("unlucky", "--resume", "auto", environment=block)
    run.wait_for_step(8)  # which no start before this one took; before the next step rank 0 is blocked
    os.kill(run.pid(1), signal.SIGTERM)
    release(run.process, block)
    assert run.end() == 75, run.said()
    assert "continuing from step 4" in run.said()
    summary = run.summary()
    assert (summary["status"], summary["resumable"], summary["failure"]) == ("stopped", True, None)
    assert summary["last_good_step"] == summary["steps"], "it saved where it stopped"
    damaged, before, *_ = list_checkpoints(run.folder / "checkpoints")
    assert str(damaged).endswith(summary["last_checkpoint"])
    shard = damaged / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])

    run = work.start("unlucky", "--resume", "auto")
    assert run.end() == 0, run.said()
    assert "shard-00000.safetensors has" in run.said(), "damage is said, not hidden"
    assert f"continuing from step {step_of(before)}" in run.said()
    same_end(run, undisturbed)


def test_a_data_worker_that_dies(work: Work, undisturbed: Run, tmp_path: Path) -> None:
    recipe = work.folder / "workers.yaml"
    recipe.write_text((work.folder / "recipe.yaml").read_text().replace("workers: 0", "workers: 1"))
    block = blocked(tmp_path, ranks="0")
    run = work.start("workers", recipe="workers.yaml", environment=block)
    run.wait_for_step(5)
    parent = run.pid(0)
    children = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    assert children, "the rank has a loading process"
    for child in children:
        os.kill(child, signal.SIGKILL)
    release(run.process, block)
    status = run.end()
    if status != 0:
        assert status == 4, run.said()
        assert "rank 0: " in run.said()
        run = work.start("workers", "--resume", "auto", recipe="workers.yaml")
        assert run.end() == 0, run.said()
    same_end(run, undisturbed)


def test_a_rank_that_waits_for_ever_a_killed_one_and_all_killed(
    work: Work, undisturbed: Run, tmp_path: Path
) -> None:
    """Three restarts: a rank never reaches a collective, one is killed, all are inside a checkpoint."""
    run = work.start(
        "killed", "--timeout", "15", "--max-restarts", "3", environment=blocked(tmp_path, ranks="1")
    )
    run.wait_for_step(6)  # in which the first start is blocked
    stacks = [path.read_text() for path in sorted((run.folder / "logs").glob("rank-*.stacks"))]
    os.kill(run.pid(1), signal.SIGKILL)
    while not any((run.folder / "checkpoints").glob(".step-00000012.part")):
        assert run.process.poll() is None, run.said()
        time.sleep(0.002)
    for rank in (0, 1):
        os.kill(run.pid(rank), signal.SIGKILL)
    assert run.end() == 0, run.said()
    assert re.search(r"restart 1: rank 1: no progress for \d+ s while loading data", run.said()), run.said()
    assert "in wait_for_file" in stacks[1], "the rank that hung says where"
    assert "step.py" in stacks[0], "and so does the one that waited for it"
    assert "restart 2: rank 1 (process " in run.said(), run.said()
    assert re.search(r"restart 3: rank [01]", run.said()), run.said()
    assert run.summary()["restarts"] == 3
    same_end(run, undisturbed)


def test_ranks_that_all_wait_for_a_file_end_within_the_bound(work: Work, tmp_path: Path) -> None:
    run = work.start("all-blocked", "--timeout", "10", environment=blocked(tmp_path, "0,1"))
    run.wait_for_step(5)
    assert run.end(seconds=60.0) == 4, run.said()
    failure = run.summary()["failure"]
    assert "while loading data" in failure["message"]
    assert failure["exit_code"] == 4
    stacks = [path.read_text() for path in (run.folder / "logs").glob("rank-*.stacks")]
    assert len(stacks) == 2
    assert all("in wait_for_file" in text for text in stacks)


def test_a_run_that_hangs(work: Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole path of a person whose run stands still: see it, wait, find the cause, tell others."""

    def ask(*arguments: str, status: int = 0) -> dict[str, Any]:
        assert fsdptool([*arguments, "--format", "json"]) == status
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document

    # Long enough for a busy machine to start two ranks at different speeds; the wait costs no computing.
    run = work.start("hung", "--timeout", "12", environment=blocked(tmp_path, ranks="1"))
    run.wait_for_step(5)  # so that rank 1 does not end meanwhile
    os.kill(run.pid(1), signal.SIGSTOP)
    (listed,) = ask("runs", str(run.folder))["runs"]
    assert (listed["state"], [rank["rank"] for rank in listed["ranks"]]) == ("running", [0, 1])
    assert run.end() == 4, run.said()
    failure = json.loads((run.folder / "summary.json").read_text())["failure"]
    assert failure["rank"] == 1, failure
    # Which phase the signal meets depends on the machine: training, saving, loading data.
    silence = r"rank 1: no progress since [a-z ]+( \(step \d+\))?, \d+ s ago; its process is stopped"
    assert re.match(silence, failure["message"]), failure
    stacks = [path.read_text() for path in sorted((run.folder / "logs").glob("rank-*.stacks"))]
    events = (run.folder / "events" / "rank-00000.jsonl").read_text()
    assert "trainer.py" in events, "the rank that gave up says where it was"
    assert len(stacks) == 2
    folder = str(run.folder)
    view = ask("watch", folder, status=4)
    assert (view["state"], view["failure"]["rank"]) == ("failed", 1)
    cause, consequence = ask("diagnose", folder)["failures"]
    assert (cause["code"], cause["ranks"], cause["consequence"]) == ("RUN053", [1], False)
    assert (consequence["code"], consequence["ranks"], consequence["consequence"]) == ("RUN010", [0], True)
    assert fsdptool(["diagnose", folder]) == 0
    text = capsys.readouterr().out
    assert re.search(r"cause: .*\n  change: .*--timeout", text), text
    assert re.search(r"note: the newest checkpoint is that of step \d+: --resume auto continues", text), text
    assert fsdptool(["report", folder, "-o", str(tmp_path / "run.html")]) == 0
    assert re.search(r"no progress since [a-z ]+", (tmp_path / "run.html").read_text())


def test_a_run_that_was_killed_before_its_first_checkpoint(
    work: Work, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing starts over unasked; a relaunch of the same start, which somebody asked for, says so."""
    recipe = work.folder / "unsaved.yaml"
    recipe.write_text((work.folder / "recipe.yaml").read_text().replace("every_steps: 4", "every_steps: 99"))
    block = blocked(tmp_path, ranks="0,1", step=4)
    run = work.start("unsaved", "--timeout", "20", recipe="unsaved.yaml", environment=block)
    run.wait_for_step(3)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.end() == 4, run.said()
    lost = len(losses(run.folder))
    advice = f"no checkpoint exists: {lost} steps are lost; --resume auto --start-over starts over"
    assert advice in run.said()
    assert "continue with --resume" not in run.said()
    assert fsdptool(["watch", str(run.folder)]) == 4
    assert advice in capsys.readouterr().out
    again = work.arguments("unsaved", "--resume", "auto", recipe="unsaved.yaml")
    assert fsdptool(again) == 2
    said = capsys.readouterr().err
    assert f"no checkpoint exists in {run.folder}: {lost} steps are lost" in said
    assert "--start-over" in said
    assert len(losses(run.folder)) == lost, "nothing was touched"
    run = work.start("unsaved", "--resume", "auto", "--start-over", recipe="unsaved.yaml")
    assert run.end() == 0, run.said()
    assert f"no checkpoint exists: {lost} steps are lost, the run starts over" in run.said()
    assert len(losses(run.folder)) == STEPS
