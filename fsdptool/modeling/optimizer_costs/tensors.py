"""What the memory and the time of an update are computed from, and what a rank adds to it. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """A trained parameter as one rank stores it.

    Attributes:
        fqn: Its name.
        shape: Global shape.
        rows: Shape of this rank's shard, padded as every rank allocates it.
        width: Bytes per stored element.
        ranks: Ranks that share it; 1 where it is whole.
    """

    fqn: str
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    width: int
    ranks: int = 1

    @property
    def spans_rows(self) -> bool:
        """Whether the rows of a matrix, or of each of fused experts, are spread over ranks."""
        return self.ranks > 1 and (len(self.shape) == 2 or self.rows[-2] < self.shape[-2])

    @property
    def numel(self) -> int:
        """Elements of the shard."""
        return prod(self.rows)

    @property
    def bytes(self) -> int:
        """Bytes of the shard."""
        return self.numel * self.width


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """What an update does besides moving states through memory.

    Attributes:
        flops: Matrix products of one rank, in bfloat16.
        exchanged: Bytes one rank sends to those that share a copy.
        operators: Kernels of these products.
    """

    flops: float = 0.0
    exchanged: float = 0.0
    operators: int = 0


Trained = Sequence[TrainedTensor]
