"""A disk that fills up while the queue is written: nothing is lost, nothing is started twice."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from desk import Desk

from fsdptool.errors import StorageError
from fsdptool.launch.queue.file import update
from fsdptool.records.queue import EntryState

SMALL = Path(__file__).with_name("play_full_disk.py")


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond ``size`` bytes; the journal of one change is smaller."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_a_commit_that_fails_changes_nothing(desk: Desk) -> None:
    entries = [desk.add(f"run-{number}", held=True) for number in range(60)]
    size = desk.queue.file.path.stat().st_size
    last = entries[-1]
    desk.queue.release(last)
    # The page of the last entry lies behind the limit; it is written by COMMIT alone.
    limit = size // 2
    reached = False
    with (
        files_end_at(limit),
        pytest.raises(StorageError, match="disk I/O error") as caught,
        desk.queue.file.write() as connection,
    ):
        update(connection, last, {"stage": "cancelled"})
        reached = True
    assert reached, "the change itself was possible, and COMMIT failed"
    assert "\n" not in caught.value.message
    assert caught.value.help == "free disk space; runs that were started continue"
    assert desk.entry(last).state is EntryState.WAITING
    with files_end_at(limit), pytest.raises(StorageError, match="disk I/O error"):
        desk.scheduler.tick()
    assert desk.entry(last).state is EntryState.WAITING
    assert desk.queue.log_path(last).read_text() == "", "the command was not begun"
    desk.until(last, EntryState.RUNNING)
    assert [entry.id for entry in desk.queue.report().entries if entry.state.pending] == entries[:-1]


def _mount() -> tuple[str, ...] | None:
    """Return what runs a program with the right to mount, in a namespace of its own."""
    for command in (("unshare", "--mount"), ("unshare", "--user", "--map-root-user", "--mount")):
        if shutil.which("unshare") is None:
            return None
        probe = (*command, "mount", "-t", "tmpfs", "none", "/mnt")
        if subprocess.run(probe, capture_output=True, timeout=60, check=False).returncode == 0:
            return command
    return None


@pytest.mark.slow
def test_a_small_disk_with_any_space_left(tmp_path: Path) -> None:
    mount = _mount()
    if mount is None:
        pytest.skip("a file system cannot be mounted here")
    disk = tmp_path / "disk"
    disk.mkdir()
    shell = 'mount -t tmpfs -o size=192k none "$1" && exec "$2" "$3" "$1"'
    subprocess.run(
        (*mount, "sh", "-c", shell, "sh", str(disk), sys.executable, str(SMALL)),
        env={**os.environ, "FSDPTOOL_LOCKS": str(tmp_path / "locks")},
        cwd=tmp_path,
        timeout=300,
        check=True,
    )
