"""The queue with real processes: sets that overlap, servers that die, runs that outlive them."""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from desk import PLAY, Desk

from fsdptool.cli.app import run
from fsdptool.errors import ConfigError, StorageError
from fsdptool.launch.processes import ProcessIdentity, identify, is_alive, start_gated, stop_run
from fsdptool.launch.queue import file, scheduler
from fsdptool.launch.queue.file import update
from fsdptool.launch.queue.needs import find_needs, find_waits
from fsdptool.records.queue import EntryState, Needs, Wait
from fsdptool.records.schema import generate
from fsdptool.runs.events import event_path, read_lines

EXAMPLES = Path(__file__).parents[2] / "examples"

SERVER = """\
import sys, threading
from fsdptool.launch.queue.entries import Queue
from fsdptool.launch.queue.scheduler import Scheduler
Scheduler(Queue(), command=sys.argv[1:]).run(threading.Event())
"""


def needs(name: str, gpus: str = "", slots: int = 0) -> Needs:
    return Needs(name, frozenset(gpus.split(",")) - {""}, slots)


@pytest.mark.parametrize(
    ("waiting", "occupied", "waits"),
    [
        ([needs("a", "0,1"), needs("b", "1")], [], [None, Wait("gpus", ("1",), "a", False)]),
        ([needs("a", "0"), needs("b", "1")], [], [None, None]),
        # The second needs a GPU that the first one waits for: it does not overtake.
        (
            [needs("a", "0,1"), needs("b", "1"), needs("c", "2")],
            [needs("live", "0")],
            [Wait("gpus", ("0",), "live", False), Wait("gpus", ("1",), "a", True), None],
        ),
        ([needs("a")], [needs("a")], [Wait("folder", (), "a", False)]),
        (
            [needs("a", slots=3), needs("b", slots=1)],
            [needs("live", slots=2)],
            [Wait("slots", (), "live", False), Wait("slots", (), "a", True)],
        ),
        ([needs("a", slots=1), needs("b", slots=2)], [needs("live", slots=1)], [None, None]),
        # More slots than the machine has: alone.
        ([needs("a", slots=9), needs("b", slots=1)], [], [None, Wait("slots", (), "a", False)]),
        ([needs("a", "0"), needs("b", slots=4)], [], [None, None]),
    ],
)
def test_sets_that_overlap_wait_and_order_is_kept(
    waiting: list[Needs], occupied: list[Needs], waits: list[Wait | None]
) -> None:
    assert find_waits(waiting, occupied, slots=4) == tuple(waits)


@pytest.mark.slow
def test_overlapping_sets_never_run_together_and_the_next_starts_by_itself(desk: Desk) -> None:
    both, one, two = desk.add("both", gpus="0,1"), desk.add("one", gpus="1"), desk.add("two", gpus="2")
    desk.until(both, EntryState.RUNNING)
    desk.until(two, EntryState.RUNNING)
    assert desk.entry(one).state is EntryState.WAITING
    assert desk.entry(one).wait == Wait("gpus", ("1",), desk.entry(both).folder, False)
    desk.go("one")
    desk.go("two")
    desk.until(two, EntryState.COMPLETED)
    assert desk.entry(one).state is EntryState.WAITING, "its GPU is still in use"
    desk.go("both")
    desk.until(one, EntryState.COMPLETED)
    ends = {name: times(desk.folder / name / "run") for name in ("both", "one")}
    assert ends["both"][1] <= ends["one"][0]
    assert desk.entry(both).state is EntryState.COMPLETED
    assert not desk.scheduler.tick(), "nothing waits or runs"


def times(folder: Path) -> tuple[float, float]:
    """Return when the worker of a played run started and finished."""
    moments = [event["time"] for event in read_lines(event_path(folder, 0))]
    return moments[0], moments[-1]


