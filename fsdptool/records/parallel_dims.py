"""The sizes of the device mesh: their order, whether they fit a world size, and which ranks form a group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from fsdptool.records.schema import Positive

DIMENSIONS = ("dp_replicate", "dp_shard", "cp", "tp", "sp")
"""Names of the dimensions, outermost first: neighbouring ranks differ in the last one above 1.

accelerate 1.15 (``parallelism_config.py``) builds its mesh in this order, but with ``sp`` before ``tp``.
"""

TRAINED = ("dp_replicate", "dp_shard", "cp")
"""The dimensions the trainer's own mesh has."""

_UNSUPPORTED = {
    "tp": "the trainer has no tensor-parallel plans",
    "sp": "sequence parallelism is DeepSpeed's, and accelerate ignores it under FSDP2",
}


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Sizes of the device mesh.

    Parameters are sharded over ``dp_shard`` x ``cp`` (accelerate 1.15 does the same) and replicated over
    ``dp_replicate``. Ranks of one ``cp`` group share their samples.

    Attributes:
        dp_replicate: Copies of the sharded model (HSDP).
        dp_shard: Ranks to shard over; None takes whatever the other sizes leave.
        cp, tp, sp: Context, tensor and sequence parallelism.
    """

    dp_replicate: Positive = 1
    dp_shard: Positive | None = None
    cp: Positive = 1
    tp: Positive = 1
    sp: Positive = 1

    def size(self, name: str) -> int:
        """Return the size of one dimension; an open ``dp_shard`` counts as 1."""
        value = getattr(self, name)
        return 1 if value is None else int(value)

    @property
    def other_sizes(self) -> int:
        """Product of all sizes but ``dp_shard``."""
        return prod(self.size(name) for name in DIMENSIONS if name != "dp_shard")

    def violations(self, world_size: int) -> Iterator[str]:
        """Yield what is wrong with these sizes for ``world_size`` ranks, a line each."""
        wrong = [name for name in DIMENSIONS if self.size(name) < 1]
        yield from (f"mesh size {name} is {self.size(name)}: sizes must be 1 or more" for name in wrong)
        if wrong:
            return
        shard = self.dp_shard if self.dp_shard is not None else max(world_size // self.other_sizes, 1)
        total = self.other_sizes * shard
        if total != world_size:
            shown = " x ".join(f"{n} {shard if n == 'dp_shard' else self.size(n)}" for n in DIMENSIONS)
            yield f"mesh {shown} = {total} does not multiply to {world_size} processes"

    def unsupported(self) -> Iterator[tuple[str, int, str]]:
        """Yield name, size and reason of every dimension that can be neither planned nor trained."""
        for name, reason in _UNSUPPORTED.items():
            if self.size(name) > 1:
                yield name, self.size(name), reason

    def resolve(self, world_size: int) -> ParallelDims:
        """Return the sizes with ``dp_shard`` filled in.

        Raises:
            ValueError: The sizes do not suit ``world_size``; the message is the first violation.
        """
        for line in self.violations(world_size):
            raise ValueError(line)
        return replace(self, dp_shard=world_size // self.other_sizes)

    @property
    def shard_degree(self) -> int:
        """Ranks that share one copy of the parameters: ``dp_shard`` x ``cp`` (resolved sizes)."""
        return self.size("dp_shard") * self.cp

    @property
    def data_ranks(self) -> int:
        """Shares a global batch is split into: ``dp_replicate`` x ``dp_shard`` (resolved sizes)."""
        return self.dp_replicate * self.size("dp_shard")

    def data_rank(self, rank: int) -> int:
        """Return which share of a global batch ``rank`` trains on."""
        return rank // self.stride("dp_shard")

    def stride(self, name: str) -> int:
        """Return the distance in ranks between neighbours of a dimension."""
        return prod(self.size(inner) for inner in DIMENSIONS[DIMENSIONS.index(name) + 1 :])

    def group(self, rank: int, name: str) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` in dimension ``name`` only, in order."""
        stride, size = self.stride(name), self.size(name)
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + size * stride, stride))

    def parameter_mesh(self) -> dict[str, int]:
        """Return names and sizes of the mesh ``fully_shard`` gets: one dimension, or replicate x shard."""
        shard = "dp_shard" if self.cp == 1 else "dp_shard_cp"
        copies = {"dp_replicate": self.dp_replicate} if self.dp_replicate > 1 else {}
        return {**copies, shard: self.shard_degree}

    def reshard_violation(self, ranks: int) -> str | None:
        """Return why parameters cannot be resharded to ``ranks`` after forward, or None.

        FSDP2 reshards to equal groups of the ranks that share a copy (torch 2.13,
        ``_fsdp_init.py:_get_post_forward_mesh_info``).
        """
        degree = self.shard_degree
        if 1 < ranks < degree and degree % ranks == 0:
            return None
        return f"{ranks} is not a proper divisor of the {degree} ranks that share a copy of the parameters"
