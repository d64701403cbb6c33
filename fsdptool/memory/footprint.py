"""``footprint``: one configuration's memory on one rank. Torch-free and fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdptool.memory.simulation.collective_bytes import DEVICES
from fsdptool.memory.simulation.ledger import OF_TRACE, OFFLOADED, Ledger
from fsdptool.memory.simulation.off_step import States, host_bytes
from fsdptool.memory.simulation.simulate import PreparedSimulation, Simulated, prepare, simulate
from fsdptool.records.cluster import DeviceProfile
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import (
    OWN_LOOP,
    ComponentBytes,
    Footprint,
    Holding,
    Moment,
    Peak,
    Phase,
    TrainingLoop,
)
from fsdptool.records.recipe import Recipe
from fsdptool.records.run import STEP_PHASES, RunPhase
from fsdptool.records.sharding import StateDictType, UnitPlan
from fsdptool.records.trace import Basis, ColourGroup, Component, Trace

VERIFIED_TORCH = ("2.13",)
"""Minor versions of torch whose FSDP2 the schedule was checked against (``tests/memory/fsdp_oracle.py``)."""

_BY_INDEX = tuple(Component)


def footprint(
    trace: Trace,
    units: UnitPlan,
    mesh: ParallelDims,
    recipe: Recipe,
    *,
    profile: DeviceProfile = "cuda",
    timeline: bool = True,
    teacher: UnitPlan | None = None,
    reserved: bool | None = None,
    saves: StateDictType = "sharded",
    workspaces: tuple[int, ...] = (),
) -> Footprint:
    """Simulate a run on rank 0 (no rank holds more): loading, step 2, and what lies between steps.

    Args:
        trace: One micro-batch of this model under this recipe.
        units: How it is sharded.
        mesh: Resolved mesh.
        recipe: Accumulation, optimizer, EMA, evaluation, checkpoints.
        profile: Whose allocator counts.
        timeline: Whether to return the timeline and step 1 as a phase (searches leave them out).
        teacher: Units of a distillation's teacher.
        reserved: Whether to replay the caching allocator (about a second); None: on CUDA, where a
            timeline is wanted.
        saves: Whether checkpoints are sharded or full.
        workspaces: Bytes of each workspace that matrix products keep on the device.
    """
    return foresee(
        trace,
        prepared(units, mesh, recipe, profile=profile, teacher=teacher, trace=trace),
        mesh,
        recipe,
        timeline=timeline,
        reserved=reserved,
        saves=saves,
        workspaces=workspaces,
    )


def prepared(
    units: UnitPlan,
    mesh: ParallelDims,
    recipe: Recipe,
    *,
    profile: DeviceProfile = "cuda",
    teacher: UnitPlan | None = None,
    trace: Trace | None = None,
    states: States | None = None,
) -> PreparedSimulation:
    """Return what :func:`foresee` takes; only the ranks that share a copy, the optimizer and whether
    there is an average matter of mesh and recipe, and which parameters have a gradient of the trace.
    ``states`` are the rank's if they are known."""
    return prepare(units, mesh, recipe, device=DEVICES[profile], teacher=teacher, trace=trace, states=states)


def foresee(
    trace: Trace,
    rank: PreparedSimulation,
    mesh: ParallelDims,
    recipe: Recipe,
    *,
    timeline: bool = True,
    reserved: bool | None = None,
    reserved_peak: int | None = None,
    expandable: bool = False,
    saves: StateDictType = "sharded",
    workspaces: tuple[int, ...] = (),
    loop: TrainingLoop = OWN_LOOP,
) -> Footprint:
    """Return the :func:`footprint` of what was prepared before.

    Args:
        trace, mesh, recipe, timeline, reserved, saves, workspaces: As there.
        rank: The units as this rank holds them (:func:`prepared`).
        reserved_peak: Bytes that an earlier replay of the same configuration found: nothing is replayed.
        expandable: Whether the replayed allocator uses expandable segments.
        loop: What is assumed about the training loop.
    """

    def play(ledger: Ledger, *, warm: bool = False, trace: Trace = trace) -> Simulated:
        return simulate(
            trace,
            rank,
            mesh,
            recipe,
            ledger=ledger,
            warm=warm,
            saves=saves,
            workspaces=workspaces,
            loop=loop,
        )

    simulated = play(Ledger(timeline=[] if timeline else None))
    ledger = simulated.ledger
    phases = _phases(simulated, recipe)
    host = max(phase.host_bytes_per_rank for phase in phases)
    if not simulated.complete:
        return _states_only(ledger, trace, host, phases)
    segments, warmed = reserved_peak, None
    if segments is None and rank.rank.device.host_apart and (timeline if reserved is None else reserved):
        from fsdptool.memory.simulation.allocator import CachingAllocator, ReplayLedger

        # What the allocator has taken by the end depends on step 1, too.
        replayed = ReplayLedger(allocator=CachingAllocator(expandable=expandable))
        warmed = play(replayed, warm=True)
        segments = replayed.allocator.reserved_peak
    if timeline:
        phases = _phases(warmed or play(Ledger(), warm=True), recipe)
    upper = None
    if trace.upper is not None and timeline:
        upper = play(Ledger(), trace=_unfused(trace, trace.upper)).ledger.best
    return Footprint(
        allocated_peak_bytes=ledger.best,
        reserved_peak_bytes=segments,
        components=_components(ledger.at_best),
        peak=Peak(ledger.peak_moment, _holdings(ledger.at_best)),
        timeline=tuple(_moment(*item) for item in ledger.timeline or ()),
        host_bytes_per_rank=host,
        confidence=_confidence(trace),
        unknowns=trace.unknowns,
        phases=phases,
        allocated_peak_range_bytes=None if upper is None else (ledger.best, max(upper, ledger.best)),
    )


