"""The store: whole entries or none, whoever writes, dies or fills the disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fsdptool.cache import Store, cache_folder
from fsdptool.cli.app import run


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "cache")


def entry_file(store: Store, kind: str, key: str) -> Path:
    return next(store.folder.rglob(f"{kind}/{key}.json"))


def test_what_is_put_comes_back(store: Store) -> None:
    for value in ({"a": [1, None, "ü \ud800"]}, list(range(20_000)), None, "text"):
        key = store.key({"value": json.dumps(value)})
        assert store.get("kind", key) == (None, ())
        assert store.put("kind", key, value, about="it") == ()
        assert store.get("kind", key) == (value, ())
    assert store.get("other", key) == (None, ())
    assert {entry.about for entry in store.entries()} == {"it"}
    assert store.verify().good == 4


def test_keys_follow_their_parts(store: Store) -> None:
    assert store.key({"a": 1, "b": 2}) == store.key({"b": 2, "a": 1})
    assert store.key({"a": 1}) != store.key({"a": 2})
    assert store.key({"a": "1"}) != store.key({"a": 1})


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"\x00" * len(content),
        lambda content: content.replace(b"answer", b"amswer"),
        lambda content: b"[]\n" + content.partition(b"\n")[2],
        lambda content: content.partition(b"\n")[0],
    ],
    ids=["short", "half", "empty", "zeroes", "one letter", "header", "no payload"],
)
def test_a_corrupt_entry_is_reported_set_aside_and_rebuilt(store: Store, damage: object) -> None:
    key = store.key("x")
    store.put("kind", key, {"answer": 42})
    path = entry_file(store, "kind", key)
    path.write_bytes(damage(path.read_bytes()))
    assert len(store.verify().bad) == 1
    value, findings = store.get("kind", key)
    assert value is None
    assert [finding.code for finding in findings] == ["CACHE002"]
    assert str(path) in findings[0].message
    assert not path.exists()
    assert path.with_name(path.name + ".corrupt").exists()
    assert store.get("kind", key) == (None, ())
    store.put("kind", key, {"answer": 42})
    assert store.get("kind", key) == ({"answer": 42}, ())
    assert store.prune().removed == 1
    assert store.verify().bad == ()


def test_an_entry_copied_to_another_key_is_not_believed(store: Store) -> None:
    key, other = store.key("x"), store.key("y")
    store.put("kind", key, 1)
    path = entry_file(store, "kind", key)
    path.with_name(f"{other}.json").write_bytes(path.read_bytes())
    value, findings = store.get("kind", other)
    assert value is None
    assert "another key" in findings[0].message


WRITER = """
    import sys
    from pathlib import Path
    from fsdptool.cache import Store
    store, mark = Store(Path(sys.argv[1])), sys.argv[2]
    print("ready", flush=True)
    number = 0
    while True:
        findings = store.put("kind", "same", {"writer": mark, "number": number, "bulk": [mark] * 30_000})
        assert not findings, findings
        number += 1
"""


def start_writer(folder: Path, mark: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(folder), mark], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
def test_two_writers_and_kills_leave_whole_entries(store: Store) -> None:
    seen = set()
    for _ in range(4):
        writers = [start_writer(store.folder, mark) for mark in "ab"]
        end = time.monotonic() + 0.6
        while time.monotonic() < end:
            value, findings = store.get("kind", "same")
            assert findings == ()
            if value is not None:
                assert set(value["bulk"]) == {value["writer"]}
                seen.add(value["writer"])
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    assert seen == {"a", "b"}
    assert store.verify().bad == ()
    assert store.put("kind", "same", "after") == (), "a dead writer's lock is free"
    store.prune()
    assert not [path for path in store.folder.rglob("*") if path.name.endswith(".part")]


def test_a_store_that_cannot_be_used_is_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    store = Store(blocked)
    value, findings = store.get("kind", "key")
    assert value is None
    assert [f.severity for f in (*findings, *store.put("kind", "key", 1))][-1] == "warning"
    assert store.entries() == ()


def test_a_full_disk_is_a_warning_and_leaves_nothing_behind(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("kind", "key", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    findings = store.put("kind", "key", "new")
    assert [finding.code for finding in findings] == ["CACHE001"]
    assert "No space left on device" in findings[0].message
    monkeypatch.undo()
    assert store.get("kind", "key") == ("old", ())
    assert not list(store.folder.rglob("*.part"))


def test_prune_by_age_and_by_size(store: Store) -> None:
    for number in range(5):
        store.put("kind", str(number), "x" * 1000)
        time.sleep(0.002)
    assert store.prune().removed == 0
    newest = store.entries()[0]
    assert store.prune(max_bytes=2 * newest.bytes + 10).removed == 3
    assert {entry.key for entry in store.entries()} == {"3", "4"}
    assert store.prune(older_than_days=0).removed == 2


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FSDPTOOL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "fsdptool"
    monkeypatch.setenv("FSDPTOOL_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def test_commands_tell_the_truth(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jsonschema import Draft202012Validator

    from fsdptool.files.values import load_schema

    monkeypatch.setenv("FSDPTOOL_CACHE", str(tmp_path))
    store = Store()
    store.put("kind", "one", [1], about="first")
    store.put("kind", "two", [2], about="second")

    def ask(*arguments: str) -> tuple[int, dict[str, object]]:
        status = run(["cache", *arguments, "--format", "json"])
        document = json.loads(capsys.readouterr().out)
        Draft202012Validator(load_schema("cache")).validate(document)
        return status, document

    assert run(["cache", "dir"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    status, document = ask("ls")
    assert status == 0
    assert [entry["about"] for entry in document["entries"]] == ["second", "first"]  # type: ignore[attr-defined]
    entry_file(store, "kind", "one").write_bytes(b"broken")
    status, document = ask("verify")
    assert (status, document["good"], len(document["bad"])) == (1, 1, 1)

    real = Path.unlink

    def stuck(path: Path, missing_ok: bool = False) -> None:
        if path.name == "two.json":
            raise PermissionError(13, "Permission denied")
        real(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", stuck)
    status, document = ask("clear")
    assert (status, document["removed"]) == (1, 1)
    assert [item["reason"] for item in document["failed"]] == ["Permission denied"]  # type: ignore[attr-defined]
    monkeypatch.setattr(Path, "unlink", real)
    status, document = ask("clear")
    assert (status, document["removed"], document["failed"]) == (0, 1, [])
    assert store.entries() == ()
