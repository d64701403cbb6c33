"""Each rank's latest sign of life, in a small file that its watchdog rewrites, and which ranks are silent.

When a rank hangs, the others report a timeout of a collective. Their message says who waited, not who was
waited for. These files say what every rank was doing, when it last made progress, and whether it was itself
waiting for others.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError, open_for_writing, read_ends
from fsdptool.files.values import count, load_record, moment
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.run import RankProgress
from fsdptool.runs.events import tail_events
from fsdptool.runs.folder import EVENTS

_LENGTH = 512
"""Bytes of a file: one write replaces all of it, so a reader never sees two records mixed."""

_STALE_INTERVALS = 3.0
"""Missed writes, in intervals, after which a process counts as one that no longer runs."""

_STALE_SECONDS = 5.0
"""The least time for that: a busy machine runs a watchdog seconds late."""


def progress_path(folder: Path, rank: int) -> Path:
    """Return the progress file of a rank."""
    return folder / EVENTS / f"rank-{rank:05d}.progress"


def write_interval(world_size: int) -> float:
    """Return the seconds between two writes: many ranks share one file system."""
    return min(max(world_size / 32.0, 1.0), 15.0)


class ProgressFile:
    """Writes the progress of one rank. Errors are ignored: the run does not depend on the file."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            path = progress_path(folder, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_for_writing(path)

    def write(self, progress: RankProgress) -> None:
        """Replace the record."""
        if self._descriptor is None:
            return
        text = json.dumps(to_json(progress)).encode()
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, text.ljust(_LENGTH - 1) + b"\n", 0)


def read_progress(folder: Path, rank: int) -> RankProgress | None:
    """Return the last record of a rank, or what its events say if it has none; None if it never started."""
    return progress_of(folder, rank, tail_events(folder, [rank])[rank])


def progress_of(folder: Path, rank: int, events: Iterable[Mapping[str, Any]]) -> RankProgress | None:
    """Return the last record of a rank, or what its latest events say, as :func:`read_progress`."""
    last: RankProgress | None = None
    with contextlib.suppress(UnreadableError, ConfigError):
        line, _, _ = read_ends(progress_path(folder, rank), head=2 * _LENGTH, tail=0)
        last = from_json(RankProgress, load_record(line))
        times = (last.alive, last.progressed, last.interval)
        if last.rank != rank or None in map(moment, times) or count(last.step or 0) is None:
            last = None
    seen: RankProgress | None = None
    for event in events:
        time_of = moment(event.get("time"))
        if time_of is None:
            continue
        if event.get("kind") == "started":
            seen = RankProgress(rank, "starting", None, time_of, time_of, False, 0.0)
        elif event.get("kind") == "phase" and seen is not None:
            seen = RankProgress(rank, str(event.get("name")), None, time_of, time_of, False, 0.0)
    if last is None or (seen is not None and seen.progressed > last.progressed):
        return seen
    return last


def silent_ranks(
    ranks: Mapping[int, RankProgress | None],
    *,
    reporters: Sequence[int],
    stopped: Sequence[int] = (),
    now: float,
) -> tuple[int, ...]:
    """Return the ranks that those which gave up were waiting for; empty if the files do not tell.

    A rank is silent if, in this order of certainty, the operating system has stopped it; it never started;
    its watchdog no longer writes; it is not inside a collective although the ranks that gave up were; or it
    last made progress clearly before they did. Only the most certain kind is returned.

    Args:
        ranks: The progress of every rank of the run, None for one that never started.
        reporters: Ranks that reported a timeout.
        stopped: Ranks whose process is in the operating system's stopped state.
        now: Seconds since 1970.
    """
    others = {rank: seen for rank, seen in ranks.items() if rank not in reporters}
    if found := tuple(rank for rank in others if rank in stopped):
        return found
    if found := tuple(rank for rank, seen in others.items() if seen is None):
        return found
    known = {rank: seen for rank, seen in others.items() if seen is not None}
    if found := tuple(
        rank
        for rank, seen in known.items()
        if seen.interval and now - seen.alive > max(_STALE_SECONDS, _STALE_INTERVALS * seen.interval)
    ):
        return found
    told = [seen for rank in reporters if (seen := ranks.get(rank)) is not None]
    if not told:
        return ()
    gave_up = min(seen.progressed for seen in told)
    # A rank that got on while the others waited is slow, not silent.
    still = {rank: seen for rank, seen in known.items() if seen.progressed < now - 0.5 * (now - gave_up)}
    if any(seen.waiting for seen in told) and (
        found := tuple(rank for rank, seen in still.items() if not seen.waiting)
    ):
        return found
    moments = {(seen.phase, seen.step) for seen in told}
    return tuple(
        rank
        for rank, seen in still.items()
        if seen.progressed < gave_up - 1.0 and not (seen.waiting and (seen.phase, seen.step) in moments)
    )


def describe_silence(progress: RankProgress | None, *, stopped: bool, now: float | None = None) -> str:
    """Return what is known of a silent rank: its last phase, and how long ago it last made progress."""
    if progress is None:
        return "it never started"
    seconds = max((time.time() if now is None else now) - progress.progressed, 0.0)
    state = "; its process is stopped (SIGSTOP or a debugger)" if stopped else ""
    return f"no progress since {phase_text(progress)}, {seconds:.0f} s ago{state}"


def phase_text(progress: RankProgress) -> str:
    """Return what a rank does, with the step."""
    return f"{progress.phase} (step {progress.step})" if progress.step is not None else progress.phase


def _state(pid: int) -> str | None:
    """Return the state letter of ``/proc/PID/stat`` (proc(5)), or None without such a process or file."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()[0]


def is_running(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    state = _state(pid)
    if state is not None:
        return state not in ("Z", "X")
    if Path("/proc/self").exists():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def is_stopped(pid: int) -> bool:
    """Say whether a signal or a debugger has stopped a process."""
    return _state(pid) in ("T", "t")
