"""What the parts of a training worker promise each other. Protocols only; nothing is imported to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from fsdptool.records.run import Metrics, RunPhase


@runtime_checkable
class Batches(Protocol):
    """The data of one rank: per optimizer step, the list of this rank's micro-batches.

    Global batches are composed before they are split, so the samples of a step do not depend on the
    number of ranks. Training data never ends: epochs follow one another.
    Evaluation data ends, and starts again with every ``iter()``.

    Attributes:
        samples_per_epoch: Samples of one epoch over all ranks.
        epoch: Epochs consumed so far, as a fraction.
        samples: Samples consumed so far over all ranks.
    """

    samples_per_epoch: int

    @property
    def epoch(self) -> float: ...

    @property
    def samples(self) -> int: ...

    def __iter__(self) -> Iterator[list[Mapping[str, Tensor]]]: ...

    def __next__(self) -> list[Mapping[str, Tensor]]:
        """Return the micro-batches of the next optimizer step, one per accumulation step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step handed out: plain JSON data, equal on all ranks."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the position ``state`` names, on whatever number of ranks.

        Raises:
            ConfigError: The data is not what the position was counted in.
        """
        ...

    def close(self) -> None:
        """End the loading workers."""
        ...


class TrainState(Protocol):
    """What a checkpoint holds, as the engine sees it."""

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, as live references that a load copies into.

        Names are ``model/<fqn>``, ``optimizer/<fqn>/<state>``, ``ema/<fqn>``. DTensors are sharded
        by their placements; any other tensor is the same on every rank and saved once. Optimizer
        states exist already (the engine materialises them before a load).
        """
        ...

    def progress(self) -> dict[str, Any]:
        """Return plain JSON data that is equal on all ranks.

        Holds at least ``step``, ``epoch``, ``samples``, ``tokens`` and ``data``
        (:meth:`Batches.state_dict`), and whatever the scheduler and the scaler need.
        """
        ...

    def rank_tensors(self) -> dict[str, Tensor]:
        """Return this rank's own tensors (random generator states); never resharded."""
        ...

    def restore(self, progress: Mapping[str, Any], rank_tensors: Mapping[str, Tensor] | None) -> None:
        """Continue from a checkpoint whose tensors are loaded already.

        Args:
            progress: What :meth:`progress` returned when it was saved, equal on all ranks.
            rank_tensors: What :meth:`rank_tensors` returned for this rank, or None when the run
                continues on another number of ranks (generators are then seeded from the step).
        """
        ...


class Checkpointer(Protocol):
    """Writes and reads checkpoints. Every method but :meth:`due` is collective.

    A failure on any rank (full disk on rank 0 alone) raises on every rank.
    """

    def due(self, step: int) -> bool:
        """Say whether the recipe wants a checkpoint after ``step`` (equal on all ranks)."""
        ...

    def save(self, state: TrainState, *, wait: bool = False) -> None:
        """Write a checkpoint of ``state``; asynchronous saves return once the tensors are staged.

        Args:
            state: What to save; its step names the checkpoint.
            wait: Return only when it is complete on disk (last step, stop request).
        """
        ...

    def poll(self) -> None:
        """Between steps: raise what an asynchronous save failed with. Costs no collective when idle."""
        ...

    def load(self, state: TrainState) -> int | None:
        """Load the checkpoint the run asks for into ``state``; returns its step, or None for a new start."""
        ...

    def rollback(self, state: TrainState) -> int | None:
        """Load the newest good checkpoint of this very run; returns its step, or None if there is none."""
        ...

    def close(self) -> None:
        """Wait for a save in flight."""
        ...


class Events(Protocol):
    """What a rank tells the parent process and posterity."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event of this rank.

        The engine emits ``phase`` (``name``: importing, building, loading, sharding, training, ...),
        ``proof`` (rank 0: the sharding proof) and ``evaluation`` (``step``, ``loss``, ``metrics``).
        """
        ...

    def memory(self, moments: Mapping[str, int]) -> None:
        """Report the measured peak of every moment in bytes, whenever one is new or clearly higher."""
        ...

    def step(self, metrics: Metrics) -> None:
        """Record one optimizer step: rank 0 appends it to ``metrics.jsonl`` and to the trackers."""
        ...

    def rewind(self, step: int) -> int:
        """Forget the metrics after ``step`` (the checkpointer calls it on every load); returns how many."""
        ...


class StopFlag(Protocol):
    """Whether this rank was asked to stop. Ranks agree on it once a step, in the engine's own reduction."""

    @property
    def requested(self) -> int:
        """The signal number that asked, or 0."""
        ...


class Meter(Protocol):
    """Measures the memory of this rank over a step. ``instrument`` names what the figures are."""

    instrument: str

    def step(self, step: int) -> AbstractContextManager[None]:
        """Enter around an optimizer step (forward, backward, clipping, update)."""
        ...

    def moment(self, name: RunPhase) -> AbstractContextManager[None]:
        """Enter around a part of a step (forward, backward, optimizer), or around what happens between
        steps (load, save, evaluation, sampling, average)."""
        ...

    def moments(self) -> Mapping[str, int]:
        """Return the allocated peak bytes of every moment measured, by name."""
        ...

    def last(self) -> tuple[int | None, int | None]:
        """Return allocated and reserved peak bytes of the last step; None where not measured."""
        ...

    def peaks(self) -> tuple[int | None, int | None]:
        """Return allocated and reserved peak bytes over all measured steps."""
        ...


@dataclass(frozen=True, slots=True)
class RunParts:
    """What surrounds the training loop of a rank."""

    events: Events
    stop: StopFlag
    checkpointer: Checkpointer
    meter: Meter
