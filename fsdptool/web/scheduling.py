"""The queue of runs while the server runs: a thread starts its entries. Runs outlive the server."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from fsdptool.errors import FsdptoolError
from fsdptool.launch.queue.entries import Queue
from fsdptool.launch.queue.scheduler import COMMAND, Scheduler


class QueueRunner:
    """A queue, and the thread that starts its entries.

    Args:
        queue: The queue; that of this machine by default.
        command: What runs ``train``, followed by the arguments of ``fsdptool``.

    Attributes:
        queue: The queue.
    """

    def __init__(self, queue: Queue | None = None, *, command: Sequence[str] = COMMAND) -> None:
        self.queue = queue if queue is not None else Queue()
        self._scheduler = Scheduler(self.queue, command=command)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def problem(self) -> FsdptoolError | None:
        """Why the entries cannot be started at the moment, or None."""
        return self._scheduler.problem

    def start(self) -> None:
        """Start the entries from now on."""
        self._thread = threading.Thread(
            target=self._scheduler.run, args=(self._ended,), name="queue", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Start no more entries. Runs continue."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
