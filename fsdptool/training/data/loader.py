"""From an endless line of samples to one rank's micro-batches, with or without loading processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fsdptool.errors import ConfigError, FsdptoolError, WorkerError
from fsdptool.training.data.order import Order, Place

if TYPE_CHECKING:
    from torch import Tensor

Sample = Mapping[str, Any]
Collate = Callable[[Sequence[Sample]], "dict[str, Tensor]"]


class Samples(Protocol):
    """Samples by index. ``epoch`` decides what is drawn anew each time (masks, noise, dropped captions)."""

    digest: str
    """Digest of the content: a position counted in other data is refused."""

    def __len__(self) -> int: ...

    def sample(self, index: int, epoch: int) -> Sample:
        """Return one sample."""
        ...


@dataclass(frozen=True, slots=True)
class Share:
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


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure of ours on its way out of a loading process: torch would wrap it in a traceback."""

    kind: type[FsdptoolError]
    message: str
    help: str | None


class _Fetch:
    """What a loading process holds: picklable, small (samples lie in memory-mapped files)."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: Place) -> Sample | _Failure:
        try:
            return self.samples.sample(*place)
        except FsdptoolError as error:
            return _Failure(type(error), error.message, error.help)


class _Join:
    """Collates, or passes a failure on."""

    def __init__(self, collate: Collate) -> None:
        self.collate = collate

    def __call__(self, samples: Sequence[Sample | _Failure]) -> dict[str, Tensor] | _Failure:
        good = [sample for sample in samples if not isinstance(sample, _Failure)]
        if len(good) < len(samples):
            return next(sample for sample in samples if isinstance(sample, _Failure))
        try:
            return self.collate(good)
        except FsdptoolError as error:
            return _Failure(type(error), error.message, error.help)


class _Turns:
    """Endless sampler for torch's DataLoader: the places of this rank's micro-batches from a position on."""

    def __init__(self, order: Order, share: Share, start: int) -> None:
        self._order = order
        self._share = share
        self._start = start

    def __iter__(self) -> Iterator[list[Place]]:
        position = self._start
        while True:
            places = self._order.places(position, self._share.global_batch)
            for turn in range(self._share.accumulation):
                yield list(self._share.mine(places, turn))
            position += self._share.global_batch


class Loader:
    """One rank's data (``training.interfaces.Batches``).

    Args:
        samples: Where samples come from.
        collate: Makes a micro-batch of samples.
        order: The line of samples.
        share: How global batches are split.
        workers: Loading processes of this rank; 0 loads in the training process.
        start_method: How they start (``fork``, ``spawn``, ``forkserver``), or None for Python's default.
        steps: Steps after which the data ends, or None for training data, which never does.
        pin_memory: Whether micro-batches are put into page-locked memory (CUDA only).
    """

    def __init__(
        self,
        samples: Samples,
        collate: Collate,
        order: Order,
        share: Share,
        *,
        workers: int = 0,
        start_method: str | None = None,
        steps: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.samples_per_epoch = order.samples
        self._samples = samples
        self._collate = collate
        self._order = order
        self._share = share
        self._workers = workers
        self._start_method = start_method
        self._steps = steps
        self._pin_memory = pin_memory
        self._position = 0
        self._running: Iterator[dict[str, Tensor] | _Failure] | None = None

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
        """Return the micro-batches of the next optimizer step.

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
            found = [next(self._running) for _ in range(self._share.accumulation)]
        except RuntimeError as error:
            self._running = None
            raise _worker_failure(error, self._position) from error
        batch: list[Mapping[str, Tensor]] = []
        for item in found:
            if isinstance(item, _Failure):
                self.close()
                raise item.kind(item.message, help=item.help)
            batch.append(item)
        self._position += self._share.global_batch
        return batch

    def _start(self) -> Iterator[dict[str, Tensor] | _Failure]:
        turns = _Turns(self._order, self._share, self._position)
        if self._workers == 0:
            fetch, join = _Fetch(self._samples), _Join(self._collate)
            return (join([fetch[place] for place in places]) for places in turns)
        from torch.utils.data import DataLoader

        return iter(
            DataLoader(
                _Fetch(self._samples),  # type: ignore[arg-type]
                batch_sampler=turns,
                collate_fn=_Join(self._collate),
                num_workers=self._workers,
                multiprocessing_context=self._start_method,
                worker_init_fn=_leave_signals_to_the_trainer,
                pin_memory=self._pin_memory,
            )
        )

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
                f"the data is not what the checkpoint was trained on: digest {self.digest[:12]}, "
                f"checkpoint {str(state['digest'])[:12]}",
                help="give the same files, tokenizer and data settings, or start a new run from the weights",
            )
        self._position = int(state["samples"])
        self.close()

    def close(self) -> None:
        """End the loading processes."""
        running, self._running = self._running, None
        shutdown = getattr(running, "_shutdown_workers", None)
        if callable(shutdown):
            shutdown()


def _leave_signals_to_the_trainer(_: int) -> None:
    """A stop is sent to the whole process group; the loading processes must outlive the last save.

    They end with their trainer: torch's worker loop watches its parent (torch 2.13,
    torch/utils/data/_utils/worker.py, ManagerWatchdog).
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _worker_failure(error: RuntimeError, position: int) -> WorkerError | RuntimeError:
    text = str(error)
    if "DataLoader worker" not in text:
        return error
    return WorkerError(
        f"a data loading process died at sample {position}: {text.splitlines()[0]}",
        help="resume with --resume auto; if it was killed for memory, lower data.workers",
    )
