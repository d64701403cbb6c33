"""Stopping on request: one signal asks all ranks to save and leave, a second one leaves at once.

The C-level handler only writes a byte; a thread reads it. So a signal is seen while the main thread
sits in a collective (CPython runs Python handlers between byte codes of the main thread only), and a
second one ends the process even then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_ECHO_SECONDS = 5.0
"""A second signal within this time is the first one's echo: Slurm signals every process of a step,
torchrun then forwards its own copy (torch 2.13, elastic/multiprocessing/api.py), and the parent a third;
on a busy node they are seconds apart. A person's second signal goes to the parent, which waits for none."""


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
            signal.signal(number, _nothing)
            # Interrupted system calls are retried, as with the default handlers.
            signal.siginterrupt(number, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget)
        threading.Thread(target=self._watch, args=(reader,), name="stop-signals", daemon=True).start()

    def _watch(self, reader: int) -> None:
        while data := os.read(reader, 64):
            for number in data:
                if number in SIGNALS:
                    self.request(number)


def _nothing(number: int, frame: object) -> None:
    """Python's side of a signal: the thread has done the work."""


def _forget() -> None:
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

    stream = sys.stderr if path is None else open(path, "a", encoding="utf-8")  # noqa: SIM115, PTH123 - kept open for the handler
    faulthandler.enable(stream, all_threads=True)
    faulthandler.register(signal.SIGUSR2, stream, all_threads=True, chain=False)
