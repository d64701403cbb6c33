"""The supervisor against real processes: who died, why, how soon the others end, and signals."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdptool.launch import supervise
from fsdptool.launch.command import LaunchCommand
from fsdptool.launch.outcome import RunOutcome
from fsdptool.launch.supervise import Supervisor
from fsdptool.runs.events import event_path, read_lines
from fsdptool.runs.signals import handle_stop_signals
from fsdptool.runs.watchdog import is_running

PLAY = Path(__file__).with_name("play_workers.py")


class Stage:
    """A run folder whose ranks follow a script."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "events").mkdir()
        (folder / "logs").mkdir()
        self.told: list[Mapping[str, Any]] = []

    def play(self, *acts: str) -> RunOutcome:
        return self.supervise(sys.executable, str(PLAY), str(self.folder), *acts)

    def supervise(self, *argv: str) -> RunOutcome:
        with handle_stop_signals("", "") as stops:
            stops.collect()
            command = LaunchCommand(argv)
            return Supervisor(self.folder, command, signals=stops.taken, on_event=self.told.append).run()

    def when_training(self, ranks: int, act: Any) -> None:
        """Call ``act(pids)`` once every rank says that it trains."""

        def watch() -> None:
            pids: dict[int, int] = {}
            while len(pids) < ranks:
                for rank in range(ranks):
                    for event in read_lines(event_path(self.folder, rank)):
                        if event["kind"] == "phase":
                            pids[rank] = event["pid"]
                time.sleep(0.01)
            act(pids)

        threading.Thread(target=watch, daemon=True).start()


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr(supervise, "FAILURE_GRACE_SECONDS", 1.0)
    return Stage(tmp_path)


def gone(stage: Stage, ranks: int) -> bool:
    pids = [event["pid"] for rank in range(ranks) for event in read_lines(event_path(stage.folder, rank))]
    return not any(is_running(pid) for pid in pids)


@pytest.mark.slow
def test_a_run_ends_when_every_rank_has_finished(stage: Stage) -> None:
    outcome = stage.play("finish", "finish")
    assert outcome.status == "completed"
    assert sorted(outcome.finished) == [0, 1]


@pytest.mark.slow
def test_a_rank_that_is_killed_is_named_and_the_deaf_end_with_it(stage: Stage) -> None:
    outcome = stage.play("deaf", "die", "deaf")
    assert outcome.status == "failed"
    assert outcome.failure is not None
    assert outcome.failure.rank == 1
    assert outcome.failure.message.startswith("rank 1 (process ")
    assert outcome.failure.exit_code == 4
    assert gone(stage, 3)
    assert "play_workers.py" in (stage.folder / "logs" / "rank-00000.stacks").read_text()


@pytest.mark.slow
def test_the_cause_is_named_before_its_symptoms(stage: Stage) -> None:
    outcome = stage.play("symptom", "die")
    assert outcome.failure is not None
    assert outcome.failure.rank == 1, "a closed connection is what a death looks like from outside"


