"""Reads the next step's micro-batches, and copies them to a GPU, while the current step runs.

A thread of the training process is one step ahead, never two. What it has read and nobody has taken is not
counted in the loader's position, so a run that ends here reads it again.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Step = list[Mapping[str, "Tensor"]]
"""The micro-batches of a step."""

_PATIENCE = 2.0
"""Seconds to wait for a thread that is inside a slow read; it ends with the process otherwise."""


@dataclass(slots=True)
class _Exchange:
    """What the thread and its reader share; the thread reads one step for each permit of ``wanted``."""

    wanted: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(1))
    ready: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    ended: bool = False


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


class ReadAhead:
    """An iterator over steps that a thread reads ahead.

    Args:
        steps: Used by the thread alone. What it raises is raised where its step is asked for.
        device: Where the micro-batches are to be. For a GPU they are page-locked and copied on a stream of
            their own; None, like the CPU, leaves them where they are.
        interrupt: Makes a read that waits in ``steps`` end.
    """

    def __init__(
        self,
        steps: Iterator[Step],
        *,
        device: torch.device | None = None,
        interrupt: Callable[[], None] = lambda: None,
    ) -> None:
        self._exchange = _Exchange()
        self._copies = _Copies(device) if device is not None and device.type == "cuda" else None
        thread = threading.Thread(
            target=_read, args=(steps, self._copies, self._exchange), name="read-ahead", daemon=True
        )
        # The thread does not refer to this object, so that it ends with it.
        self._end = Finalize(self, _end, args=(self._exchange, thread, interrupt), exitpriority=110)
        thread.start()

    def __iter__(self) -> ReadAhead:
        return self

    def __next__(self) -> Step:
        """Return the micro-batches of the next step, on the device.

        Raises:
            StopIteration: There are no more.
            Exception: As ``steps`` raised it, here and whenever it is asked for again.
        """
        read = self._exchange.ready.get()
        if isinstance(read, _Failed):
            self._exchange.ready.put(read)
            raise read.error
        self._exchange.wanted.release()
        step, copied = read
        if self._copies is not None:
            self._copies.take(step, copied)
        return step  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the thread."""
        self._end()


def _read(steps: Iterator[Step], copies: _Copies | None, exchange: _Exchange) -> None:
    while True:
        exchange.wanted.acquire()
        if exchange.ended:
            return
        try:
            step = next(steps)
            exchange.ready.put((step, None) if copies is None else copies.begin(step))
        except BaseException as error:
            exchange.ready.put(_Failed(error))
            return


def _end(exchange: _Exchange, thread: threading.Thread, interrupt: Callable[[], None]) -> None:
    exchange.ended = True
    interrupt()
    exchange.wanted.release()
    thread.join(_PATIENCE)


class _Copies:
    """Copies to a GPU on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        make: Any = torch.cuda.Stream  # not annotated in torch 2.13
        self._stream = make(device)

    def begin(self, step: Step) -> tuple[Step, Any]:
        """Begin to copy a step; returns it, and an event that is passed once it is there."""
        import torch

        from fsdptool.families.objectives.packed_attention import with_documents

        # The current device and stream belong to a thread.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            moved: Step = [
                {name: self._moved(value) for name, value in with_documents(batch, self._device).items()}
                for batch in step
            ]
            return moved, self._stream.record_event()

    def _moved(self, value: Tensor) -> Tensor:
        # The allocator of page-locked memory keeps it until the copy is done.
        pinned = value.pin_memory() if value.numel() else value
        return pinned.to(self._device, non_blocking=True)

    def take(self, step: Step, copied: Any) -> None:
        """Let the current stream, and not the host, wait for a step, whose memory it then uses."""
        import torch

        current = torch.cuda.current_stream(self._device)
        current.wait_event(copied)
        for batch in step:
            for value in batch.values():
                value.record_stream(current)
