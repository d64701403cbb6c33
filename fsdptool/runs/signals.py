"""Stop signals: in a worker (:class:`SignalFlag`) and in a command (:func:`handle_stop_signals`). Torch-free.

In a worker, the first signal asks all ranks to save and stop; a second one ends the process at once. The
C-level handler only writes a byte, which a thread reads. So a signal is seen while the main thread sits in
a collective (CPython runs Python handlers between byte codes of the main thread only).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from fsdptool.errors import StoppedError
from fsdptool.files.text import open_for_writing

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_ECHO_SECONDS = 5.0
"""A second signal within this time is the first one's echo: Slurm signals every process of a step,
torchrun then forwards its own copy (torch 2.13, elastic/multiprocessing/api.py), and the parent a third;
on a busy node they are seconds apart. A person's second signal goes to the parent, which waits for none."""


def signal_name(number: int) -> str:
    """Return a signal's name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class SignalFlag:
    """Remembers the first stop signal of this process."""

    def __init__(self) -> None:
        self._signal = 0
        self._since = 0.0

    @property
    def requested(self) -> int:
        """The signal number that asked this rank to stop, or 0."""
        return self._signal

    def request(self, number: int) -> None:
        """Ask as a signal would; leaves the process if it was asked before."""
        now = time.monotonic()
        if not self._signal:
            self._signal, self._since = number, now
        elif now - self._since > _ECHO_SECONDS:
            os._exit(128 + number)

    def install(self) -> None:
        """Handle the stop signals from now on (main thread, before anything slow is imported)."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        for number in SIGNALS:
            signal.signal(number, _ignore_in_python)
            # Interrupted system calls are retried, as with the default handlers.
            signal.siginterrupt(number, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_reset_in_child)
        threading.Thread(target=self._watch, args=(reader,), name="stop-signals", daemon=True).start()

    def _watch(self, reader: int) -> None:
        while data := os.read(reader, 64):
            for number in data:
                if number in SIGNALS:
                    self.request(number)


def _ignore_in_python(number: int, _frame: object) -> None:
    """Python's side of a signal: the thread has done the work."""


def _reset_in_child() -> None:
    """In a forked child (a data worker): leave the parent's pipe and the parent's handlers alone."""
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN if number != signal.SIGTERM else signal.SIG_DFL)


def install_stack_dump(path: str | None = None) -> None:
    """Dump every thread's Python stack on SIGUSR2 and on a fatal signal.

    Args:
        path: File to append the dumps to; standard error if None.
    """
    import faulthandler

    # Kept open for the handler.
    stream = sys.stderr if path is None else os.fdopen(open_for_writing(Path(path), append=True), "a")
    faulthandler.enable(stream, all_threads=True)
    faulthandler.register(signal.SIGUSR2, stream, all_threads=True, chain=False)


class _Stop(BaseException):
    """Unwinds the command: no ``except Exception`` of a library may take it for its own."""


class StopSignals:
    """The stop signals this process gets.

    Until :meth:`collect` is called the first one ends the work at once, as an exception. From then on they
    only join ``taken``, for the supervisor to forward.

    Attributes:
        taken: Signal numbers, in order.
    """

    def __init__(self) -> None:
        self.taken: list[int] = []
        self._collecting = False

    def collect(self) -> None:
        """Only collect signals from now on; a signal that a library has swallowed ends the work here."""
        if self.taken:
            self._raise()
        self._collecting = True

    @property
    def ended(self) -> int:
        """The signal that ended the work, or 0."""
        return self.taken[0] if self.taken and not self._collecting else 0

    def take(self, number: int, _frame: object) -> None:
        """Handle a signal. It may come in the middle of anything, a write to the terminal included."""
        self.taken.append(number)
        if not self._collecting:
            self._raise()

    def _raise(self) -> NoReturn:
        raise KeyboardInterrupt if self.taken[0] == signal.SIGINT else _Stop


@contextmanager
def handle_stop_signals(before: str, advice: str) -> Iterator[StopSignals]:
    """Handle the stop signals while the block runs (in the main thread; elsewhere none can come).

    Left to themselves SIGTERM and SIGUSR1 end a process at once: with a status of their own, on which a Slurm
    job is not put back into the queue, with its children alive and what was half written left behind.

    Args:
        before: What a signal that ends the work came before, for the message.
        advice: What to do next.

    Raises:
        StoppedError: SIGTERM or SIGUSR1 ended the work.
        KeyboardInterrupt: Ctrl-C did.
    """
    stops = StopSignals()
    previous = {}
    if threading.current_thread() is threading.main_thread():
        previous = {number: signal.signal(number, stops.take) for number in SIGNALS}
    try:
        yield stops
    except BaseException:
        # Whatever a library made of the exception, it is the signal's.
        if not stops.ended:
            raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stops.ended == signal.SIGINT:
        raise KeyboardInterrupt
    if stops.ended:
        raise StoppedError(f"{signal_name(stops.ended)} was received before {before}", help=advice)
