"""``footprint``: one configuration's memory on one rank. Torch-free and fast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdptool.memory.gathering import Ranks
from fsdptool.memory.ledger import (
    BUFFERS,
    COMPONENTS,
    INPUTS,
    OF_TRACE,
    OPTIMIZER,
    TEACHER,
    Block,
    Ledger,
)
from fsdptool.memory.program import Piece, program
from fsdptool.memory.schedule import Schedule
from fsdptool.memory.sizes import WIDTH, rounded_sum
from fsdptool.memory.states import States, states
from fsdptool.records.anatomy import Buffer
from fsdptool.records.footprint import Footprint
from fsdptool.records.plan import Basis, Component, Holding, Moment, Peak
from fsdptool.records.recipe import Recipe
from fsdptool.records.settings import Mesh
from fsdptool.records.trace import Trace
from fsdptool.records.units import UnitPlan

MemoryProfile = Literal["cuda", "cpu-fake", "cpu-gloo"]

VERIFIED_TORCH = ("2.13",)
"""Minor versions of torch whose FSDP2 the schedule was held against (``oracle.py``)."""

_GRAIN = {"cuda": 512, "cpu-fake": 1, "cpu-gloo": 1}
_EXACT = ("parameters", "gradients", "optimizer", "ema", "replicated parameters", "buffers")


def footprint(
    trace: Trace,
    units: UnitPlan,
    mesh: Mesh,
    recipe: Recipe,
    *,
    profile: MemoryProfile = "cuda",
    timeline: bool = True,
    teacher: UnitPlan | None = None,
    reserved: bool | None = None,
    expandable: bool = False,
) -> Footprint:
    """Simulate step 2 of a run on rank 0 (no rank holds more).

    Args:
        trace: One micro-batch of this model under this recipe.
        units: How it is sharded.
        mesh: Resolved mesh.
        recipe: Accumulation, optimizer, EMA.
        profile: Whose allocator counts.
        timeline: Whether to return the timeline (searches leave it out).
        teacher: Units of a distillation's teacher.
        reserved: Whether to replay the caching allocator (about a second); None: on CUDA, where a
            timeline is wanted.
        expandable: Whether it uses expandable segments.
    """
    made = simulate(
        trace, units, mesh, recipe, profile=profile, grain=_GRAIN[profile], timeline=timeline, teacher=teacher
    )
    ledger = made.ledger
    if not made.complete:
        return _states_only(ledger, trace, made.host)
    segments = None
    if profile == "cuda" and (timeline if reserved is None else reserved):
        segments = _reserved(trace, units, mesh, recipe, teacher, expandable)
    return Footprint(
        allocated_peak_bytes=ledger.best,
        reserved_peak_bytes=segments,
        components=_components(ledger.at_best),
        peak=Peak(ledger.peak_moment, _holdings(ledger.at_best)),
        timeline=tuple(Moment(name, level) for name, level in ledger.timeline or ()),
        host_bytes_per_rank=made.host,
        confidence=_confidence(trace),
        unknowns=trace.unknowns,
    )


@dataclass(frozen=True, slots=True)
class Simulated:
    """A played step: the ledger, host bytes, and whether activations were known."""

    ledger: Ledger
    host: int
    complete: bool


def simulate(
    trace: Trace,
    units: UnitPlan,
    mesh: Mesh,
    recipe: Recipe,
    *,
    profile: MemoryProfile,
    grain: int,
    timeline: bool = False,
    teacher: UnitPlan | None = None,
    ledger: Ledger | None = None,
    warm: bool = False,
) -> Simulated:
    """Play step 2 and return its ledger. Arguments as in :func:`footprint`.

    Args:
        grain: Bytes sizes are rounded to.
        ledger: Where to count; None makes one.
        warm: Play step 1, too, which makes the optimizer's states at its end: what an allocator
            has reserved by step 2 depends on it.
    """
    ledger = ledger if ledger is not None else Ledger(timeline=[] if timeline else None)
    ranks = Ranks(mesh.shard_degree, mesh.dp_replicate)
    gloo = profile == "cpu-gloo"
    schedule = Schedule(units, ranks, ledger, trace, grain=grain, gloo=gloo)
    held = states(schedule.groups, units, recipe, mesh.shard_degree, grain, cuda=profile == "cuda")
    ledger.note("between steps")
    for block in held.device:
        if not (warm and block.kind == OPTIMIZER):
            ledger.add(block)
    ledger.add(_buffers(trace.buffers, grain))
    taught = _teacher(trace, teacher, ranks, ledger, grain, gloo=gloo)
    if not trace.known or (trace.teacher is not None and taught is None):
        return Simulated(ledger, held.host, False)
    if warm:
        _step(schedule, taught, recipe, held, grain, first=True)
    _step(schedule, taught, recipe, held, grain)
    return Simulated(ledger, held.host, True)


def _step(
    schedule: Schedule,
    taught: _Taught | None,
    recipe: Recipe,
    held: States,
    grain: int,
    *,
    first: bool = False,
) -> None:
    """Play one optimizer step in the order of ``training/step.py``."""
    ledger, trace = schedule.ledger, schedule.trace
    accumulation = recipe.batch.accumulation
    sizes = trace.input_bytes * accumulation
    inputs = Block(INPUTS, rounded_sum(sizes, grain), sizes)
    ledger.note("batch")
    ledger.add(inputs)
    pieces = program(trace, schedule.by_module, grain)
    passes = _passes(recipe)
    for index, reduce in enumerate(passes):
        answer = taught.forward() if taught is not None else None
        schedule.micro_batch(pieces, reduce=reduce, last=index == len(passes) - 1, answer=answer)
    ledger.note("optimizer step")
    for block in held.device if first else ():
        if block.kind == OPTIMIZER:
            ledger.add(block)
    if held.update is not None:
        ledger.add(held.update)
        ledger.drop(held.update)
    ledger.note("zero_grad")
    schedule.zero_gradients()
    ledger.drop(inputs)
    ledger.note("between steps")


def _reserved(
    trace: Trace, units: UnitPlan, mesh: Mesh, recipe: Recipe, teacher: UnitPlan | None, expandable: bool
) -> int | None:
    """Return what the caching allocator has taken from the device by the end of step 2."""
    from fsdptool.memory.allocator import CachingAllocator
    from fsdptool.memory.replay import ReplayLedger

    ledger = ReplayLedger(allocator=CachingAllocator(expandable=expandable))
    made = simulate(
        trace,
        units,
        mesh,
        recipe,
        profile="cuda",
        grain=_GRAIN["cuda"],
        teacher=teacher,
        ledger=ledger,
        warm=True,
    )
    return ledger.allocator.reserved_peak if made.complete else None


@dataclass(slots=True)
class _Taught:
    """A teacher that runs before every forward of the student."""

    schedule: Schedule
    pieces: list[Piece]
    answer: Block

    def forward(self) -> Block:
        """Run it; returns its prediction, which is alive."""
        self.schedule.micro_batch(self.pieces, backward=False)
        return self.answer


def _teacher(
    trace: Trace, plan: UnitPlan | None, ranks: Ranks, ledger: Ledger, grain: int, *, gloo: bool
) -> _Taught | None:
    """Hold the teacher's shards, and return it ready to run if its forward is known."""
    taught = trace.teacher
    if taught is None or plan is None:
        return None
    schedule = Schedule(plan, ranks, ledger, taught, grain=grain, gloo=gloo)
    for group in schedule.groups:
        sizes = tuple(w.shard * w.stored for w in group.weights)
        ledger.add(Block(TEACHER, rounded_sum(sizes, grain), sizes))
    if not taught.known:
        return None
    pieces = program(taught, schedule.by_module, grain)
    kept = sum(piece.body.total for piece in pieces)
    return _Taught(schedule, pieces, Block(TEACHER, kept, (kept,)))