def _unfused(trace: Trace, upper: Trace) -> Trace:
    """Return ``trace`` with the events of the one in which compiled blocks fuse nothing."""
    return replace(
        trace,
        segments=upper.segments,
        sizes=upper.sizes,
        kinds=upper.kinds,
        names=upper.names,
        vocabulary=upper.vocabulary,
        gradients=upper.gradients,
        repeats=upper.repeats,
        upper=None,
    )


def _phases(simulated: Simulated, recipe: Recipe) -> tuple[Phase, ...]:
    """Return every phase the run has; what could not be traced is unknown, never absent."""
    expected = set(STEP_PHASES)
    if recipe.evaluation.wanted:
        expected.add(RunPhase.EVALUATION)
    if recipe.evaluation.sampled:
        expected.add(RunPhase.SAMPLING)
    phases = []
    for name in RunPhase:
        top = simulated.ledger.tops.get(name)
        if top is None and name not in expected:
            continue
        every, first = host_bytes(simulated.off_step, name)
        if top is None:
            phases.append(Phase(name, None, every, first, "unknown"))
            continue
        exact = all(component.basis == "exact" for component, _ in _lines(top.live))
        basis: Basis = "exact" if exact else "estimated"
        phases.append(Phase(name, top.total, every, first, basis, top.moment))
    if simulated.off_step.saving:
        phases.append(Phase(RunPhase.EXPORT, 0, 0, simulated.off_step.exporting, "estimated"))
    return tuple(phases)


def _states_only(ledger: Ledger, trace: Trace, host: int, phases: tuple[Phase, ...]) -> Footprint:
    components = [c for c in _components(ledger.live) if c.basis == "exact"]
    components += [
        ComponentBytes(_BY_INDEX[kind], None, "unknown") for kind in sorted(set(OF_TRACE) - {OFFLOADED})
    ]
    return Footprint(
        allocated_peak_bytes=None,
        reserved_peak_bytes=None,
        components=tuple(components),
        peak=None,
        timeline=(),
        host_bytes_per_rank=host,
        confidence=_confidence(trace),
        unknowns=trace.unknowns or ("activations: the model could not be traced",),
        phases=phases,
    )


def _moment(name: str, total: int, live: Sequence[int]) -> Moment:
    components = dict(_lines(live))
    groups = dict.fromkeys(ColourGroup, 0)
    for component, size in components.items():
        groups[component.group] += size
    return Moment(
        name,
        total,
        groups={group.value: size for group, size in groups.items() if size},
        components={component.value: size for component, size in components.items()},
    )


def _components(live: list[int]) -> tuple[ComponentBytes, ...]:
    return tuple(ComponentBytes(component, size, component.basis) for component, size in _lines(live))


def _lines(live: Sequence[int]) -> list[tuple[Component, int]]:
    """Return what is alive on the device, by component."""
    return [(_BY_INDEX[kind], size) for kind, size in enumerate(live) if size and kind != OFFLOADED]


def _holdings(live: list[int]) -> tuple[Holding, ...]:
    holdings = [Holding(component, size) for component, size in _lines(live)]
    return tuple(sorted(holdings, key=lambda holding: -holding.bytes))


def _confidence(trace: Trace) -> str:
    minor = ".".join(trace.torch.split(".")[:2])
    return "verified" if minor in VERIFIED_TORCH else "unverified"
