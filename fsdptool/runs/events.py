"""What a rank tells the parent process: one JSON line per event, in a file of its own.

Files, not pipes: they survive the process, work on a shared file system across nodes, and a reader
that is slow or gone blocks nobody. :class:`Follower` reads them while the run goes on.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from fsdptool.errors import StorageError
from fsdptool.files.text import UnreadableError, open_for_writing, open_regular, read_ends
from fsdptool.files.values import RECORD_LIMIT, load_record, moment, number
from fsdptool.records.codec import to_json
from fsdptool.records.run import Metrics
from fsdptool.runs.folder import EVENTS, LOGS, METRICS, write_text
from fsdptool.runs.signals import install_stack_dump
from fsdptool.runs.trackers import scalars

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

SUPERVISOR = "FSDPTOOL_SUPERVISOR_PID"
"""Environment variable with the process id of the fsdptool parent on this machine."""

STDERR_MARK = "fsdptool-event "
"""Prefix of an event on standard error, used when the event file cannot be written (full disk)."""

fallback_stream: TextIO = sys.stderr
"""Where marked events go; the guard points it at the parent when it redirects standard error."""


_GROWTH = 1.01
"""How much higher a peak is before it is reported again: some grow by a few bytes every step."""


class WorkerPhase(StrEnum):
    """What the main thread of a worker is doing: ``phase`` events and the watchdog's message name it."""

    STARTING = "starting"
    IMPORTING = "importing"
    BUILDING = "building"
    SHARDING = "sharding"
    LOADING = "loading"
    INITIALISING = "initialising"
    PROVING = "proving"
    TRAINING = "training"
    LOADING_DATA = "loading data"
    RESTORING = "reading a checkpoint"
    SAVING = "saving a checkpoint"
    EVALUATING = "evaluating"
    SAMPLING = "sampling"


STARTUP = (
    WorkerPhase.STARTING,
    WorkerPhase.IMPORTING,
    WorkerPhase.BUILDING,
    WorkerPhase.SHARDING,
    WorkerPhase.LOADING,
    WorkerPhase.INITIALISING,
    WorkerPhase.PROVING,
)
"""The phases before the first step."""


def copies_saves(events: Iterable[Mapping[str, Any]]) -> bool:
    """Say whether a save was copied, as those of an asynchronous run before its end are."""
    return any(event.get("kind") == "checkpoint_started" and event.get("asynchronous") for event in events)


def event_path(folder: Path, rank: int) -> Path:
    """Return the event file of a rank."""
    return folder / EVENTS / f"rank-{rank:05d}.jsonl"


class LineFile:
    """Appends whole lines: one ``write`` per line, so that readers never see half of one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._descriptor = open_for_writing(path, append=True)
        self._end_partial_line()

    def _end_partial_line(self) -> None:
        """End a line that a killed process or a full disk left unfinished."""
        with contextlib.suppress(UnreadableError):
            if read_ends(self._path, tail=1)[1] not in (b"", b"\n"):
                os.write(self._descriptor, b"\n")

    def append(self, record: Any) -> None:
        """Append one record; raises ``OSError`` (a short write counts as a full disk)."""
        line = (json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n").encode()
        written = os.write(self._descriptor, line)
        if written != len(line):
            # Half a line would swallow the next one.
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> int:
        """Drop the records that are not wanted, all at once or not at all; return how many there were."""
        if self._path.stat().st_size > _LARGEST:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(self._path))
        records = list(read_lines(self._path))
        kept = [record for record in records if wanted(record)]
        if len(kept) == len(records):
            return 0
        write_text(self._path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
        os.close(self._descriptor)
        self._descriptor = open_for_writing(self._path, append=True)
        return len(records) - len(kept)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def make_record(kind: str, rank: int, attempt: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event as it is written."""
    head = {"kind": kind, "time": time.time(), "rank": rank, "attempt": attempt, "pid": os.getpid()}
    return {**head, **to_json(fields)}