@pytest.mark.slow
def test_a_restart_that_follows_at_once_is_explained_by_its_cause(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor sees the next attempt before it has looked at the dead rank twice."""
    monkeypatch.setattr(supervise, "POLL_SECONDS", 1.0)
    # A busy machine may take longer than a poll to start the next attempt.
    monkeypatch.setattr(supervise, "FAILURE_GRACE_SECONDS", 60.0)
    assert stage.play("symptom", "die", "then", "finish", "finish").status == "completed"
    (restart,) = [event for event in stage.told if event["kind"] == "restarted"]
    assert restart["failure"].startswith("rank 1 (process "), restart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("survivor", "silent", "said"),
    [
        ("gives up", "freezes", r"no progress since training \(step 7\), \d+ s ago; its process is stopped"),
        ("gives up", "sleeps", r"no progress since training \(step 7\), \d+ s ago; rank 0 gave up"),
        ("aborts", "freezes", r"no progress since training \(step 7\), \d+ s ago; its process is stopped"),
    ],
)
def test_a_hang_names_the_silent_rank_not_the_one_that_gave_up(
    stage: Stage, survivor: str, silent: str, said: str
) -> None:
    outcome = stage.play(survivor, silent)
    assert outcome.failure is not None
    assert outcome.failure.rank == 1
    assert re.match(rf"rank 1: {said}", outcome.failure.message), outcome.failure.message
    assert outcome.failure.help is not None
    assert "rank-00001.log" in outcome.failure.help
    assert outcome.failure.exit_code == 4
    assert gone(stage, 2)


@pytest.mark.slow
def test_a_timeout_without_a_silent_rank_is_the_reporters(stage: Stage) -> None:
    outcome = stage.play("gives up", "gives up")
    assert outcome.failure is not None
    assert re.match(r"rank [01]: Timed out waiting", outcome.failure.message)


def test_an_error_of_the_persons_making_keeps_its_exit_code_and_help(stage: Stage) -> None:
    outcome = stage.play("deaf", "refuse")
    assert outcome.failure is not None
    assert outcome.failure.message == "rank 1: the recipe asks for the moon"
    assert outcome.failure.help == "ask for less"
    assert outcome.failure.exit_code == 2
    assert not outcome.failure.retryable


@pytest.mark.slow
def test_a_bug_is_a_failed_worker(stage: Stage) -> None:
    outcome = stage.play("fail", "deaf")
    assert outcome.failure is not None
    assert (outcome.failure.message, outcome.failure.exit_code) == ("rank 0: a bug", 4)
    assert "RuntimeError: a bug" in (stage.folder / "logs" / "rank-00000.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_parent_reaches_every_rank(stage: Stage, number: signal.Signals) -> None:
    stage.when_training(2, lambda pids: os.kill(os.getpid(), number))
    outcome = stage.play("stop", "stop")
    assert outcome.status == "stopped"
    assert [event["signal"] for event in outcome.finished.values()] == [signal.SIGUSR1] * 2
    assert any(event["kind"] == "stop_requested" for event in stage.told)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_one_rank_is_seen_by_its_flag(stage: Stage, number: signal.Signals) -> None:
    stage.when_training(1, lambda pids: os.kill(pids[0], number))
    outcome = stage.play("stop")
    assert outcome.status == "stopped"
    assert outcome.finished[0]["signal"] == number


def test_a_second_signal_to_the_parent_ends_everything_at_once(stage: Stage) -> None:
    def twice(pids: dict[int, int]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while not any(event["kind"] == "stop_requested" for event in stage.told):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    stage.when_training(2, twice)
    assert stage.play("deaf", "deaf").status == "interrupted"
    assert gone(stage, 2)


def test_a_launcher_that_a_stop_ends_before_any_step_can_be_resumed(stage: Stage) -> None:
    program = "import os, signal; os.kill(os.getppid(), signal.SIGUSR1); raise SystemExit(9)"
    outcome = stage.supervise(sys.executable, "-c", program)
    assert outcome.status == "stopped"


def test_a_rank_that_a_stop_ends_before_its_handlers_can_be_resumed(stage: Stage) -> None:
    """Known by what torchrun says of it; a kill is a failure all the same."""
    line = "E: failed (exitcode: -{}) local_rank: 1 (pid: 1) of binary: python"
    for number, status in ((signal.SIGTERM, "stopped"), (signal.SIGKILL, "failed")):
        program = f"import sys; sys.exit('{line.format(int(number))}')"
        assert stage.supervise(sys.executable, "-c", program).status == status


def test_who_shows_the_run_may_go_away(stage: Stage) -> None:
    def gone_already(event: Mapping[str, Any]) -> None:
        raise BrokenPipeError

    command = LaunchCommand((sys.executable, str(PLAY), str(stage.folder), "finish"))
    assert Supervisor(stage.folder, command, on_event=gone_already).run().status == "completed"


def test_a_full_disk_is_said_by_a_rank_that_can_write_nothing(stage: Stage) -> None:
    (stage.folder / "events").rmdir()
    (stage.folder / "events").symlink_to("/dev/full")
    (stage.folder / "logs").rmdir()
    outcome = stage.play("finish")
    assert outcome.failure is not None
    assert outcome.failure.exit_code == 2
    assert "cannot be written" in outcome.failure.message


@pytest.mark.slow
def test_a_second_signal_to_a_rank_ends_it(stage: Stage) -> None:
    def insist(pids: dict[int, int]) -> None:
        # Those of the first five seconds count as echoes of the first one.
        while is_running(pids[0]):
            os.kill(pids[0], signal.SIGTERM)
            time.sleep(1.0)

    stage.when_training(1, insist)
    outcome = stage.play("deaf")
    assert outcome.failure is not None
    assert outcome.failure.rank == 0


def test_workers_that_never_start_leave_their_last_line(stage: Stage) -> None:
    command = LaunchCommand((sys.executable, "-c", "raise SystemExit('no such thing')"))
    outcome = Supervisor(stage.folder, command).run()
    assert outcome.failure is not None
    assert outcome.failure.message == "the workers failed to start: no such thing"
