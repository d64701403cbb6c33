"""Whole runs on the pool's ranks: all that ``fsdptool train`` does but torchrun and the worker's guard."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdptool.launch.prepare import prepare
from fsdptool.launch.start import write_run
from fsdptool.records.recipe import Recipe
from fsdptool.runs.events import EventLog
from fsdptool.runs.signals import SignalFlag
from fsdptool.training.worker import work


class StopIn(SignalFlag):
    """Asks to stop as a signal in the ``step``-th step would."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self._left = step + 1  # asked once before the first step

    @property
    def requested(self) -> int:
        self._left -= 1
        return signal.SIGTERM if self._left <= 0 else 0


def work_in(
    folder: str, stop_at: int | None = None, flag: SignalFlag | None = None, trusted: bool = False
) -> dict[str, Any]:
    """Train what ``folder`` describes on one rank and return the closing event."""
    events = EventLog(Path(folder), int(os.environ["RANK"]), 0)
    flag = StopIn(stop_at) if stop_at is not None else flag or SignalFlag()
    ended = dict(work(Path(folder), events, flag, trust_remote_code=trusted))
    events.close()
    return ended


def write_folder(
    folder: Path,
    recipe: Path,
    config: Path,
    *,
    resume: str | None = None,
    changed: Callable[[Recipe], Recipe] = lambda recipe: recipe,
    trusted: bool = False,
) -> Recipe:
    """Write a run folder for ``recipe`` as ``changed`` returns it, without a prediction; returns that."""
    prepared = prepare(recipe, config, with_prediction=False, trust_remote_code=trusted)
    prepared = dataclasses.replace(prepared, recipe=changed(prepared.recipe))
    write_run(folder, prepared, resume=resume, number=int(resume is not None), argv=[], force=False)
    return prepared.recipe
