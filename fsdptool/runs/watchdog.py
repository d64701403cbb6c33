"""Notices that this rank has stopped moving, says where, and ends it.

A collective that waits for a rank times out by itself. A rank that never reaches one (a file system that
does not answer, a deadlock among loading processes) leaves no trace but its peers' timeouts, and if all
ranks wait for the same file server nothing ends at all. Whoever does work calls :func:`doing` when it
turns to something else and :func:`beat` as it gets on; a thread looks at the time since.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ExitCode

if TYPE_CHECKING:
    from fsdptool.runs.events import EventLog

TIMEOUT = "FSDPTOOL_COLLECTIVE_TIMEOUT_SECONDS"
"""Environment variable with the seconds of ``fsdptool train --timeout``."""

_LAST_WORDS_SECONDS = 2.0
"""Between the failure event and the end: the parent asks the other ranks for their stacks meanwhile,
which they could not give once our end had broken their connections."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What a rank is at, and how long it may go without a sign of life.

    Attributes:
        words: After "while".
        share: Of the collective timeout.
        at_least: Seconds, whatever the timeout.
    """

    words: str
    share: float = 1.1
    at_least: float = 0.0

    def limit(self, timeout: float) -> float:
        """Return the seconds without a beat that count as a stall."""
        return max(self.share * timeout, self.at_least)


# Loading needs no other rank, so who stalls there is the cause, and must speak before the peers that wait
# for it give up. Everything else may be waiting for a collective, whose own timeout comes first.
LOADING = Activity("loading data", share=0.9)
STARTING = Activity("starting", at_least=600.0)
RESTORING = Activity("reading a checkpoint", at_least=1800.0)
STEPPING = Activity("taking a step")
SAVING = Activity("saving a checkpoint", at_least=1800.0)
EVALUATING = Activity("evaluating")
SAMPLING = Activity("sampling")


class Pulse:
    """Watches the main thread of this process.

    Args:
        events: Gets the ``failure``.
        timeout: Seconds a collective may take.
    """

    def __init__(self, events: EventLog, timeout: float) -> None:
        self._events = events
        self._timeout = timeout
        self._activity = STARTING
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._watched = threading.main_thread().ident

    def turn_to(self, activity: Activity) -> None:
        """Begin something else."""
        self._since = time.monotonic()
        self._activity = activity

    def beat(self) -> None:
        """Give a sign of life."""
        self._since = time.monotonic()

    def watch(self) -> None:
        """Look every tenth of the timeout (at most a second apart) until :meth:`end` is called."""
        while not self._ended.wait(min(self._timeout / 10.0, 1.0)):
            still = time.monotonic() - self._since
            if still > self._activity.limit(self._timeout):
                self._give_up(still)

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def _give_up(self, still: float) -> None:
        stack = traceback.extract_stack(sys._current_frames()[self._watched]) if self._watched else []
        self._events.emit("failure", **stalled(self._activity, still, stack))
        # The worker's handler is C code (stop.install_stack_dump): it answers whatever Python waits for.
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(_LAST_WORDS_SECONDS)
        os._exit(int(ExitCode.WORKER_FAILED))


def stalled(activity: Activity, seconds: float, stack: traceback.StackSummary | list[Any]) -> dict[str, Any]:
    """Return the fields of a ``failure`` event, as ``guard.describe`` names them."""
    where = f" (line {stack[-1].lineno} of {Path(stack[-1].filename).name})" if stack else ""
    return {
        "error": "Stalled",
        "message": f"no sign of life for {seconds:.0f} s while {activity.words}{where}",
        "help": "read the stacks in logs/; raise --timeout if it was only slow; continue with --resume auto",
        "exit_code": int(ExitCode.WORKER_FAILED),
        "retryable": True,
        "secondary": False,
        # Only who stalls without waiting for others is surely the cause.
        "timeout": activity is not LOADING,
        "out_of_memory": False,
        "traceback": traceback.format_list(stack),
    }


_current: Pulse | None = None


@contextmanager
def watched(events: EventLog) -> Iterator[None]:
    """Watch this process while the block runs."""
    global _current
    pulse = Pulse(events, float(os.environ.get(TIMEOUT, "600")))
    _current = pulse
    threading.Thread(target=pulse.watch, name="pulse", daemon=True).start()
    try:
        yield
    finally:
        pulse.end()
        _current = None


def doing(activity: Activity) -> None:
    """Say what the main thread turns to; nothing happens where nobody watches."""
    if _current is not None:
        _current.turn_to(activity)


def beat(*_: object) -> None:
    """Give a sign of life (also as a module's forward hook, so any arguments will do)."""
    if _current is not None:
        _current.beat()
