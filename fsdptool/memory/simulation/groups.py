"""FSDP units as one rank holds them: sizes, worked out once for every step, state, and unsharding.

:class:`Unshard` mirrors the unsharding half of ``_fsdp_param_group.py`` and ``_fsdp_collectives.py`` in
``torch/distributed/fsdp/_fully_shard`` (torch 2.13): gather, wait, copy out, free. ``fsdp_schedule.py`` says
when each of these happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdptool.memory.simulation.collective_bytes import (
    MemoryDevice,
    Reduction,
    ShardedParameter,
    UnshardBuffers,
    backend_copy,
    reduction,
    rounded,
    unshard_buffers,
    weigh,
)
from fsdptool.memory.simulation.ledger import GATHER, Block, Ledger
from fsdptool.records.sharding import Unit, UnitPlan

IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = range(4)
SHARDED, UNSHARDED_STATE, POST_FORWARD = range(3)


@dataclass(frozen=True, slots=True)
class UnitShare:
    """One unit as a rank holds it: what no step changes.

    Attributes:
        unit: The unit.
        weights: Its parameters' sizes, in order, and by name.
        buffers: What gathering it allocates.
        reduction: What reducing all of its gradients allocates.
        reshard: ``reshard_after_forward`` with torch's own rule worked out.
        ranks: Over how many it is sharded: experts that a group shares out, over the rest.
    """

    unit: Unit
    weights: tuple[ShardedParameter, ...]
    by_name: Mapping[str, ShardedParameter]
    buffers: UnshardBuffers
    reduction: Reduction
    reshard: bool | int
    ranks: int


@dataclass(frozen=True, slots=True)
class Rank:
    """A unit plan as one rank holds it: sizes that neither micro-batch nor recipe changes.

    Attributes:
        plan: The units.
        degree: Ranks that share one copy.
        device: Whose memory is counted.
        shares: Every unit, in the plan's order.
        distinct: The parameters' sizes of one unit of each signature.
        modules: Paths of every module that is (part of) a unit.
        home: Place in ``shares`` by parameter name.
    """

    plan: UnitPlan
    degree: int
    device: MemoryDevice
    shares: tuple[UnitShare, ...]
    distinct: tuple[tuple[ShardedParameter, ...], ...]
    modules: frozenset[str]
    home: Mapping[str, int]


@dataclass(slots=True)
class Group:
    """One unit while it is simulated."""

    unit: Unit
    weights: tuple[ShardedParameter, ...]
    sizes: UnshardBuffers
    share: UnitShare
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


def cut(plan: UnitPlan, degree: int, device: MemoryDevice) -> Rank:
    """Return what one rank holds of a plan; units of one signature share their sizes.

    Args:
        plan: The units.
        degree: Ranks that share one copy.
        device: Whose memory is counted.
    """
    known: dict[object, tuple[tuple[ShardedParameter, ...], UnshardBuffers, Reduction]] = {}
    shares = []
    float8 = frozenset(plan.float8)
    for unit in plan.units:
        reshard = _resharding(unit)
        narrow = tuple(parameter.fqn in float8 for parameter in unit.parameters) if float8 else ()
        key = (unit.signature, unit.kind == "experts", reshard, narrow)
        ranks = _ranks(unit, plan, degree)
        if key not in known:
            weights = tuple(weigh(parameter, unit, plan, ranks) for parameter in unit.parameters)
            trained = [w for w in weights if w.trainable]
            known[key] = (
                weights,
                unshard_buffers(weights, plan, ranks, reshard, device.grain),
                reduction(trained, plan, device),
            )
        weights, buffers, reduced = known[key]
        by_name = {p.fqn: w for p, w in zip(unit.parameters, weights, strict=True)}
        shares.append(UnitShare(unit, weights, by_name, buffers, reduced, reshard, ranks))
    return Rank(
        plan,
        degree,
        device,
        tuple(shares),
        tuple(weights for weights, _, _ in known.values()),
        frozenset(path for unit in plan.units for path in unit.modules),
        {p.fqn: place for place, unit in enumerate(plan.units) for p in unit.parameters},
    )


def _ranks(unit: Unit, plan: UnitPlan, degree: int) -> int:
    """Return over how many ranks a unit is sharded: experts that a group shares out over the rest."""
    if unit.kind != "experts" or plan.experts is None:
        return degree
    return degree * (plan.tensor.size if plan.tensor is not None else 1) // plan.experts.size


def _resharding(unit: Unit) -> bool | int:
    if unit.reshard_after_forward is None:
        return unit.kind != "root" and "" not in unit.modules
    return unit.reshard_after_forward


class Unshard:
    """One rank's unsharding, and the buffers that outlive it.

    Args:
        rank: What it holds.
        ledger: Where bytes are counted.
    """

    def __init__(self, rank: Rank, ledger: Ledger) -> None:
        self.rank = rank
        self.ledger = ledger
        self.device = rank.device
        self.grain = rank.device.grain
        self._gathered: Block | None = None

    def _unshard(self, group: Group, training: int) -> None:
        if not group.weights or group.pending or group.state == UNSHARDED_STATE:
            return
        if training == PRE_BACKWARD and not group.unit.unshard_in_backward:
            return
        group.pending = True
        sizes = group.sizes
        if sizes.gather is None:
            return
        cast = sizes.cast
        if group.state == POST_FORWARD:
            cast = sizes.smaller_cast
        elif sizes.offloaded is not None:
            cast = sizes.offloaded
        if sizes.scaling is not None:
            self.ledger.add(sizes.scaling)
            self.ledger.drop(sizes.scaling)
        if cast is not None:
            self.ledger.add(cast)
        self.ledger.add(sizes.gather)
        self._exchange(sizes.gather, group.share.ranks)
        if cast is not None:
            self.ledger.drop(cast)

    def _exchange(self, whole: Block, ranks: int) -> None:
        """Run a collective, with what its backend holds until it ends."""
        if self.device.copying and ranks > 1:
            copy = backend_copy(whole)
            self.ledger.add(copy)
            self.ledger.drop(copy)

    def _wait(self, group: Group, training: int) -> None:
        if not group.pending:
            return
        group.pending = False
        sizes = group.sizes
        previous = self._gathered if training == FORWARD else None
        self._copy_out(group)
        if previous is not None:
            # ``wait_for_unshard`` lets go of the previous result before it copies out, but a local
            # variable holds it until the function returns (torch 2.13, ``prev_all_gather_state``).
            self.ledger.drop(previous)
            self._gathered = None
        if sizes.gather is not None:
            if training == FORWARD:
                self._gathered = sizes.gather
            else:
                self.ledger.drop(sizes.gather)
        if group.state == POST_FORWARD and sizes.smaller is not None:
            self.ledger.drop(sizes.smaller)
        group.state = UNSHARDED_STATE

    def _copy_out(self, group: Group) -> None:
        if group.share.ranks > 1:
            self.ledger.add(group.sizes.whole)
            if group.sizes.unordered is not None:
                self.ledger.add(group.sizes.unordered)
                self.ledger.drop(group.sizes.unordered)
            return
        # One rank: each shard is cast and copied by itself (``wait_for_unshard``).
        largest = max((w.shard * w.computed for w in group.weights if w.casts), default=0)
        self.ledger.add(group.sizes.whole)
        if largest:
            spike = Block(GATHER, rounded(largest, self.grain), (largest,))
            self.ledger.add(spike)
            self.ledger.drop(spike)

    def _to_sharded(self, group: Group) -> None:
        if group.state == UNSHARDED_STATE:
            self.ledger.drop(group.sizes.whole)
        elif group.state == POST_FORWARD and group.sizes.smaller is not None:
            self.ledger.drop(group.sizes.smaller)
        group.state = SHARDED
