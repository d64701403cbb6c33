"""FSDP units as the simulation sees them: sizes worked out once, state while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdptool.memory.ledger import (
    ALL_REDUCE,
    GATHER,
    GRADIENTS,
    REDUCE,
    RESHARDED,
    UNSHARDED,
    UNSHARDED_GRADIENTS,
    Block,
)
from fsdptool.memory.sizes import WIDTH, Weights, reduce_width, rounded, rounded_sum, weigh
from fsdptool.records.units import Unit, UnitPlan

IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = range(4)
SHARDED, UNSHARDED_STATE, POST_FORWARD = range(3)

COMPUTE, COPY_IN, REDUCE_SCATTER, ALL_REDUCE_STREAM = range(4)
"""Streams FSDP2 allocates on (``FSDPCommContext``, torch 2.13)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What one unit allocates; equal for units of one signature but for the names.

    Attributes:
        cast: Flat copy of the shards in the compute dtype, while gathering.
        gather: The all-gather's output.
        whole: The unsharded parameters.
        smaller: What stays after forward when resharding to fewer ranks, and its cast.
        offloaded: Device copies of host shards while gathering.
    """

    cast: Block | None
    gather: Block | None
    whole: Block
    smaller: Block | None
    smaller_cast: Block | None
    offloaded: Block | None


@dataclass(slots=True)
class Group:
    """One unit while it is simulated."""

    unit: Unit
    weights: tuple[Weights, ...]
    sizes: Recipe
    by_name: dict[str, Weights]
    reshard: bool | int
    state: int = SHARDED
    training: int = IDLE
    pending: bool = False
    to_run: set[str] = field(default_factory=set)
    entered: str | None = None
    hooked: str | None = None
    order: list[int] = field(default_factory=list)
    gradients: dict[str, Block] = field(default_factory=dict)
    accumulated: dict[str, Block] = field(default_factory=dict)
    sharded_gradient: Block | None = None
    all_reduce: Block | None = None
    partial: Block | None = None
    ahead: tuple[Group, ...] = ()
    behind: tuple[Group, ...] = ()

    @property
    def name(self) -> str:
        """The unit's id."""
        return self.unit.id


def make_groups(plan: UnitPlan, ranks: int, grain: int) -> list[Group]:
    """Return the plan's units with their sizes; units of one signature share them.

    Args:
        plan: The units.
        ranks: Ranks that share one copy.
        grain: Bytes the allocator rounds to.
    """
    known: dict[object, tuple[tuple[Weights, ...], Recipe]] = {}
    groups = []
    for unit in plan.units:
        reshard = _resharding(unit)
        key = (unit.signature, reshard)
        if key not in known:
            weights = tuple(weigh(parameter, plan, ranks) for parameter in unit.parameters)
            known[key] = (weights, _recipe(weights, plan, ranks, reshard, grain))
        shared, sizes = known[key]
        by_name = {p.fqn: w for p, w in zip(unit.parameters, shared, strict=True)}
        groups.append(Group(unit, shared, sizes, by_name, reshard))
    return groups


def _resharding(unit: Unit) -> bool | int:
    if unit.reshard_after_forward is None:
        return unit.kind != "root" and "" not in unit.modules
    return unit.reshard_after_forward


def _recipe(
    weights: Sequence[Weights], plan: UnitPlan, ranks: int, reshard: bool | int, grain: int
) -> Recipe:
    whole_sizes = tuple(w.whole * w.computed for w in weights)
    whole = Block(UNSHARDED, rounded_sum(whole_sizes, grain), whole_sizes, COMPUTE)
    if ranks == 1:
        return Recipe(None, None, whole, None, None, None)
    casts = [w for w in weights if w.casts]
    cast_bytes = sum(w.shard * w.computed for w in casts)
    gather_bytes = sum(whole_sizes)
    gather = Block(GATHER, rounded(gather_bytes, grain), (gather_bytes,), COPY_IN)
    cast = offloaded = None
    if plan.cpu_offload:
        sizes = tuple(w.shard * w.computed for w in weights)
        offloaded = Block(GATHER, rounded_sum(sizes, grain), sizes, COPY_IN)
    elif casts:
        cast = Block(GATHER, rounded(cast_bytes, grain), (cast_bytes,), COPY_IN)
    smaller = smaller_cast = None
    if not isinstance(reshard, bool):
        kept = tuple(size // reshard for size in whole_sizes)
        smaller = Block(RESHARDED, rounded_sum(kept, grain), kept, COMPUTE)
        if casts:
            again = sum(w.whole * w.computed for w in casts) // reshard
            smaller_cast = Block(GATHER, rounded(again, grain), (again,), COPY_IN)
    return Recipe(cast, gather, whole, smaller, smaller_cast, offloaded)


@dataclass(frozen=True, slots=True)
class Reduction:
    """Buffers of one unit's gradient reduction (``foreach_reduce``)."""

    input: Block
    output: Block
    stored: Block | None
    """The output in the parameters' own dtype, if that differs."""


def reduction(group: Group, names: Sequence[str], plan: UnitPlan, compute: str, grain: int) -> Reduction:
    """Return the buffers that reduce the gradients of ``names``."""
    weights = [group.by_name[name] for name in names]
    width = reduce_width(plan, compute) or max((w.computed for w in weights), default=4)
    shard = sum(w.shard for w in weights)
    whole = sum(w.whole for w in weights)
    stored = max((w.stored for w in weights), default=4)
    output_kind = GRADIENTS if stored == width else REDUCE
    kept = None
    if stored != width:
        kept = Block(GRADIENTS, rounded(shard * stored, grain), (shard * stored,), REDUCE_SCATTER)
    return Reduction(
        Block(REDUCE, rounded(whole * width, grain), (whole * width,), COMPUTE, group.name),
        Block(output_kind, rounded(shard * width, grain), (shard * width,), REDUCE_SCATTER, group.name),
        kept,
    )


def gradient_block(name: str, size: int) -> Block:
    """Return a parameter's unsharded gradient as the trace made it."""
    return Block(UNSHARDED_GRADIENTS, size, (size,), COMPUTE, name)


def widened(group: Group, name: str, plan: UnitPlan, grain: int) -> Block | None:
    """Return an unsharded gradient in the reduce dtype, or None where it stays as it is."""
    width = reduce_width(plan, "")
    weights = group.by_name[name]
    if width is None or width == weights.computed:
        return None
    size = weights.parameter.numel * width
    return Block(UNSHARDED_GRADIENTS, rounded(size, grain), (size,), COMPUTE, name)


__all__ = [
    "ALL_REDUCE",
    "WIDTH",
    "Group",
    "Recipe",
    "Reduction",
    "gradient_block",
    "make_groups",
    "reduction",
    "widened",
]
