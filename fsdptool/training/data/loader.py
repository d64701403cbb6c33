"""From an endless line of samples to one rank's micro-batches, with or without loading processes.

A thread of the training process reads the next step's micro-batches, and copies them to a GPU, while the
current step runs. It is one step ahead, never two. What it has read and nobody has taken is not counted in
the loader's position, so a run that ends here reads it again.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.records.recipe import PADDING_MULTIPLE
from fsdptool.training.data.order import Order, Place
from fsdptool.training.data.workers import Workers

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


Sample = Mapping[str, Any]
"""Arrays, tensors or numbers by name."""
Array = Any
"""A numpy array or a torch tensor: text is loaded without torch, whose import costs seconds."""


class Stack:
    """Stacks equal samples.

    Args:
        shared: Names that are taken from the first sample, without a new dimension.
        only: Names that are kept; None keeps all.
    """

    def __init__(self, *, shared: Collection[str] = (), only: Collection[str] | None = None) -> None:
        self._shared = frozenset(shared)
        self._only = only

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Array]:
        names = [name for name in samples[0] if self._only is None or name in self._only]
        return {
            name: samples[0][name] if name in self._shared else stack([sample[name] for sample in samples])
            for name in names
        }


class TrimmedStack(Stack):
    """Stacks padded samples, and cuts off the trailing positions at which every sample is padding.

    Sequences are cut to the length of the longest sample, which is the number of ones in its
    ``attention_mask``, rounded up to a multiple of ``PADDING_MULTIPLE``.
    """

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Array]:
        whole = len(samples[0]["attention_mask"])
        longest = max(int(np.sum(sample["attention_mask"])) for sample in samples)
        length = min(-(-longest // PADDING_MULTIPLE) * PADDING_MULTIPLE, whole)
        return super().__call__(
            [
                {name: value[:length] if np.shape(value) == (whole,) else value for name, value in s.items()}
                for s in samples
            ]
        )


def stack(values: Sequence[Any]) -> Array:
    """Return arrays, numbers or tensors of one shape along a new first dimension."""
    if isinstance(values[0], np.ndarray | np.generic | int | float):
        return np.stack([np.asarray(value) for value in values])
    import torch

    return torch.stack(list(values))


def as_tensors(batch: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return a micro-batch whose arrays are tensors."""
    import torch

    return {
        name: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        for name, value in batch.items()
    }


Collate = Callable[[Sequence[Sample]], dict[str, Array]]


class Samples(Protocol):
    """Samples by index. ``epoch`` decides what is drawn again each time (masks, noise, dropped captions)."""

    digest: str
    """Digest of the content: a position counted in other data is refused."""

    def __len__(self) -> int: ...

    def sample(self, index: int, epoch: int) -> Sample:
        """Return one sample."""
        ...


@dataclass(frozen=True, slots=True)
class RankShare:
    """How a global batch is split.

    Attributes:
        rank, world: This data rank and their number (ranks that share a sequence count once).
        micro_batch: Samples of one micro-batch.
        accumulation: Micro-batches of one optimizer step on one rank.
    """

    rank: int
    world: int
    micro_batch: int
    accumulation: int

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step over all ranks."""
        return self.world * self.micro_batch * self.accumulation

    def mine(self, places: Sequence[Place], turn: int) -> Sequence[Place]:
        """Return this rank's part of a global batch in accumulation step ``turn``."""
        start = (turn * self.world + self.rank) * self.micro_batch
        return places[start : start + self.micro_batch]


class _Turns:
    """Makes the micro-batches of this rank, numbered from a position on. Picklable and small:
    samples lie in memory-mapped files."""

    def __init__(
        self, samples: Samples, collate: Collate, order: Order, share: RankShare, start: int
    ) -> None:
        self._samples = samples
        self._collate = collate
        self._order = order
        self._share = share
        self._start = start
        self._line: tuple[int, Sequence[Place]] = (-1, ())

    def __call__(self, number: int) -> dict[str, Array]:
        step, turn = divmod(number, self._share.accumulation)
        if self._line[0] != step:
            position = self._start + step * self._share.global_batch
            self._line = (step, self._order.places(position, self._share.global_batch))
        places = self._share.mine(self._line[1], turn)
        return self._collate([self._samples.sample(*place) for place in places])


@dataclass(frozen=True, slots=True)
class Opened:
    """Data that is ready to be read: samples, their line, and how they become a micro-batch."""

    samples: Samples
    order: Order
    collate: Collate


