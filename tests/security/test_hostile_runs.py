"""Run folders as a stranger packs them, and registers that another user prepared."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import DOCUMENTED, Answer, Cli

from fsdptool.errors import ConfigError, FsdptoolError, StorageError
from fsdptool.files.text import read_lines as text_lines
from fsdptool.launch.machine import live_claims, register_claim
from fsdptool.launch.processes import identify
from fsdptool.records.diagnostic import envelope
from fsdptool.records.run import RankProgress
from fsdptool.runs.events import EventLog, Follower, event_path, read_lines
from fsdptool.runs.folder import write_text
from fsdptool.runs.view import StepReader, read_history
from fsdptool.runs.watchdog import ProgressFile, progress_path

NOW = 1_700_000_000.0
FILES = (
    *("run.json", "recipe.json", "metrics.jsonl", "summary.json", "prediction.json", ".lock"),
    *("events/rank-00000.jsonl", "events/rank-00001.jsonl", "events/rank-00000.progress"),
    *("logs/rank-00000.log", "logs/launcher.log", "logs/out-of-memory.json"),
    *("checkpoints/step-00000002/manifest.json", "events", "logs", "checkpoints"),
)


def sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(300 << 30)


PLANTS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "sparse": sparse,
    "circle": lambda path: path.symlink_to(path.name),
    "folder": lambda path: path.mkdir(),
}


def write_run(folder: Path) -> Path:
    """Write the folder of a run that has died after two steps."""
    for name in ("events", "logs", "checkpoints/step-00000002"):
        (folder / name).mkdir(parents=True)
    start = {"world_size": 2, "device": "cpu", "started": NOW}
    (folder / "run.json").write_text(json.dumps(start))
    (folder / "recipe.json").write_text(json.dumps({"model": {"reference": "m"}, "steps": 10}))
    steps = [
        {
            "step": n,
            "time": NOW + n,
            "loss": 1.0 / n,
            "lr": 0.1,
            "step_seconds": 0.5,
            "samples": 4,
            "tokens": 8,
        }
        for n in (1, 2)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    for rank in (0, 1):
        head = {"time": NOW + 1, "rank": rank, "pid": 1, "node": "elsewhere"}
        lines = [{"kind": "started", **head}, {"kind": "memory", "moments": {"backward": 1 << 20}, **head}]
        event_path(folder, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path / "locks"))
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "good")
    return write_run(tmp_path / "runs" / "bad")


COMMANDS = (
    ("runs", "runs"),
    ("runs", "runs", "--format", "json"),
    ("watch", "runs/bad", "--once"),
    ("watch", "runs/bad", "--format", "json"),
    ("watch", "runs/bad"),
    ("report", "runs/bad", "-o", "page.html", "--force"),
    ("diagnose", "runs/bad"),
    ("diagnose", "runs/bad", "--format", "json"),
)


def survives(here: Cli, *, unreadable: bool | None = None) -> list[Answer]:
    """Ask every command that looks at runs: each ends as documented, and the good run is listed."""
    answers = []
    for command in COMMANDS:
        answer = here(*command)
        assert answer.code in DOCUMENTED, (command, answer)
        assert "Traceback" not in answer.err and "internal error" not in answer.err, (command, answer)
        answers.append(answer)
    listed = json.loads(answers[1].out)
    named = [Path(item["folder"]).name for item in listed["runs"]]
    assert "good" in named, "one bad folder does not end the list"
    assert ("bad" in named) != any("runs/bad: " in text for text in listed["unreadable"])
    if unreadable is not None:
        assert ("bad" not in named) is unreadable
    return answers


@pytest.mark.sampled(every=4)
@pytest.mark.parametrize("plant", sorted(PLANTS))
@pytest.mark.parametrize("name", FILES)
def test_files_that_never_end(here: Cli, run: Path, name: str, plant: str) -> None:
    path = run / name
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    PLANTS[plant](path)
    survives(here, unreadable=None if name == "run.json" else False)


@pytest.mark.parametrize(
    "start",
    [
        {"world_size": 1_000_000},
        {"world_size": 2**70},
        {"world_size": 0},
        {"world_size": 2, "number": -1},
        {"world_size": 2, "started": -1e300},
        {"world_size": 2, "started": float("inf")},
        {"world_size": 2, "started": 10**300},
    ],
)
def test_starts_that_no_run_has(here: Cli, run: Path, start: dict[str, Any]) -> None:
    (run / "run.json").write_text(json.dumps({"device": "cpu", **start}))
    survives(here)


@pytest.mark.parametrize(
    "text", ['"world_size device"', "7", "[]", "null", "[" * 100_000, '{"a": 1', "\ufeff{}"]
)
def test_a_start_that_is_no_object(here: Cli, run: Path, text: str) -> None:
    (run / "run.json").write_text(text)
    survives(here, unreadable=True)


JUNK: tuple[Any, ...] = (
    *("text", [], {}, [1], {"a": 1}, None, True, -1, 0, 0.0, 1e-320, -1e300, 1e300, 10**30, 10**300),
    *(float("nan"), float("inf"), 2**63, 1.5, "\ud800", "x" * 5000, [[[[]]]], [None]),
)
EVENTS: tuple[dict[str, Any], ...] = (
    {"kind": "started", "pid": 1, "node": "n"},
    {"kind": "phase", "name": "training", "model": "m"},
    {"kind": "memory", "moments": {"backward": 5}},
    {"kind": "length", "steps": 5},
    {"kind": "evaluation", "step": 2, "loss": 1.0, "metrics": {"auxiliary_loss": 1.0}},
    {"kind": "checkpoint", "step": 2, "seconds": 1.0},
    {"kind": "checkpoint_damaged", "path": "p", "reason": "r"},
    {"kind": "resumed", "step": 1, "path": "p"},
    {"kind": "nonfinite", "step": 1, "what": "loss", "policy": "stop"},
    {"kind": "warning", "message": "m"},
    {"kind": "proof", "placements": {"Shard(0)": 3}, "local_bytes": [1], "units": 2},
    {"kind": "failure", "message": "m", "help": "h", "exit_code": 4, "traceback": ["t"], "secondary": False},
    {"kind": "finished", "status": "completed", "step": 2},
)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: str(event["kind"]))
def test_events_with_fields_of_other_types(here: Cli, run: Path, event: dict[str, Any]) -> None:
    """Every field gone, and every field with every kind of junk, all in one file."""
    whole = {"time": NOW + 2, "rank": 0, "attempt": 0, "pid": 1, **event}
    bad = [{key: value for key, value in whole.items() if key != left} for left in whole]
    bad += [{**whole, key: junk} for key in whole for junk in JUNK]
    with event_path(run, 0).open("a") as stream:
        stream.writelines(json.dumps(item) + "\n" for item in bad)
        stream.write("[" * 100_000 + "\n" + '{"time": ' + "9" * 5000 + "}\n1e999\n" + "\0" * 100 + "\n")
    survives(here, unreadable=False)
    with (run / "metrics.jsonl").open("ab") as stream:
        stream.write(b"\xff\xfe{}\n")
    history = read_history(run)
    assert len(history.points) == 2
    follower = Follower(run)
    follower._offsets.clear()
    assert len(list(follower.news())) > len(JUNK)


def test_steps_with_fields_of_other_types(here: Cli, run: Path) -> None:
    whole = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    whole |= {"epoch": 0.5, "grad_norm": 1.0, "memory_allocated_peak_bytes": 5, "step": 3, "mfu": 0.1}
    bad = [{key: value for key, value in whole.items() if key != left} for left in whole]
    bad += [{**whole, key: junk} for key in whole for junk in JUNK]
    for item in bad:
        with (run / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps(item) + "\n")
        reader = StepReader(run)
        assert reader.read() and reader.points()
    survives(here, unreadable=False)


@pytest.mark.slow
def test_documents_with_fields_of_other_types(here: Cli, run: Path) -> None:
    recipe: dict[str, Any] = {
        "model": {"reference": "m"},
        "method": {"name": "lora"},
        "steps": 3,
        "epochs": 1.0,
    }
    for key in recipe:
        for junk in JUNK:
            (run / "recipe.json").write_text(json.dumps({**recipe, key: junk}))
            assert here("runs", "runs").code == 0
            assert here("watch", "runs/bad", "--once").code == 4
    (run / "recipe.json").write_text(json.dumps(recipe))
    progress = {
        **{"rank": 0, "phase": "training", "step": 2, "alive": NOW + 2, "progressed": NOW + 2},
        **{"waiting": False, "interval": 1.0},
    }
    for key in progress:
        for junk in JUNK:
            progress_path(run, 0).write_text(json.dumps({**progress, key: junk}))
            assert here("watch", "runs/bad", "--once").code in (0, 4)
            assert here("diagnose", "runs/bad").code in DOCUMENTED


@pytest.mark.slow
def test_an_account_of_memory_with_fields_of_other_types(here: Cli, run: Path) -> None:
    seen = {
        "moment": "backward",
        "requested_bytes": 5,
        "allocated_bytes": 6,
        "live": [{"name": "a", "bytes": 1}],
    }
    step = {"change": "c", "cost": "d", "device_total_bytes": 5}
    whole: dict[str, Any] = {
        **{"rank": 0, "seen": seen, "planned_moment": "m", "planned_bytes": 5, "peak_moment": "p"},
        **{"peak_bytes": 7, "next_steps": [step]},
    }
    path = run / "logs" / "out-of-memory.json"
    path.write_text(json.dumps(whole))
    assert "rank 0 ran out of memory in backward" in here("diagnose", "runs/bad").out
    bad = [{**whole, key: junk} for key in whole for junk in JUNK]
    bad += [{**whole, "seen": {**seen, key: junk}} for key in seen for junk in JUNK]
    bad += [{**whole, "next_steps": [{**step, key: junk}]} for key in step for junk in JUNK]
    bad += [{key: value for key, value in whole.items() if key != left} for left in whole]
    for account in bad:
        path.write_text(json.dumps(account))
        assert here("diagnose", "runs/bad").code in DOCUMENTED, account


@pytest.mark.parametrize("code", [10**30, 3, 77, 256, 99999])
def test_watch_ends_with_a_documented_status(here: Cli, run: Path, code: int) -> None:
    summary = {
        **{"status": "failed", "exit_code": code, "resumable": False, "steps": 2, "world_size": 2},
        **{"mesh": {"dp_replicate": 1, "dp_shard": 2}, "units": 3, "sharding_proof": {}},
        **{"predicted_peak_bytes": None, "measured_peak_bytes": [10**300, None], "instrument": "none"},
        **{"error_percent": None, "throughput": {}, "last_checkpoint": None, "last_good_step": None},
        **{"export": None, "restarts": 0, "failure": None, "memory_report": None},
    }
    (run / "summary.json").write_text(json.dumps(envelope("summary", None, summary)))
    assert here("watch", "runs/bad", "--once").code == 4
    shown = json.loads(here("watch", "runs/bad", "--format", "json").out)
    assert (shown["state"], shown["exit_code"]) == ("failed", 4)


def test_what_a_run_writes_never_goes_through_a_link(tmp_path: Path) -> None:
    """A run that goes on in a stranger's folder writes its own files there, and no others."""
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    run = tmp_path / "run"
    (run / "events").mkdir(parents=True)
    for name in ("events/rank-00000.jsonl", "metrics.jsonl"):
        for plant in (lambda path: path.symlink_to(victim), os.mkfifo):
            plant(run / name)
            with pytest.raises(OSError):
                EventLog(run, 0, 0)
            (run / name).unlink()
    progress_path(run, 0).symlink_to(victim)
    ProgressFile(run, 0).write(RankProgress(0, "training", 1, NOW, NOW, False, 1.0))
    # Every name that a process could take for its aside file.
    for name in (f".a.json.{os.getpid()}.part", ".a.json.part"):
        (run / name).symlink_to(victim)
    write_text(run / "a.json", "{}")
    assert victim.read_text() == "mine\n"
    assert (run / "a.json").read_text() == "{}"