def _passes(recipe: Recipe) -> list[bool]:
    """Return the micro-batches worth simulating: whether each reduces its gradients.

    From the second on they are alike, but for the last when gradients stay unsharded till then.
    """
    count = recipe.batch.accumulation
    if recipe.sharding.accumulation == "unsharded":
        return [False] * min(count - 1, 2) + [True]
    return [True] * min(count, 2)


def _buffers(buffers: tuple[Buffer, ...], grain: int) -> Block:
    sizes = []
    for buffer in buffers:
        numel = 1
        for dim in buffer.shape:
            numel *= dim
        sizes.append(numel * WIDTH.get(buffer.dtype, 4))
    return Block(BUFFERS, rounded_sum(sizes, grain), tuple(sizes))


def _states_only(ledger: Ledger, trace: Trace, host: int) -> Footprint:
    components = [c for c in _components(ledger.live) if c.name in _EXACT]
    components += [Component(COMPONENTS[kind], None, "unknown") for kind in sorted(set(OF_TRACE))]
    return Footprint(
        allocated_peak_bytes=None,
        reserved_peak_bytes=None,
        components=tuple(components),
        peak=None,
        timeline=(),
        host_bytes_per_rank=host,
        confidence=_confidence(trace),
        unknowns=trace.unknowns or ("activations: the model could not be traced",),
    )


def _components(live: list[int]) -> tuple[Component, ...]:
    return tuple(
        Component(name, size, _basis(name)) for name, size in zip(COMPONENTS, live, strict=True) if size
    )


def _basis(name: str) -> Basis:
    return "exact" if name in _EXACT else "estimated"


def _holdings(live: list[int]) -> tuple[Holding, ...]:
    held = [Holding(name, size) for name, size in zip(COMPONENTS, live, strict=True) if size]
    return tuple(sorted(held, key=lambda holding: -holding.bytes))


def _confidence(trace: Trace) -> str:
    minor = ".".join(trace.torch.split(".")[:2])
    return "verified" if minor in VERIFIED_TORCH else "unverified"
