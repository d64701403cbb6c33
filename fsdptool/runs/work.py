"""Progress of long work: how far it is, and the estimated time left. Whoever shows it installs a listener."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fsdptool.formatting import amount, elapsed

_WINDOW = 50
"""Marks that a pace is estimated from: work speeds up and slows down."""

_EVERY_SECONDS = 0.5
"""Least time between two lines: most listeners rewrite a line of a terminal."""

_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Send the progress of the work in this block to ``listener``, one line at a time."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Countdown:
    """Estimates the time left of work whose size is known.

    Args:
        total: The size, in any unit; None if it is not known (yet).
    """

    def __init__(self, total: float | None) -> None:
        self.total = total
        self._marks: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def left(self, done: float, now: float | None = None) -> float | None:
        """Return the seconds left once ``done`` is done; None while there is no pace.

        Args:
            done: How much is done.
            now: Seconds of any clock; None is the monotonic clock.
        """
        now = time.monotonic() if now is None else now
        if self._marks and done <= self._marks[-1][0]:
            self._marks.clear()
        self._marks.append((done, now))
        first, began = self._marks[0]
        if self.total is None or done <= first or done >= self.total:
            return None
        return (self.total - done) * (now - began) / (done - first)


def left_text(seconds: float | None) -> str:
    """Return ``, 12 s left``, or nothing where the time is not known."""
    return f", {elapsed(seconds)} left" if seconds is not None else ""


class LongWork:
    """Tells the listener how far work is, at most twice a second.

    Args:
        what: What is done, as a line begins.
        total: How many items there are; None if that is not known.
        items: What is counted; None counts bytes.
        about: Whether the total is an estimate.
    """

    def __init__(self, what: str, total: int | None, items: str | None, *, about: bool = False) -> None:
        self._what, self._items, self._about = what, items, about
        self._countdown = Countdown(total)
        self._told = time.monotonic()

    def advance(self, done: int) -> None:
        """Say that ``done`` items are done."""
        listener = _listener.get()
        now = time.monotonic()
        if listener is None or now - self._told < _EVERY_SECONDS:
            return
        self._told = now
        left = self._countdown.left(done, now)
        total = self._countdown.total
        of = f" of {'about ' if self._about else ''}{self._count(total)}" if total is not None else ""
        items = f" {self._items}" if self._items is not None else ""
        listener(f"{self._what}: {self._count(done)}{of}{items}{left_text(left)}")

    def _count(self, number: float) -> str:
        return amount(int(number)) if self._items is None else f"{number:,}"
