"""Files are written whole, once, and only as they were shown."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdptool.errors import FsdptoolError, StorageError
from fsdptool.files.text import create_file
from fsdptool.web.changes import ConflictError, FileChange


@contextmanager
def full_disk(left: int) -> Iterator[None]:
    """Let this process write files of at most ``left`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("before", [None, b"old: true\n"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "accelerate.yaml"
    if before is not None:
        path.write_bytes(before)
    change = FileChange(path, before, b"new: true\n" * 1000)
    with full_disk(64), pytest.raises(StorageError, match="cannot be written"):
        change.write(change.digest)
    assert (path.read_bytes() if path.exists() else None) == before
    assert [item.name for item in tmp_path.iterdir()] == ([] if before is None else [path.name])


@pytest.mark.parametrize("before", [None, b"old: true\n"])
def test_of_browsers_that_write_at_once_one_wins(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "accelerate.yaml"
    if before is not None:
        path.write_bytes(before)
    start = threading.Barrier(8)
    refused: list[FsdptoolError] = []

    def write(number: int) -> None:
        change = FileChange(path, before, f"from: {number}\n".encode())
        start.wait(60)
        try:
            change.write(change.digest)
        except FsdptoolError as error:
            refused.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a write has not ended"
    assert len(refused) == 7
    assert path.read_bytes().startswith(b"from: ")
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_another_change_than_the_shown_one_is_not_written(tmp_path: Path) -> None:
    shown = FileChange(tmp_path / "a.yaml", None, b"a: 1\n").digest
    for other in (
        FileChange(tmp_path / "a.yaml", None, b"a: 2\n"),
        FileChange(tmp_path / "a.yaml", b"", b"a: 1\n"),
        FileChange(tmp_path / "b.yaml", None, b"a: 1\n"),
    ):
        with pytest.raises(ConflictError):
            other.write(shown)
    assert not list(tmp_path.iterdir())


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(source: object, target: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    create_file(tmp_path / "a.yaml", b"a: 1\n")
    with pytest.raises(StorageError, match="exists already"):
        create_file(tmp_path / "a.yaml", b"a: 2\n")
    assert {item.name: item.read_bytes() for item in tmp_path.iterdir()} == {"a.yaml": b"a: 1\n"}