def test_long_lines_and_files_are_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b'{"n": 1}\n' + b"\0" * (3 << 20) + b'\n{"n": 2}\n' + b'{"n": "' + b"x" * (1 << 21) + b'"}\n{"n": 3}'
    )
    assert [record["n"] for record in read_lines(path)] == [1, 2, 3]
    assert [record["n"] for record in read_lines(path, limit=100)] == [3]
    path.write_text('{"n": 1}\n{"n": 2}\n')
    assert [record["n"] for record in read_lines(path, limit=12)] == [2]
    assert list(text_lines(path)) == ['{"n": 1}\n', '{"n": 2}\n']


# Registers of live runs.


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of a machine with several users, and no folder of this one's session."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("FSDPTOOL_LOCKS", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    yield tmp_path / f"fsdptool-gpus-{os.getuid()}"


def as_stranger(folder: Path) -> None:
    """Give a folder to another user, or what looks like it to one who is not root."""
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
    folder.chmod(0o777)


def test_a_claim_does_not_follow_links_of_another_user(shared: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    as_stranger(shared)
    (shared / f"{os.getpid()}.json").symlink_to(victim)
    (shared / ".lock").symlink_to(victim)
    with register_claim(frozenset(), tmp_path / "run"):
        assert victim.read_text() == "mine", "a run without GPUs goes on without an entry"
    with (
        pytest.raises(StorageError, match="another user can write"),
        register_claim(frozenset("0"), tmp_path),
    ):
        pass
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o701])
def test_a_register_that_others_can_open_is_not_used(shared: Path, tmp_path: Path, mode: int) -> None:
    shared.mkdir()
    shared.chmod(mode)
    own = identify(os.getppid())
    assert own is not None
    claim = {"gpus": ["0"], "run": str(tmp_path), "start": own.start, "boot": own.boot}
    (shared / f"{own.pid}.json").write_text(json.dumps(claim))
    assert live_claims() == []
    with pytest.raises(StorageError), register_claim(frozenset("0"), tmp_path):
        pass
    shared.chmod(0o700)
    assert live_claims() == [(frozenset("0"), str(tmp_path))]