@pytest.mark.slow
def test_a_run_outlives_a_killed_server_and_the_next_server_goes_on(desk: Desk) -> None:
    first, second = desk.add("first", gpus="0"), desk.add("second", gpus="0")
    server = subprocess.Popen([sys.executable, "-c", SERVER, *PLAY])
    try:
        running = desk.until(first, EntryState.RUNNING, tick=False)
        assert not desk.scheduler.acquire(), "one program at a time starts the entries"
        assert desk.queue.report().scheduler == server.pid
    finally:
        server.kill()
        server.wait(timeout=60)
    assert desk.entry(first).state is EntryState.RUNNING
    desk.go("first")
    desk.until(first, EntryState.COMPLETED, tick=False)
    assert desk.entry(second).state is EntryState.WAITING
    assert desk.scheduler.acquire()
    desk.until(second, EntryState.RUNNING)
    assert desk.entry(first).state is EntryState.COMPLETED
    assert running.pid is not None
    desk.go("second")
    desk.until(second, EntryState.COMPLETED)
    desk.scheduler.close()


@pytest.mark.slow
def test_a_command_begins_only_when_its_start_is_written_down(desk: Desk, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "print('begun')"]
    log = tmp_path / "log"
    gate = start_gated(argv, log=log, environment=os.environ, folder=tmp_path)
    assert is_alive(gate.identity)
    gate.abandon()
    assert log.read_text() == ""
    gate = start_gated(argv, log=log, environment=os.environ, folder=tmp_path)
    gate.release()
    assert gate.process.wait(timeout=60) == 0
    assert log.read_text() == "started\nbegun\n"
    # The server died between the record and the release: the entry starts again.
    entry = desk.add("again", gpus="0")
    (desk.queue.folder / "logs").mkdir()
    desk.queue.log_path(entry).touch()
    with desk.queue.file.write() as connection:
        started = {"stage": "started", "started": time.time(), "pid": gate.identity.pid}
        update(connection, entry, {**started, "pid_start": gate.identity.start, "boot": "another"})
    desk.until(entry, EntryState.RUNNING)


@pytest.mark.slow
def test_a_run_whose_log_cannot_be_written_is_not_started_for_ever(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk.queue, "log_path", lambda entry: Path("/dev/null"))
    entry = desk.add("refused", "refuse")
    assert desk.until(entry, EntryState.DEAD).message == file.NO_MESSAGE
    assert not desk.scheduler.tick()


def test_an_entry_that_is_stopped_before_it_begins_does_not_start_again(desk: Desk, tmp_path: Path) -> None:
    entry = desk.add("a")
    log = tmp_path / "log"
    gate = start_gated(["true"], log=log, environment=os.environ, folder=tmp_path)
    with desk.queue.file.write() as connection:
        identity = {"pid": gate.identity.pid, "pid_start": gate.identity.start, "boot": gate.identity.boot}
        update(connection, entry, {"stage": "started", "started": time.time(), **identity})
    assert desk.queue.stop(entry)
    gate.process.wait(timeout=60)
    assert desk.until(entry, EntryState.STOPPED).message is None
    gate.abandon()


def test_another_process_with_the_same_id_is_not_the_run() -> None:
    own = identify(os.getpid())
    assert own is not None
    assert is_alive(own)
    assert not is_alive(ProcessIdentity(own.pid, own.start + 1, own.boot))
    assert not is_alive(ProcessIdentity(own.pid, own.start, "another boot"))


@pytest.mark.slow
def test_stop_saves_and_resume_joins_the_queue_in_the_same_folder(desk: Desk) -> None:
    entry = desk.add("run", gpus="0")
    folder = Path(desk.until(entry, EntryState.RUNNING).folder)
    again = desk.queue.resume(entry)
    desk.scheduler.tick()
    assert desk.entry(again).wait == Wait("folder", (), str(folder), False)
    assert desk.queue.stop(entry)
    assert desk.until(entry, EntryState.STOPPED).message is None
    assert desk.until(again, EntryState.RUNNING).options == ("--resume", "auto")
    assert json.loads((folder / "run.json").read_text())["resume"] == "auto"
    desk.scheduler.tick()
    assert desk.entry(entry).state is EntryState.STOPPED, "the later start does not change the earlier one"
    assert stop_run(folder), "also by its folder, whoever started it"
    desk.until(again, EntryState.STOPPED)
    assert not stop_run(folder)


