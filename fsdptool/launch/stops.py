"""Stop requests to a command itself, whatever it is doing when they come. Torch-free."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from fsdptool.errors import StoppedError
from fsdptool.launch.failure import signal_name
from fsdptool.runs.stop import SIGNALS


class _Stop(BaseException):
    """Unwinds the command: no ``except Exception`` of a library may take it for its own."""


class Stops:
    """The stop signals this process gets.

    Until :meth:`note` is called the first one ends the work at once, as an exception. From then on they only
    join ``taken``, for whoever has workers to ask.

    Attributes:
        taken: Signal numbers, in order.
    """

    def __init__(self) -> None:
        self.taken: list[int] = []
        self._noting = False

    def note(self) -> None:
        """Only take signals from now on; if a library kept one to itself, it ends the work here."""
        if self.taken:
            self._raise()
        self._noting = True

    @property
    def ended(self) -> int:
        """The signal that ended the work, or 0."""
        return self.taken[0] if self.taken and not self._noting else 0

    def take(self, number: int, frame: object) -> None:
        """Handle a signal. It may come in the middle of anything, a write to the terminal included."""
        self.taken.append(number)
        if not self._noting:
            self._raise()

    def _raise(self) -> NoReturn:
        raise KeyboardInterrupt if self.taken[0] == signal.SIGINT else _Stop


@contextmanager
def take_stops(before: str, advice: str) -> Iterator[Stops]:
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
    stops = Stops()
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
        raise StoppedError(f"{signal_name(stops.ended)} came before {before}", help=advice)
