"""One rank of a whole run in a prepared folder: what the worker process does, without its guard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fsdptool.training.events import EventLog
from fsdptool.training.stop import SignalFlag
from fsdptool.training.worker import work


def work_in(folder: str) -> dict[str, Any]:
    """Train what ``folder`` describes and return the closing event."""
    events = EventLog(Path(folder), int(os.environ["RANK"]), 0)
    ended = dict(work(Path(folder), events, SignalFlag()))
    events.close()
    return ended
