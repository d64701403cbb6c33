"""FSDP units as one rank holds them: sizes, worked out once for every step played on them, and state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fsdptool.memory.simulation.collectives import (
    Device,
    Reduction,
    UnshardBuffers,
    reduction,
    unshard_buffers,
)
from fsdptool.memory.simulation.ledger import Block
from fsdptool.memory.simulation.sizes import Weights, weigh
from fsdptool.records.sharding import Unit, UnitPlan

IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = range(4)
SHARDED, UNSHARDED_STATE, POST_FORWARD = range(3)


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
    buffers: UnshardBuffers
    reduction: Reduction
    reshard: bool | int


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
    device: Device
    shares: tuple[Share, ...]
    distinct: tuple[tuple[Weights, ...], ...]
    modules: frozenset[str]
    home: Mapping[str, int]


@dataclass(slots=True)
class Group:
    """One unit while it is simulated."""

    unit: Unit
    weights: tuple[Weights, ...]
    sizes: UnshardBuffers
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


def cut(plan: UnitPlan, degree: int, device: Device) -> Rank:
    """Return what one rank holds of a plan; units of one signature share their sizes.

    Args:
        plan: The units.
        degree: Ranks that share one copy.
        device: Whose memory is counted.
    """
    known: dict[object, tuple[tuple[Weights, ...], UnshardBuffers, Reduction]] = {}
    shares = []
    for unit in plan.units:
        reshard = _resharding(unit)
        key = (unit.signature, reshard)
        if key not in known:
            weights = tuple(weigh(parameter, plan, degree) for parameter in unit.parameters)
            trained = [w for w in weights if w.trainable]
            known[key] = (
                weights,
                unshard_buffers(weights, plan, degree, reshard, device.grain),
                reduction(trained, plan, device.grain),
            )
        weights, buffers, reduced = known[key]
        by_name = {p.fqn: w for p, w in zip(unit.parameters, weights, strict=True)}
        shares.append(Share(unit, weights, by_name, buffers, reduced, reshard))
    return Rank(
        plan,
        degree,
        device,
        tuple(shares),
        tuple(weights for weights, _, _ in known.values()),
        frozenset(path for unit in plan.units for path in unit.modules),
        {p.fqn: place for place, unit in enumerate(plan.units) for p in unit.parameters},
    )


def _resharding(unit: Unit) -> bool | int:
    if unit.reshard_after_forward is None:
        return unit.kind != "root" and "" not in unit.modules
    return unit.reshard_after_forward
