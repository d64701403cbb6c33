"""The device mesh: its dimensions with their names, and the sizes of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from fsdptool.errors import ConfigError
from fsdptool.records.annotations import Positive


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of the mesh and its names.

    Attributes:
        name: Field of :class:`ParallelDims`; a size that an option of ``plan`` sets has its name, too.
        title: What reports call it.
        word: What stands before its size in a short description of a mesh.
        ranks: What a form calls its size.
        unsupported: Why it can be neither planned nor trained, or None.
    """

    name: str
    title: str
    word: str
    ranks: str
    unsupported: str | None = None


MESH = (
    Dimension("dp_replicate", "replication", "replicate", "replicas"),
    Dimension("dp_shard", "sharding", "shard", "sharding ranks"),
    Dimension("cp", "context parallelism", "context", "context-parallel ranks"),
    Dimension("tp", "tensor parallelism", "tensor", "tensor-parallel ranks"),
    Dimension(
        "sp",
        "sequence parallelism",
        "sequence",
        "sequence-parallel ranks",
        unsupported="sequence parallelism is DeepSpeed's, and accelerate ignores it under FSDP2",
    ),
)
"""The dimensions, outermost first: neighbouring ranks differ in the last one above 1.

accelerate 1.15 (``parallelism_config.py``) builds its mesh in this order, but with ``sp`` before ``tp``.
"""

EXPERTS = Dimension("ep", "expert parallelism", "experts over", "expert-parallel ranks")
"""Divides ``dp_shard`` x ``cp`` x ``tp``; it is not a dimension of its own."""

DIMENSIONS = tuple(item.name for item in MESH)
TRAINED = tuple(item.name for item in MESH if item.unsupported is None)
"""The dimensions that are planned, and that the trainer's own mesh has."""

PLANNED = (*(item for item in MESH if item.unsupported is None), EXPERTS)
"""What a plan chooses the sizes of: fields of :class:`fsdptool.records.plan.SearchPoint`."""

GROUPS = tuple(item.name for item in PLANNED if not item.name.startswith("dp_"))
"""Those in which ranks work on the same samples or experts together; each has an option of ``plan``."""


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Sizes of the device mesh.

    Parameters are sharded over ``dp_shard`` x ``cp`` (accelerate 1.15 does the same) and replicated over
    ``dp_replicate``. Ranks of one ``cp`` group share their samples, and so do ranks of one ``tp`` group, each
    of which holds a part of every divided layer (:mod:`fsdptool.records.tensor_plan`).

    Attributes:
        dp_replicate: Copies of the sharded model (HSDP).
        dp_shard: Ranks to shard over; None takes whatever the other sizes leave.
        cp, tp, sp: Context, tensor and sequence parallelism.
        ep: Expert parallelism: neighbouring ranks among which experts are distributed. FSDP shards each
            rank's experts over the ranks that hold the same ones. It divides ``dp_shard`` x ``cp`` x ``tp``:
            ranks of a ``cp`` group have tokens of their own, and those of a ``tp`` group share theirs out.
    """

    dp_replicate: Positive = 1
    dp_shard: Positive | None = None
    cp: Positive = 1
    tp: Positive = 1
    sp: Positive = 1
    ep: Positive = 1

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
        for item in MESH:
            if item.unsupported is not None and self.size(item.name) > 1:
                yield item.name, self.size(item.name), item.unsupported

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

    def parameter_mesh(self, *, experts: bool = False) -> dict[str, int]:
        """Return names and sizes of the mesh ``fully_shard`` gets: one dimension, or replicate x shard.

        Each rank of a ``tp`` group has a mesh of its own, and so has each of an ``ep`` group for its
        ``experts``.
        """
        shard = "dp_shard" if self.cp == 1 else "dp_shard_cp"
        copies = {"dp_replicate": self.dp_replicate} if self.dp_replicate > 1 else {}
        ranks = self.shard_degree * self.tp // self.ep if experts else self.shard_degree
        return {**copies, shard: ranks}

    def sharding_ranks(self, *, experts: bool = False) -> int:
        """Return how many ranks share a copy of a unit: of one of ``experts``, or of any other."""
        return list(self.parameter_mesh(experts=experts).values())[-1]

    def with_experts(self, ep: int) -> ParallelDims:
        """Return the sizes with an expert-parallel group.

        Raises:
            ConfigError: They do not suit it; an open ``dp_shard`` does.
        """
        ranks = self.shard_degree * self.tp
        if self.dp_shard is not None and ranks % ep:
            fits = [size for size in range(1, ranks + 1) if ranks % size == 0]
            near = (*[size for size in fits if size < ep][-1:], *[size for size in fits if size > ep][:1])
            raise ConfigError(
                f"sharding.expert_parallel: {ep} does not divide the {ranks} ranks of one copy of the model",
                help=f"set sharding.expert_parallel to {' or '.join(map(str, near))}",
            )
        return replace(self, ep=ep)

    def reshard_violation(self, ranks: int) -> str | None:
        """Return why parameters cannot be resharded to ``ranks`` after forward, or None.

        FSDP2 reshards to equal groups of the ranks that share a copy (torch 2.13,
        ``_fsdp_init.py:_get_post_forward_mesh_info``).
        """
        degree = self.shard_degree
        if 1 < ranks < degree and degree % ranks == 0:
            return None
        return f"{ranks} is not a proper divisor of the {degree} ranks that share a copy of the parameters"
