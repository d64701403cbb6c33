"""What the parts of a training worker promise each other. Protocols only; nothing is imported to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Batches(Protocol):
    """The data of one rank: per optimizer step, the list of this rank's micro-batches (on the CPU).

    Global batches are composed before they are split, so the samples of a step do not depend on the
    number of ranks (DESIGN decision 13). Training data never ends: epochs follow one another.
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
        """Return the position after the last step that was handed out: plain JSON data, equal on all ranks."""
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