def write_to_stderr(record: Mapping[str, Any]) -> None:
    """Write an event to standard error, because the disk cannot be written."""
    with contextlib.suppress(OSError):
        fallback_stream.write(f"{STDERR_MARK}{json.dumps(record)}\n")
        fallback_stream.flush()


class EventLog:
    """Events of one rank. ``emit`` never raises: without a disk it speaks on standard error."""

    def __init__(self, folder: Path, rank: int, attempt: int) -> None:
        self.folder = folder
        self.rank = rank
        self.attempt = attempt
        self._file = LineFile(event_path(folder, rank))
        self._metrics = LineFile(folder / METRICS) if rank == 0 else None
        self._trackers: list[GeneralTracker] = []
        self._log_every = 1
        self._moments: dict[str, int] = {}

    def add_trackers(self, trackers: Iterable[GeneralTracker], *, every: int = 1) -> None:
        """Send every ``every``-th step to ``trackers`` as well (rank 0)."""
        self._trackers += trackers
        self._log_every = max(every, 1)

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event."""
        record = make_record(kind, self.rank, self.attempt, fields)
        try:
            self._file.append(record)
        except OSError:
            write_to_stderr(record)

    def memory(self, moments: Mapping[str, int]) -> None:
        """Report the measured peak of every moment in bytes, whenever one is new or clearly higher."""
        if any(value > _GROWTH * self._moments.get(name, 0) for name, value in moments.items()):
            self._moments = dict(moments)
            self.emit("memory", moments=self._moments)

    def step(self, metrics: Metrics) -> None:
        """Record one optimizer step.

        Raises:
            StorageError: ``metrics.jsonl`` cannot be written.
        """
        if self._metrics is None:
            return
        record = to_json(metrics)
        try:
            self._metrics.append(record)
        except OSError as error:
            raise StorageError(
                f"metrics.jsonl cannot be written: {error.strerror}",
                help="free disk space and resume the run",
            ) from error
        if metrics.step % self._log_every == 0:
            self._track(lambda tracker: tracker.log(scalars(metrics), step=metrics.step))

    def _track(self, act: Callable[[GeneralTracker], None]) -> None:
        """Let every tracker do something; one that fails is disabled from then on, and the run continues."""
        for tracker in list(self._trackers):
            try:
                act(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                what = (str(error).strip().splitlines() or [type(error).__name__])[0]
                self.emit(
                    "warning",
                    message=f"{tracker.name}: tracking is disabled for the rest of the run: {what}",
                )

    def rewind(self, step: int) -> int:
        """Forget the metrics of steps after ``step``: the run continues from there and writes them again.

        Returns:
            How many steps are forgotten, on rank 0.

        Raises:
            StorageError: ``metrics.jsonl`` cannot be written.
        """
        if self._metrics is None:
            return 0
        try:
            return self._metrics.keep(lambda record: (number(record.get("step", 0)) or 0) <= step)
        except OSError as error:
            raise StorageError(f"metrics.jsonl cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the files and the trackers."""
        self._track(lambda tracker: tracker.finish())
        self._file.close()
        if self._metrics is not None:
            self._metrics.close()