class Loader:
    """The data of one rank: per optimizer step, the list of this rank's micro-batches.

    Global batches are composed before they are split, so the samples of a step do not depend on the number of
    ranks. Training data never ends: epochs follow one another. Evaluation data ends, and starts again with
    every ``iter()``.

    Attributes:
        samples_per_epoch: Samples of one epoch over all ranks.

    Args:
        samples: Where samples come from.
        collate: Makes a micro-batch of samples.
        order: The line of samples.
        share: How global batches are split.
        workers: Loading processes of this rank; 0 loads in the training process.
        start_method: How they start: ``forkserver``, ``spawn`` or ``fork``.
        steps: Steps after which the data ends, or None for training data, which never does.
        device: Where micro-batches are to be; None leaves them on the CPU.
    """

    def __init__(
        self,
        samples: Samples,
        collate: Collate,
        order: Order,
        share: RankShare,
        *,
        workers: int = 0,
        start_method: str = "forkserver",
        steps: int | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.samples_per_epoch = order.samples
        self._samples = samples
        self._collate = collate
        self._order = order
        self._share = share
        self._workers = workers
        self._start_method = start_method
        self._steps = steps
        self._device = device
        self._position = 0
        self._running: ReadAhead | None = None
        self._processes: Workers | None = None

    @property
    def digest(self) -> str:
        """Digest of the content."""
        return self._samples.digest

    @property
    def samples(self) -> int:
        """Samples handed out so far over all ranks."""
        return self._position

    @property
    def epoch(self) -> float:
        """Epochs handed out so far."""
        return self._position / self.samples_per_epoch

    @property
    def steps(self) -> int | None:
        """Steps after which the data ends, or None."""
        return self._steps

    def __iter__(self) -> Iterator[list[Mapping[str, Tensor]]]:
        if self._steps is not None:
            self._position = 0
            self.close()
        return self

    def __next__(self) -> list[Mapping[str, Tensor]]:
        """Return the micro-batches of the next optimizer step; that of the step after it is read meanwhile.

        Raises:
            StopIteration: Evaluation data is at its end.
            WorkerError: A loading process died.
            FsdptoolError: A sample cannot be read.
        """
        if self._steps is not None and self._position >= self._steps * self._share.global_batch:
            self.close()
            raise StopIteration
        if self._running is None:
            self._running = self._start()
        try:
            step = next(self._running)
        except FsdptoolError:
            self.close()
            raise
        self._position += self._share.global_batch
        return step

    def _start(self) -> ReadAhead:
        turns = _Turns(self._samples, self._collate, self._order, self._share, self._position)
        count = self._share.accumulation
        if not self._workers:
            made = (as_tensors(turns(number)) for number in itertools.count())
            return ReadAhead(self._steps_of(made, count), device=self._device)
        self._processes = Workers(turns, self._workers, start_method=self._start_method)
        return ReadAhead(
            self._steps_of(self._processes, count), device=self._device, interrupt=self._processes.interrupt
        )

    def _steps_of(
        self, made: Iterator[dict[str, Tensor]], count: int
    ) -> Iterator[list[Mapping[str, Tensor]]]:
        """Return micro-batches by steps, from here to the end of the data."""
        if self._steps is None:
            return _grouped(made, count, itertools.repeat(None))
        return _grouped(made, count, range(self._steps - self._position // self._share.global_batch))

    def example(self, index: int) -> dict[str, Tensor]:
        """Return one sample of the first epoch as a micro-batch; the position stays."""
        return as_tensors(self._collate([self._samples.sample(index, 0)]))

    def state_dict(self) -> dict[str, Any]:
        """Return the position, equal on all ranks: samples consumed, and what they were counted in."""
        return {"samples": self._position, "samples_per_epoch": self.samples_per_epoch, "digest": self.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after ``state``, on whatever number of ranks and size of global batch.

        Raises:
            ConfigError: The data is not what the position was counted in.
        """
        if state["digest"] != self.digest:
            raise ConfigError(
                f"the data is not the data the checkpoint was trained on: digest {self.digest[:12]}, "
                f"checkpoint {str(state['digest'])[:12]}",
                help="give the same files, tokenizer and data settings, or start a new run from the weights",
            )
        self._position = int(state["samples"])
        self.close()

    def close(self) -> None:
        """End the reading ahead and the loading processes; the next step starts them again."""
        running, self._running = self._running, None
        processes, self._processes = self._processes, None
        if running is not None:
            running.close()
        if processes is not None:
            processes.close()


def _grouped(
    made: Iterator[dict[str, Tensor]], count: int, steps: Iterable[object]
) -> Iterator[list[Mapping[str, Tensor]]]:
    for _ in steps:
        yield list(itertools.islice(made, count))
