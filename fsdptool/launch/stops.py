"""A stop that is asked for before there is a run to stop. Torch-free."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fsdptool.errors import StoppedError
from fsdptool.launch.failure import signal_name

_NUMBERS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers send; Ctrl-C stays Python's ``KeyboardInterrupt``."""


@contextmanager
def early_stops() -> Iterator[None]:
    """Turn a scheduler's signal into :class:`StoppedError` while the block runs.

    Without it SIGUSR1 and SIGTERM would end the process with a status of their own, on which a Slurm job is
    not put back into the queue.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _stop) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, frame: object) -> None:
    raise StoppedError(
        f"{signal_name(number)} came before the run was started", help="start it again with --resume auto"
    )
