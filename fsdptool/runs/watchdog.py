"""Notices that this rank makes no progress, says where, and ends it; tells which ranks are silent.

A collective that waits for a rank times out by itself. A rank that never reaches one (a file system that
does not answer, a deadlock among loading processes) leaves only its peers' timeouts as a trace, and if all
ranks wait for the same file server nothing ends at all. The worker calls :func:`enter` when a phase begins
and :func:`beat` as it gets on; a thread looks at the time since.

When a rank hangs, the others report a timeout of a collective. Their message says who waited, not who was
waited for. So each watchdog also rewrites a small file with what its rank is doing, when it last made
progress, and whether it waits for others itself; the parent process and ``diagnose`` read these files.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from fsdptool.errors import ConfigError, ExitCode
from fsdptool.files.text import UnreadableError, open_for_writing, read_ends
from fsdptool.files.values import count, load_record, moment
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.run import RankProgress
from fsdptool.runs.events import STARTUP, EventLog, WorkerPhase, tail_events
from fsdptool.runs.folder import EVENTS, FLIGHT_RECORD, LOGS

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


TIMEOUT = "FSDPTOOL_COLLECTIVE_TIMEOUT_SECONDS"
"""Environment variable with the seconds of ``fsdptool train --timeout``."""

_STACK_DUMP_SECONDS = 2.0
"""Between the failure event and the end of the process: the parent asks the other ranks for their stacks
meanwhile, which they could not give once our end had broken their connections."""


_TIMEOUT_SHARE, _TIMEOUT_SLACK_SECONDS = 1.1, 30.0
"""How long a phase may go without a sign of life, in collective timeouts, and at least this much longer than
one: most phases may be waiting for a collective, whose own timeout must come first. It starts only with the
collective, which a busy machine reaches seconds after the last sign of life, however short the timeout is."""

_LOADING_SHARE = 0.9
"""The same while data is loaded. That needs no other rank, so a rank that stalls there is the cause, and must
speak before the ranks that wait for it give up."""

_LEAST_SECONDS = {
    **dict.fromkeys(STARTUP, 600.0),
    WorkerPhase.RESTORING: 1800.0,
    WorkerPhase.SAVING: 1800.0,
}
"""Seconds that a phase may take without a sign of life however short the timeout is."""


_COLLECTIVES = ("/torch/distributed/", "/fsdptool/distributed/", "/fsdptool/training/step.py")
"""Sources whose innermost frame means that the main thread waits for other ranks. A step hands its
collectives to a GPU and then reads a result: there a rank hangs when another one does not take part."""


def collective_timeout() -> float:
    """Return the seconds a collective of this run may take."""
    return float(os.environ.get(TIMEOUT, "600"))


def stall_limit(phase: WorkerPhase, timeout: float) -> float:
    """Return the seconds without progress in ``phase`` that count as a stall.

    Args:
        phase: What the main thread does.
        timeout: Seconds a collective may take.
    """
    if phase is WorkerPhase.LOADING_DATA:
        return _LOADING_SHARE * timeout
    usual = max(_TIMEOUT_SHARE * timeout, timeout + _TIMEOUT_SLACK_SECONDS)
    return max(usual, _LEAST_SECONDS.get(phase, 0.0))


class Watchdog:
    """Watches the main thread of this process, and writes down what it does.

    Args:
        events: Gets the ``failure``.
        timeout: Seconds a collective may take.
    """

    def __init__(self, events: EventLog, timeout: float) -> None:
        self._events = events
        self._timeout = timeout
        self._phase = WorkerPhase.STARTING
        self._step: int | None = None
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._watched = threading.main_thread().ident
        self._file = ProgressFile(events.folder, events.rank)
        self._interval = write_interval(int(os.environ.get("WORLD_SIZE", "1")))

    def enter(self, phase: WorkerPhase, step: int | None) -> None:
        """Begin another phase; without a step, that of the phase before."""
        self._since = time.monotonic()
        self._phase = phase
        self._step = self._step if step is None else step

    def beat(self) -> None:
        """Report progress."""
        self._since = time.monotonic()

    def watch(self) -> None:
        """Look every tenth of the timeout (at most a second apart) until :meth:`end` is called."""
        written = float("-inf")
        while not self._ended.wait(min(self._timeout / 10.0, 1.0)):
            still = time.monotonic() - self._since
            if time.monotonic() - written >= self._interval:
                written = time.monotonic()
                self._file.write(self._progress(still))
            if still > stall_limit(self._phase, self._timeout):
                self._end_stalled(still)

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _progress(self, still: float) -> RankProgress:
        now = time.time()
        frame = sys._current_frames().get(self._watched) if self._watched is not None else None
        # The innermost Python frame calls the collective, which torch waits for in C++.
        waiting = frame is not None and waits_for_others(frame.f_code.co_filename)
        return RankProgress(
            self._events.rank, self._phase, self._step, now, now - still, waiting, self._interval
        )

    def _end_stalled(self, still: float) -> None:
        stack = traceback.extract_stack(sys._current_frames()[self._watched]) if self._watched else []
        self._events.emit("failure", **describe_stall(self._phase, still, stack))
        _write_flight_record(self._events.folder, self._events.rank)
        # The worker's handler is C code (signals.install_stack_dump): it answers whatever Python waits for.
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(_STACK_DUMP_SECONDS)
        os._exit(int(ExitCode.WORKER_FAILED))


def waits_for_others(source: str) -> bool:
    """Say whether a main thread whose innermost frame is in ``source`` waits for other ranks."""
    return any(part in source.replace(os.sep, "/") for part in _COLLECTIVES)


def _write_flight_record(folder: Path, rank: int) -> None:
    """Write the last collectives, which torch would write itself only when one of them times out."""
    torch = sys.modules.get("torch")
    c10d = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    # A build without NCCL has the record of other backends only.
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if dump is None:
        return
    with suppress(Exception):
        record = dump()
        if b"collective_seq_id" in record:
            (folder / LOGS / f"{FLIGHT_RECORD}{rank}").write_bytes(record)


def describe_stall(
    phase: WorkerPhase, seconds: float, stack: traceback.StackSummary | list[Any]
) -> dict[str, Any]:
    """Return the fields of a ``failure`` event, as ``worker_entry.describe`` names them."""
    where = f" (line {stack[-1].lineno} of {Path(stack[-1].filename).name})" if stack else ""
    return {
        "error": "Stalled",
        "message": f"no progress for {seconds:.0f} s while {phase}{where}",
        "help": "read the stack traces in logs/; increase --timeout if the run was only slow",
        "exit_code": int(ExitCode.WORKER_FAILED),
        "retryable": True,
        "secondary": False,
        # Only a rank that stalls without waiting for others is surely the cause.
        "timeout": phase is not WorkerPhase.LOADING_DATA,
        "out_of_memory": False,
        "traceback": traceback.format_list(stack),
    }


_current: Watchdog | None = None


@contextmanager
def watched(events: EventLog) -> Iterator[None]:
    """Watch this process while the block runs."""
    global _current
    watchdog = Watchdog(events, collective_timeout())
    _current = watchdog
    threading.Thread(target=watchdog.watch, name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        watchdog.end()
        _current = None


def enter(phase: WorkerPhase, step: int | None = None) -> None:
    """Begin a phase of the main thread, of the given optimizer step; without a watchdog do nothing."""
    if _current is not None:
        _current.enter(phase, step)


class PhaseReport(Protocol):
    """Called when a worker's phase begins."""

    def __call__(self, phase: WorkerPhase, model: str | None = None) -> None:
        """Report ``phase``; ``model`` says whose it is where a run holds several (``teacher``)."""
        ...


def report_phase(events: EventLog, phase: WorkerPhase, model: str | None = None) -> None:
    """Begin ``phase`` and tell the parent process."""
    enter(phase)
    events.emit("phase", name=phase, **({} if model is None else {"model": model}))


def no_report(phase: WorkerPhase, model: str | None = None) -> None:
    """Report nothing: for tests and benchmarks that build a model outside a run."""


def beat(*_: object) -> None:
    """Report progress (also as a module's forward hook, so any arguments are accepted)."""
    if _current is not None:
        _current.beat()
