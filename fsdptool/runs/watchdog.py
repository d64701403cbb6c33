"""Notices that this rank makes no progress, says where, and ends it.

A collective that waits for a rank times out by itself. A rank that never reaches one (a file system that
does not answer, a deadlock among loading processes) leaves only its peers' timeouts as a trace, and if all
ranks wait for the same file server nothing ends at all. The worker calls :func:`enter` when a phase begins
and :func:`beat` as it gets on; a thread looks at the time since.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from fsdptool.errors import ExitCode
from fsdptool.records.run import RankProgress
from fsdptool.runs.events import STARTUP, EventLog, WorkerPhase
from fsdptool.runs.folder import FLIGHT_RECORD, LOGS
from fsdptool.runs.progress import ProgressFile, write_interval

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
    """Write NCCL's last collectives, which it would write itself only when one of them times out."""
    torch = sys.modules.get("torch")
    c10d = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    dump = getattr(c10d, "_dump_nccl_trace", None)
    if dump is None:
        return
    with suppress(Exception):
        record = dump()
        if record:
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
