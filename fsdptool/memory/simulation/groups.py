"""FSDP units as one rank holds them: sizes, worked out once for every step played on them, and state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdptool.memory.simulation.ledger import (
    GATHER,
    GRADIENTS,
    REDUCE,
    RESHARDED,
    UNSHARDED,
    UNSHARDED_GRADIENTS,
    Block,
)
from fsdptool.memory.simulation.sizes import Weights, reduce_width, rounded, rounded_sum, weigh
from fsdptool.records.units import Unit, UnitPlan

IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = range(4)
SHARDED, UNSHARDED_STATE, POST_FORWARD = range(3)

COMPUTE, COPY_IN, REDUCE_SCATTER, ALL_REDUCE_STREAM = range(4)
"""Streams FSDP2 allocates on (``FSDPCommContext``, torch 2.13)."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """What one unit allocates when it is gathered; equal for units of one signature.

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


@dataclass(frozen=True, slots=True)
class Reduction:
    """Buffers of one unit's gradient reduction (``foreach_reduce``)."""

    input: Block
    output: Block
    stored: Block | None
    """The output in the parameters' own dtype, if that differs."""


@dataclass(frozen=True, slots=True)
class Share:
    """One unit as a rank holds it: what no step changes.

    Attributes:
        unit: The unit.
        weights: Its parameters' sizes, in order, and by name.
        buffers: What gathering it allocates.
        reduction: What reducing all of its gradients allocates.
        reshard: ``reshard_after_forward`` with torch's own rule worked out.
    """

    unit: Unit
    weights: tuple[Weights, ...]
    by_name: Mapping[str, Weights]
    buffers: Buffers
    reduction: Reduction
    reshard: bool | int


@dataclass(frozen=True, slots=True)
class Rank:
    """A unit plan as one rank holds it: sizes that neither micro-batch nor recipe changes.

    Attributes:
        plan: The units.
        degree: Ranks that share one copy.
        grain: Bytes the allocator rounds to.
        shares: Every unit, in the plan's order.
        distinct: The parameters' sizes of one unit of each signature.
        modules: Paths of every module that is (part of) a unit.
        home: Place in ``shares`` by parameter name.
    """

    plan: UnitPlan
    degree: int
    grain: int
    shares: tuple[Share, ...]
    distinct: tuple[tuple[Weights, ...], ...]
    modules: frozenset[str]
    home: Mapping[str, int]


@dataclass(slots=True)
class Group:
    """One unit while it is simulated."""

    unit: Unit
    weights: tuple[Weights, ...]
    sizes: Buffers
    share: Share
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


def make_groups(rank: Rank) -> list[Group]:
    """Return the units of ``rank`` before anything has run."""
    return [Group(s.unit, s.weights, s.buffers, s, s.reshard) for s in rank.shares]


def cut(plan: UnitPlan, degree: int, grain: int) -> Rank:
    """Return what one rank holds of a plan; units of one signature share their sizes.

    Args:
        plan: The units.
        degree: Ranks that share one copy.
        grain: Bytes the allocator rounds to.
    """
    known: dict[object, tuple[tuple[Weights, ...], Buffers, Reduction]] = {}
    shares = []
    for unit in plan.units:
        reshard = _resharding(unit)
        key = (unit.signature, reshard)
        if key not in known:
            weights = tuple(weigh(parameter, plan, degree) for parameter in unit.parameters)
            trained = [w for w in weights if w.trainable]
            known[key] = (
                weights,
                _buffers(weights, plan, degree, reshard, grain),
                reduction(trained, plan, grain),
            )
        weights, buffers, reduced = known[key]
        by_name = {p.fqn: w for p, w in zip(unit.parameters, weights, strict=True)}
        shares.append(Share(unit, weights, by_name, buffers, reduced, reshard))
    return Rank(
        plan,
        degree,
        grain,
        tuple(shares),
        tuple(weights for weights, _, _ in known.values()),
        frozenset(path for unit in plan.units for path in unit.modules),
        {p.fqn: place for place, unit in enumerate(plan.units) for p in unit.parameters},
    )


def _resharding(unit: Unit) -> bool | int:
    if unit.reshard_after_forward is None:
        return unit.kind != "root" and "" not in unit.modules
    return unit.reshard_after_forward


def _buffers(
    weights: Sequence[Weights], plan: UnitPlan, ranks: int, reshard: bool | int, grain: int
) -> Buffers:
    whole_sizes = tuple(w.whole * w.computed for w in weights)
    whole = Block(UNSHARDED, rounded_sum(whole_sizes, grain), whole_sizes, COMPUTE)
    if ranks == 1:
        return Buffers(None, None, whole, None, None, None)
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
    return Buffers(cast, gather, whole, smaller, smaller_cast, offloaded)


def reduction(weights: Sequence[Weights], plan: UnitPlan, grain: int) -> Reduction:
    """Return the buffers that reduce the gradients of ``weights``."""
    width = reduce_width(plan) or max((w.computed for w in weights), default=4)
    shard = sum(w.shard for w in weights)
    whole = sum(w.whole for w in weights)
    stored = max((w.stored for w in weights), default=4)
    output_kind = GRADIENTS if stored == width else REDUCE
    kept = None
    if stored != width:
        kept = Block(GRADIENTS, rounded(shard * stored, grain), (shard * stored,), REDUCE_SCATTER)
    return Reduction(
        Block(REDUCE, rounded(whole * width, grain), (whole * width,), COMPUTE),
        Block(output_kind, rounded(shard * width, grain), (shard * width,), REDUCE_SCATTER),
        kept,
    )


def gradient_block(size: int) -> Block:
    """Return a parameter's unsharded gradient as the trace made it."""
    return Block(UNSHARDED_GRADIENTS, size, (size,), COMPUTE)


def widened(weights: Weights, plan: UnitPlan, grain: int) -> Block | None:
    """Return an unsharded gradient in the reduce dtype, or None where it stays as it is."""
    width = reduce_width(plan)
    if width is None or width == weights.computed:
        return None
    size = weights.parameter.numel * width
    return Block(UNSHARDED_GRADIENTS, rounded(size, grain), (size,), COMPUTE)