@pytest.mark.slow
def test_a_run_that_ignores_a_kill_is_killed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_KILL_SECONDS", 0.0)
    entry = desk.add("deaf", "deaf")
    desk.until(entry, EntryState.RUNNING)
    assert desk.queue.kill(entry)
    assert desk.until(entry, EntryState.DEAD).pid is None


@pytest.mark.slow
def test_gpus_of_a_dead_run_are_free_when_its_workers_have_ended(desk: Desk) -> None:
    dead, following = desk.add("dead", "orphan", gpus="0"), desk.add("following", gpus="0")
    folder = Path(desk.entry(dead).folder)
    desk.scheduler.tick()
    process = desk.queue.rows()[0].process
    assert process is not None
    deadline = time.monotonic() + 120
    while is_alive(process):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert desk.until(dead, EntryState.RUNNING).pid is None
    assert desk.entry(following).state is EntryState.WAITING
    worker = next(event["pid"] for event in read_lines(event_path(folder, 0)))
    os.kill(worker, signal.SIGKILL)
    desk.until(dead, EntryState.DEAD)
    desk.until(following, EntryState.RUNNING)


@pytest.mark.slow
def test_failures_before_and_in_a_run_are_told_apart(desk: Desk) -> None:
    refused, died = desk.add("refused", "refuse"), desk.add("died", "die")
    assert desk.until(refused, EntryState.FAILED).message == "the recipe asks for the moon"
    assert desk.until(died, EntryState.DEAD).message is None
    again = desk.queue.resume(refused)
    assert desk.entry(again).options == (), "there is no run to continue"


@pytest.mark.slow
def test_entries_move_are_held_and_cancelled(desk: Desk) -> None:
    a, b, c = (desk.add(name, gpus="0") for name in "abc")

    def order() -> list[int]:
        return [entry.id for entry in desk.queue.report().entries if entry.state.pending]

    desk.queue.move(c, "up")
    assert order() == [a, c, b]
    desk.queue.move(a, "last")
    assert order() == [c, b, a]
    desk.queue.move(c, "up")
    desk.queue.move(a, "first")
    assert order() == [a, c, b]
    desk.queue.hold(a)
    desk.until(c, EntryState.RUNNING)
    assert desk.entry(a).state is EntryState.HELD
    desk.queue.cancel(b)
    desk.queue.release(a)
    assert order() == [a]
    with pytest.raises(ConfigError, match=f"entry {c} was started"):
        desk.queue.cancel(c)
    with pytest.raises(ConfigError, match="has not ended"):
        desk.queue.remove(c)
    with pytest.raises(ConfigError, match="has no entry 99"):
        desk.queue.move(99, "up")
    with pytest.raises(ConfigError, match="waits for"):
        place = desk.folder / "a"
        desk.queue.add(place / "recipe.yaml", desk.config, output=place / "run", needs=needs("x"))
    desk.queue.remove(b)
    assert b not in [entry.id for entry in desk.queue.report().entries]


@pytest.mark.slow
def test_the_first_of_several_is_started_first(desk: Desk) -> None:
    desk.add("later", gpus="0")
    urgent = desk.add("urgent", gpus="0", first=True)
    desk.until(urgent, EntryState.RUNNING)


def broken(act: Callable[[], object]) -> str:
    """Return the one line of an error, and that its advice is there."""
    with pytest.raises((StorageError, ConfigError)) as caught:
        act()
    assert caught.value.help
    assert "\n" not in caught.value.message
    return caught.value.message


