"""Use a queue on a small disk that is full but for some pages.

    python play_full_disk.py DISK

Every number of free pages is tried, so that every write of a change is once the one that fails.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

from fsdptool.errors import StorageError
from fsdptool.launch.queue.entries import Queue
from fsdptool.launch.queue.scheduler import Scheduler
from fsdptool.records.queue import Needs, QueueEntry

PAGE = 4096
"""Bytes of a page of the database and of the file system."""


def fill(path: Path, free: int) -> None:
    """Fill the disk of ``path`` except for some pages."""
    with path.open("wb", buffering=0) as stream:
        try:
            while stream.write(bytes(PAGE)):
                pass
        except OSError:
            stream.truncate(max(stream.tell() - free * PAGE, 0))


def attempt(disk: Path, begun: Path, free: int) -> bool:
    """Add and start a run on a disk with ``free`` pages; return whether both succeeded."""
    queue = Queue(disk / f"queue-{free}")
    scheduler = Scheduler(queue, command=("/bin/sh", "-c", f"echo begun >> {begun}"))
    recipe = begun.parent / "recipe.yaml"
    recipe.touch()

    def add(name: str, **options: Any) -> None:
        folder = begun.parent / name
        queue.add(recipe, recipe, output=folder, needs=Needs(str(folder), frozenset(), 0), **options)

    def states() -> dict[str, QueueEntry]:
        return {Path(entry.folder).name: entry for entry in queue.report().entries}

    add("first")
    fill(disk / "filler", free)
    done = 0
    for act in (lambda: add("second", held=True), scheduler.tick):
        before = states()
        try:
            act()
            done += 1
        except StorageError as error:
            assert error.help and "\n" not in error.message, error
            assert states() == before, "a change that failed changed something"
    (disk / "filler").unlink()
    add("third", held=True)
    for _ in range(2):
        scheduler.tick()
        for child in scheduler._children:
            child.wait(timeout=60)
    scheduler.tick()
    assert begun.read_text() == "begun\n", f"{free} pages: the run was started {begun.read_text()!r}"
    assert {"first", "third"} <= states().keys()
    shutil.rmtree(queue.folder)
    begun.unlink()
    return done == 2


def main() -> None:
    """Try every number of free pages until all writes succeed."""
    disk, begun = Path(sys.argv[1]), Path.cwd() / "begun"
    outcomes = [attempt(disk, begun, free) for free in range(20)]
    assert not outcomes[0] and outcomes[-1], outcomes


if __name__ == "__main__":
    main()