def test_a_register_that_is_a_link_is_not_used(shared: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    shared.symlink_to(elsewhere)
    with register_claim(frozenset(), tmp_path):
        assert not list(elsewhere.iterdir())


def test_the_session_s_own_folder_is_used_besides(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session that has none, such as one of cron, must see the claim as well."""
    own = tmp_path / "session"
    own.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    with register_claim(frozenset("0"), tmp_path / "run"):
        assert live_claims() == [(frozenset("0"), str(tmp_path / "run"))]
        for folder in (own / "fsdptool-gpus", shared):
            (claim,) = folder.glob("*.json")
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert stat.S_ISREG(claim.lstat().st_mode)
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        with pytest.raises(ConfigError, match="GPU 0 is in use"), register_claim(frozenset("0"), tmp_path):
            pass
    assert live_claims() == []
    # Where others have made the temporary one first, the session's own is enough.
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
    shutil.rmtree(shared)
    as_stranger(shared)
    with register_claim(frozenset("0"), tmp_path / "run"):
        assert live_claims() == [(frozenset("0"), str(tmp_path / "run"))]


@pytest.mark.parametrize("plant", sorted(PLANTS))
def test_claims_that_never_end(
    here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plant: str
) -> None:
    locks = tmp_path / "locks"
    locks.mkdir(mode=0o700)
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(locks))
    PLANTS[plant](locks / "1.json")
    (locks / "2.json").write_text("[" * 100_000)
    (locks / "x.json").write_text("{}")
    (locks / f"{os.getpid()}.json").symlink_to(tmp_path / "victim")
    parent = identify(os.getppid())
    assert parent is not None
    claim = {"gpus": [["0"]], "run": "a\0b", "start": parent.start, "boot": parent.boot}
    (locks / f"{parent.pid}.json").write_text(json.dumps(claim))
    assert live_claims() == []
    assert here("runs").code == 0
    with register_claim(frozenset("0"), tmp_path / "run"):
        assert live_claims() == [(frozenset("0"), str(tmp_path / "run"))]
    assert not (tmp_path / "victim").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_claim_for_a_process_of_another_user_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path))
    own = identify(os.getppid())
    assert own is not None
    path = tmp_path / f"{own.pid}.json"
    path.write_text(json.dumps({"gpus": ["0"], "run": "r", "start": own.start, "boot": own.boot}))
    assert live_claims() == [(frozenset("0"), "r")]
    os.chown(path, 65534, 65534)
    assert live_claims() == []


def test_a_register_that_cannot_be_made_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path / "file" / "locks"))
    with register_claim(frozenset(), tmp_path):
        pass
    with pytest.raises(FsdptoolError) as caught, register_claim(frozenset("0"), tmp_path):
        pass
    assert "FSDPTOOL_LOCKS" in (caught.value.help or "")


@pytest.mark.slow
def test_a_pipe_between_the_look_and_the_opening(tmp_path: Path) -> None:
    """A file that becomes a pipe again and again is read or refused; no reader waits for a writer."""
    code = """
import sys
from pathlib import Path
from fsdptool.files.text import UnreadableError, read_bytes, replace_file
from fsdptool.errors import StorageError
path = Path(sys.argv[1])
seen = set()
tries = 0
while tries < 3000 or len(seen) < 2:  # how often it meets which of the two is up to the scheduler
    tries += 1
    try:
        seen.add(read_bytes(path))
    except UnreadableError as error:
        seen.add(error.code)
    try:
        replace_file(path, b"a", before=b"a")
    except StorageError:
        pass
print(sorted(map(str, seen)))
"""
    path = tmp_path / "file"
    path.write_bytes(b"a")
    reader = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    deadline = time.monotonic() + 60
    while reader.poll() is None and time.monotonic() < deadline:
        aside = tmp_path / "aside"
        os.mkfifo(aside)
        aside.replace(path)
        aside.write_bytes(b"a")
        aside.replace(path)
    try:
        out, _ = reader.communicate(timeout=60)
    finally:
        reader.kill()
    assert out == """['FSD101', "b'a'"]\n"""