def test_a_locked_or_full_or_foreign_database_gives_one_line(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "_BUSY_SECONDS", 0.1)
    entry = desk.add("a")
    with sqlite3.connect(desk.queue.file.path) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert "locked" in broken(lambda: desk.queue.hold(entry))
        other.execute("ROLLBACK")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, hard))
    try:
        said = broken(lambda: desk.queue.hold(entry))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "disk" in said
    assert desk.entry(entry).state is EntryState.WAITING, "nothing half-written"
    with desk.queue.file.write() as connection:
        connection.execute("PRAGMA user_version = 99")
    assert "newer version" in broken(desk.queue.report)
    for path in desk.queue.folder.glob("queue.sqlite*"):
        path.unlink()
    desk.queue.file.path.write_text("not a database" * 100)
    assert "not a queue" in broken(desk.queue.report)
    desk.queue.file.path.unlink()


@pytest.mark.slow
def test_a_scheduler_goes_on_after_a_failure(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = desk.add("a")
    # A file in the place of the logs: the run cannot be started.
    (desk.queue.folder / "logs").write_text("")
    assert "cannot be" in broken(desk.scheduler.tick)
    assert desk.entry(entry).state is EntryState.WAITING
    (desk.queue.folder / "logs").unlink()
    desk.until(entry, EntryState.RUNNING)


def test_the_commands_do_what_the_functions_do(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    desk.config.write_text((EXAMPLES / "configs" / "two_cpu_processes.yaml").read_text())
    recipe = str(EXAMPLES / "recipes" / "decoder_full.yaml")

    def call(*arguments: str) -> str:
        assert run(["queue", *arguments]) == 0
        return capsys.readouterr().out.strip()

    def listed() -> list[dict[str, Any]]:
        document = json.loads(call("list", "--format", "json"))
        jsonschema.Draft202012Validator(generate("queue")).validate(document)
        entries: list[dict[str, Any]] = document["entries"]
        return entries

    call("slots", "3")
    first = call("add", recipe, "--config", str(desk.config), "-o", str(desk.folder / "one"), "--hold")
    second = call("add", recipe, "--config", str(desk.config), "-o", str(desk.folder / "two"), "--no-predict")
    third = call("add", recipe, "--config", str(desk.config), "-o", str(desk.folder / "three"), "--first")
    assert [entry["id"] for entry in listed()] == [int(third), int(first), int(second)]
    assert {entry["slots"] for entry in listed()} == {2}
    call("move", second, "first")
    call("release", first)
    call("hold", third)
    assert [entry["state"] for entry in listed()] == ["waiting", "held", "waiting"]
    assert "no program is running the queue" in call("list")
    for entry in (first, second, third):
        call("cancel", entry)
    assert call("run", "--until-idle") == ""
    for entry in (first, second, third):
        call("remove", entry)
    assert call("list") == "the queue is empty"
    assert run(["queue", "stop", "1"]) == 2
    assert "the queue has no entry 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "visible", "outcome"),
    [
        ({"gpu_ids": "0,1"}, None, {"0", "1"}),
        ({"gpu_ids": "1,0"}, "0,1", {"0", "1"}),
        ({}, "2,3", {"2", "3"}),
        ({"gpu_ids": "0,1"}, "1,2", "sets gpu_ids to 0,1, and GPUs 1,2 were requested"),
        ({}, "2", "is for 2 processes; the requested GPUs are 2"),
        ({"num_machines": 2, "main_process_ip": "node0"}, None, "is for 2 machines"),
        ({"num_processes": 8}, None, "offers 4 GPUs"),
    ],
)
def test_what_a_gpu_run_needs_comes_from_its_configuration(
    desk: Desk,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    visible: str | None,
    outcome: set[str] | str,
) -> None:
    for module in ("distributed.devices", "launch.machine", "launch.prepare"):
        monkeypatch.setattr(f"fsdptool.{module}.count_gpus", lambda: 4)
    settings = yaml.safe_load((EXAMPLES / "configs" / "two_cpu_processes.yaml").read_text())
    settings = {**settings, "use_cpu": False, **changes}
    if "num_processes" not in changes:
        settings["num_processes"] = 2
    desk.config.write_text(yaml.safe_dump(settings))
    if isinstance(outcome, set):
        assert find_needs(desk.config, desk.folder, visible=visible).gpus == outcome
    else:
        said = broken(lambda: find_needs(desk.config, desk.folder, visible=visible))
        assert outcome in said