def rank_and_attempt() -> tuple[int, int]:
    """Return this process's rank and the number of its start, from torchrun's environment."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def open_events(folder: Path) -> EventLog:
    """Open this rank's event file, announce the process and arrange for stack dumps.

    Raises:
        OSError: The folder cannot be written.
    """
    rank, attempt = rank_and_attempt()
    events = EventLog(folder, rank, attempt)
    logs = folder / LOGS
    logs.mkdir(exist_ok=True)
    install_stack_dump(str(logs / f"rank-{rank:05d}.stacks"))
    events.emit(
        "started",
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
        node=os.uname().nodename,
        supervisor=int(os.environ.get(SUPERVISOR, "0")),
    )
    return events


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


_LARGEST = 1 << 30
"""Bytes of the longest file of lines that is read whole: metrics of some three million steps."""

_TAIL_BYTES = 4 << 20
"""Bytes at the end of the events of a rank that are read to see how it stands."""

_ALL_TAILS = 1 << 30
"""Bytes that are read of the events of all ranks together."""


def read_lines(path: Path, *, limit: int = _LARGEST) -> Iterator[dict[str, Any]]:
    """Yield the whole, valid JSON lines of a file; a damaged line is skipped.

    Args:
        path: The file; what is not a regular file has no lines.
        limit: Of a longer file, only lines in its last ``limit`` bytes.
    """
    with contextlib.suppress(UnreadableError, OSError), open_regular(path) as stream:
        for _, record in records_after(stream, 0, limit=limit, unfinished=True):
            if record is not None:
                yield record


def records_after(
    stream: BinaryIO, offset: int, *, limit: int = _LARGEST, unfinished: bool = False
) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield where each line after an offset ends, and its record; None where it is damaged.

    A line of more than ``RECORD_LIMIT`` bytes is damaged: a crash can leave a hole of zeros.

    Args:
        stream: An open file.
        offset: Where a line begins.
        limit: Of more bytes, only lines in the last ``limit`` ones are read.
        unfinished: Whether a last line without an end counts.
    """
    size = os.fstat(stream.fileno()).st_size
    at = max(offset, size - limit)
    stream.seek(at)
    partial = at > offset
    while at < size and (line := stream.readline(RECORD_LIMIT + 1)):
        ends = line.endswith(b"\n")
        if not ends and len(line) <= RECORD_LIMIT and not unfinished:
            return
        at += len(line)
        yield at, None if partial else load_record(line)
        partial = not ends


def ranks_in(folder: Path, world_size: int) -> list[int]:
    """Return the ranks of a run that have left something among its events or logs, in order."""
    found = set[int]()
    for name in (EVENTS, LOGS):
        with contextlib.suppress(OSError):
            names = (path.name for path in (folder / name).iterdir())
            found.update(int(match[1]) for item in names if (match := _RANK_FILE.match(item)))
    return sorted(rank for rank in found if rank < world_size)


_RANK_FILE = re.compile(r"rank-(\d{5,7})\.")


def tail_events(folder: Path, ranks: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return the latest events of ranks, by rank; of many ranks, fewer events each."""
    limit = min(_TAIL_BYTES, _ALL_TAILS // max(len(ranks), 1))
    return {rank: list(read_lines(event_path(folder, rank), limit=limit)) for rank in ranks}


class Follower:
    """Reads what was appended since the last look. Starts at the files' ends: older starts are history."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        for path in self._files():
            with contextlib.suppress(OSError):
                self._offsets[path] = path.stat().st_size

    def _files(self) -> list[Path]:
        files = sorted((self._folder / EVENTS).glob("rank-*.jsonl"))
        metrics = self._folder / METRICS
        return [*files, metrics]

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield new events, oldest first; steps as events of kind ``step`` with the metrics in them.

        What cannot be read now is left for the next look: a file that another machine replaces while it is
        read answers with ``ESTALE`` on a network file system.
        """
        records: list[dict[str, Any]] = []
        files: list[Path] = []
        with contextlib.suppress(OSError):
            files = self._files()
        for path in files:
            with contextlib.suppress(OSError, UnreadableError):
                records.extend(self._tail(path))
        yield from sorted(records, key=lambda record: moment(record.get("time")) or 0.0)

    def _tail(self, path: Path) -> Iterator[dict[str, Any]]:
        offset = self._offsets.get(path, 0)
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size < offset:
                # The metrics were rewound to the step the run continues from.
                self._offsets[path] = size
                return
            for self._offsets[path], record in records_after(stream, offset):
                if record is not None:
                    yield {"kind": "step", **record} if path.name == METRICS else record


def largest_peak(ranks: Iterable[int | None], metrics: Iterable[Mapping[str, Any]]) -> int | None:
    """Return the largest allocated peak of a run in bytes, or None where no step was measured.

    Args:
        ranks: Every rank's peak since the last start, loading included; None where unknown.
        metrics: The lines of ``metrics.jsonl``, those before a resume included.
    """
    steps = [value for line in metrics if (value := line.get("memory_allocated_peak_bytes")) is not None]
    return max([*steps, *(value for value in ranks if value is not None)]) if steps else None
