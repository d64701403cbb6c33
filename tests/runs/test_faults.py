"""Whatever happens to a run, it goes on, and ends bit for bit where the undisturbed one does."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
from pathlib import Path

import pytest
from conftest import STEPS, Run, Work, digests, losses

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def same_end(run: Run, undisturbed: Run) -> None:
    assert losses(run.folder) == losses(undisturbed.folder)
    assert len(losses(run.folder)) == STEPS
    assert digests(run.folder) == digests(undisturbed.folder)


def test_a_killed_rank_is_named_and_the_run_goes_on_by_itself(work: Work, undisturbed: Run) -> None:
    run = work.start("killed", "--max-restarts", "1")
    run.wait_for_step(6)
    os.kill(run.pid(1), signal.SIGKILL)
    assert run.end() == 0, run.said()
    assert "rank 1 (process " in run.said()
    assert run.summary()["restarts"] == 1
    same_end(run, undisturbed)


def test_a_signal_to_one_rank_stops_all_and_damage_costs_one_interval(work: Work, undisturbed: Run) -> None:
    run = work.start("stopped")
    run.wait_for_step(5)
    os.kill(run.pid(1), signal.SIGTERM)
    assert run.end() == 75, run.said()
    summary = run.summary()
    assert (summary["status"], summary["resumable"], summary["failure"]) == ("stopped", True, None)
    assert summary["last_good_step"] == summary["steps"], "it saved where it stopped"
    shard = run.folder / summary["last_checkpoint"] / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    again = work.start("stopped", "--resume", "auto")
    assert again.end() == 0, again.said()
    assert "shard-00000.safetensors has" in again.said(), "damage is said, not hidden"
    assert "continuing from step 4" in again.said()
    same_end(again, undisturbed)


def test_a_full_disk_is_one_line_and_the_run_goes_on_with_space(work: Work, undisturbed: Run) -> None:
    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    run = work.start("full", "--max-restarts", "2", before=small_disk)
    assert run.end() == 2, run.said()
    assert run.summary()["restarts"] == 0, "another start cannot help"
    assert "the checkpoint cannot be written: rank" in run.said()
    assert "File too large" in run.said()
    assert "Traceback" not in run.said()
    again = work.start("full", "--resume", "auto")
    assert again.end() == 0, again.said()
    same_end(again, undisturbed)


def test_all_ranks_killed_while_a_checkpoint_is_written(work: Work, undisturbed: Run) -> None:
    run = work.start("all", "--max-restarts", "1")
    while not any((run.folder / "checkpoints").glob(".step-00000008.part")):
        assert run.process.poll() is None, run.said()
    for rank in (0, 1):
        os.kill(run.pid(rank), signal.SIGKILL)
    assert run.end() == 0, run.said()
    same_end(run, undisturbed)


def test_a_data_worker_that_dies(work: Work, undisturbed: Run) -> None:
    recipe = work.folder / "workers.yaml"
    recipe.write_text((work.folder / "recipe.yaml").read_text().replace("workers: 0", "workers: 1"))
    run = work.start("workers", recipe="workers.yaml")
    run.wait_for_step(5)
    parent = run.pid(0)
    children = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    assert children, "the rank has a loading process"
    for child in children:
        os.kill(child, signal.SIGKILL)
    status = run.end()
    if status != 0:
        assert status == 4, run.said()
        assert "rank 0: " in run.said()
        run = work.start("workers", "--resume", "auto", recipe="workers.yaml")
        assert run.end() == 0, run.said()
    same_end(run, undisturbed)


def test_a_value_that_is_not_finite_stops_every_rank(work: Work, undisturbed: Run, tmp_path: Path) -> None:
    flag = tmp_path / "poison"
    flag.write_text("")
    (tmp_path / "sitecustomize.py").write_text(Path(__file__).with_name("poison_step.py").read_text())
    poison = {"PYTHONPATH": str(tmp_path), "POISON_STEP": "7", "POISON_WHILE": str(flag)}
    run = work.start("poisoned", environment=poison)
    assert run.end() == 4, run.said()
    assert "step 7: the loss is not finite" in run.said()
    assert run.summary()["last_good_step"] == 4
    flag.unlink()
    again = work.start("poisoned", "--resume", "auto", environment=poison)
    assert again.end() == 0, again.said()
    same_end(again, undisturbed)


def blocked(tmp_path: Path, ranks: str) -> dict[str, str]:
    (tmp_path / "sitecustomize.py").write_text(Path(__file__).with_name("block_data.py").read_text())
    os.mkfifo(tmp_path / "never")
    return {
        "PYTHONPATH": str(tmp_path),
        "BLOCK_STEP": "6",
        "BLOCK_FILE": str(tmp_path / "never"),
        "BLOCK_RANKS": ranks,
    }


def test_a_rank_that_never_reaches_a_collective_is_named_and_the_run_goes_on(
    work: Work, undisturbed: Run, tmp_path: Path
) -> None:
    environment = blocked(tmp_path, "1")
    run = work.start("blocked", "--timeout", "10", "--max-restarts", "1", environment=environment)
    assert run.end() == 0, run.said()
    assert re.search(r"restart 1: rank 1: no sign of life for \d+ s while loading data", run.said()), (
        run.said()
    )
    stacks = [path.read_text() for path in sorted((run.folder / "logs").glob("rank-*.stacks"))]
    assert "in wait_for_file" in stacks[1], "the rank that hung says where"
    assert "step.py" in stacks[0], "and so does the one that waited for it"
    assert run.summary()["restarts"] == 1
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


def test_a_rank_that_hangs_leaves_the_stacks_of_all(work: Work) -> None:
    run = work.start("hung", "--timeout", "3")
    run.wait_for_step(3)
    os.kill(run.pid(1), signal.SIGSTOP)
    assert run.end() == 4, run.said()
    assert "imed out" in run.said()
    stacks = [path.read_text() for path in sorted((run.folder / "logs").glob("rank-*.stacks"))]
    events = (run.folder / "events" / "rank-00000.jsonl").read_text()
    assert "loop.py" in events, "the rank that gave up says where it was"
    assert len(stacks) == 2
    assert json.loads((run.folder / "summary.json").read_text())["failure"]["rank"] == 0
