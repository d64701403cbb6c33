"""How a started entry of the queue stands, from its run folder and its processes alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError, read_ends
from fsdptool.files.values import count, moment
from fsdptool.launch.processes import ProcessIdentity, identify, is_alive, started_before
from fsdptool.launch.queue_file import Row
from fsdptool.records.queue import EntryState
from fsdptool.records.run import Start
from fsdptool.runs.events import ranks_in, tail_events
from fsdptool.runs.folder import RUN, read_start
from fsdptool.runs.view import read_view

_LOG_BYTES = 1 << 16
"""Bytes at the end of a log that are searched for the last error."""


NO_MESSAGE = "the command ended before the run began, without a message"


@dataclass(frozen=True, slots=True)
class Standing:
    """How a started entry stands.

    Attributes:
        state: Its state.
        began: Whether the command ever began; if not, the entry can be started again.
        occupied: Whether processes of it still run, so that its GPUs are not free.
        message: What went wrong, or None.
    """

    state: EntryState
    began: bool = True
    occupied: bool = False
    message: str | None = None


def read_standing(row: Row, log: Path) -> Standing:
    """Return how a started entry stands.

    Args:
        row: The entry; it has been started.
        log: The file with what its command printed.
    """
    folder = Path(row.folder)
    alive = row.process is not None and is_alive(row.process)
    start = _own_start(folder, row.launch_id)
    if start is None:
        if alive:
            return Standing(EntryState.STARTING, occupied=True)
        return _ended_early(row, folder, log)
    if alive or any(live_workers(folder)):
        return Standing(EntryState.RUNNING, occupied=True)
    try:
        view = read_view(folder)
    except Exception as error:
        # Whatever one folder holds, the other entries are listed.
        return Standing(EntryState.DEAD, message=str(error))
    # Ranks seem to run for a while after their last sign of life, but their processes have gone.
    state = EntryState.DEAD if view.state == "running" else EntryState(view.state)
    message = view.failure.message if view.failure is not None else None
    return Standing(state, message=message)


def _own_start(folder: Path, launch_id: str) -> Start | None:
    """Return the start in ``run.json`` if it is that of the entry, not an earlier or a later one."""
    try:
        start = read_start(folder)
    except (ConfigError, OSError):
        return None
    return start if start.launch_id == launch_id else None


def _ended_early(row: Row, folder: Path, log: Path) -> Standing:
    """Return how an entry stands whose command has ended and whose start the run folder does not tell."""
    if row.stop_requested is not None or row.kill_requested is not None:
        return Standing(EntryState.STOPPED)
    lines = read_log_lines(log)
    if not lines:
        return Standing(EntryState.WAITING, began=False)
    error = next((line for line in reversed(lines) if line.startswith("error: ")), None)
    if error is not None:
        return Standing(EntryState.FAILED, message=error.removeprefix("error: "))
    if row.started is not None and _written_after(folder / RUN, row.started):
        return Standing(EntryState.UNKNOWN, message="a run was started in the folder outside the queue")
    return Standing(EntryState.DEAD, message=NO_MESSAGE)


def _written_after(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime > moment
    except OSError:
        return False


def read_log_lines(log: Path) -> list[str]:
    """Return the last lines of a log; empty if it is missing or empty."""
    try:
        return read_ends(log, tail=_LOG_BYTES)[1].decode("utf-8", errors="replace").splitlines()
    except UnreadableError:
        return []


def live_workers(folder: Path) -> Iterator[ProcessIdentity]:
    """Yield the workers of a run that run on this machine, also when their parent has died."""
    try:
        start = read_start(folder)
        started = (folder / RUN).stat().st_mtime
    except (ConfigError, OSError):
        return
    node = os.uname().nodename
    for events in tail_events(folder, ranks_in(folder, start.world_size)).values():
        for event in events:
            if event.get("kind") == "started" and event.get("node") == node and _is_live(event, started):
                process = identify(event["pid"])
                if process is not None:
                    yield process


def _is_live(event: dict[str, Any], started: float) -> bool:
    pid, written = count(event.get("pid")), moment(event.get("time"))
    if pid is None or written is None or written < started - 1.0:
        return False
    return started_before(pid, written)
