"""A queue, the runs that join it, and the scheduler that starts them."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from fsdptool.launch.queue.entries import Queue
from fsdptool.launch.queue.scheduler import Scheduler
from fsdptool.records.queue import EntryState, Needs, QueueEntry

PLAY = (sys.executable, str(Path(__file__).with_name("play_run.py")))


class Desk:
    """A queue, and a person who adds runs and looks at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.queue = Queue()
        self.scheduler = Scheduler(self.queue, command=PLAY)
        self.config = folder / "fsdp.yaml"
        self.config.write_text("{}")

    def add(self, name: str, act: str = "finish", *, gpus: str = "", slots: int = 0, **options: Any) -> int:
        place = self.folder / name
        place.mkdir()
        recipe = place / "recipe.yaml"
        recipe.write_text(act)
        needs = Needs(str(place / "run"), frozenset(gpus.split(",")) - {""}, slots)
        return self.queue.add(
            recipe, self.config, output=place / "run", needs=needs, visible=gpus or None, **options
        )

    def go(self, name: str) -> None:
        (self.folder / name / "go").touch()

    def entry(self, number: int) -> QueueEntry:
        return next(entry for entry in self.queue.report().entries if entry.id == number)

    def until(self, number: int, *states: EntryState, tick: bool = True) -> QueueEntry:
        """Look at the queue until an entry is in one of ``states``."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if tick:
                self.scheduler.tick()
            if (entry := self.entry(number)).state in states:
                return entry
            time.sleep(0.05)
        raise TimeoutError(f"{self.entry(number)} is not in {states}")
