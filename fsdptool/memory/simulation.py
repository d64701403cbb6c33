"""Plays a run on one rank: loading, the steps, and what happens between them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fsdptool.memory.beside import Beside, loading, play_beside
from fsdptool.memory.gathering import Ranks
from fsdptool.memory.ledger import (
    ALL_REDUCE,
    BUFFERS,
    EMA,
    INPUTS,
    OPTIMIZER,
    TEACHER,
    WORKSPACES,
    Block,
    Ledger,
)
from fsdptool.memory.program import Piece, program
from fsdptool.memory.schedule import Schedule
from fsdptool.memory.sizes import WIDTH, rounded_sum, stored_dtype
from fsdptool.memory.states import States, states
from fsdptool.records.anatomy import Buffer
from fsdptool.records.recipe import Recipe
from fsdptool.records.settings import Mesh, StateDictType
from fsdptool.records.trace import Trace
from fsdptool.records.units import UnitPlan

MemoryProfile = Literal["cuda", "cpu-fake", "cpu-gloo"]


@dataclass(frozen=True, slots=True)
class Simulated:
    """A played run.

    Attributes:
        ledger: What was counted.
        held: The rank's states.
        beside: What is done between steps.
        complete: Whether activations were known.
    """

    ledger: Ledger
    held: States
    beside: Beside
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
    saves: StateDictType = "sharded",
    workspaces: tuple[int, ...] = (),
) -> Simulated:
    """Play loading, step 2 and what happens between steps. Arguments as in :func:`footprint`.

    Args:
        grain: Bytes sizes are rounded to.
        ledger: Where to count; None makes one.
        warm: Play step 1, too, which makes the optimizer's states at its end: what an allocator
            has reserved by step 2 depends on it.
    """
    if profile != "cuda":
        # Where the host is the device, nothing moves: ``.to("cpu")`` returns the tensor itself.
        units = replace(units, cpu_offload=False)
        teacher = replace(teacher, cpu_offload=False) if teacher is not None else None
    ledger = ledger if ledger is not None else Ledger(timeline=[] if timeline else None)
    ranks = Ranks(mesh.shard_degree, mesh.dp_replicate)
    gloo = profile == "cpu-gloo"
    schedule = Schedule(units, ranks, ledger, trace, grain=grain, gloo=gloo)
    held = states(schedule.groups, units, recipe, mesh.shard_degree, grain, cuda=profile == "cuda")
    beside = Beside(schedule, held, recipe, profile=profile, saves=saves)
    ledger.note("between steps")
    ledger.begin("load")
    loading(beside, _buffers(trace.buffers, grain))
    taught = _teacher(trace, teacher, ranks, ledger, grain, gloo=gloo)
    _add(ledger, held, EMA)
    ledger.begin("between steps")
    # Made by the first products of forward and of backward, and kept to the end of the process.
    ledger.add(Block(WORKSPACES, rounded_sum(workspaces, grain), workspaces))
    complete = trace.known and (trace.teacher is None or taught is not None)
    if warm and complete:
        ledger.whole = "first step"
        _step(schedule, taught, recipe, held, grain, first=True)
        ledger.whole = None
    else:
        _add(ledger, held, OPTIMIZER)
    if beside.staged is not None:
        ledger.add(beside.staged)
    if complete:
        _step(schedule, taught, recipe, held, grain)
        play_beside(beside)
    ledger.close()
    return Simulated(ledger, held, beside, complete)


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
    ledger.begin("forward")
    ledger.add(inputs)
    pieces = program(trace, schedule.by_module, grain)
    passes = _passes(recipe)
    for index, reduce in enumerate(passes):
        ledger.begin("forward")
        answer = taught.forward() if taught is not None else None
        schedule.micro_batch(pieces, reduce=reduce, last=index == len(passes) - 1, answer=answer)
    ledger.note("optimizer step")
    ledger.begin("optimizer")
    _reduce_replicated(schedule)
    if first:
        _add(ledger, held, OPTIMIZER)
    if held.update is not None:
        ledger.add(held.update)
        ledger.drop(held.update)
    ledger.note("zero_grad")
    schedule.zero_gradients()
    ledger.begin("between steps")
    ledger.drop(inputs)
    ledger.note("between steps")


def _add(ledger: Ledger, held: States, kind: int) -> None:
    for block in held.device:
        if block.kind == kind:
            ledger.add(block)


def _reduce_replicated(schedule: Schedule) -> None:
    """The gradients of parameters FSDP does not manage travel in one fp32 message per dtype."""
    if schedule.ranks.shard * schedule.ranks.replicate == 1:
        return
    plan = schedule.plan
    by_dtype: dict[str, int] = {}
    for parameter in plan.ignored:
        if parameter.trainable:
            dtype = stored_dtype(parameter, plan)
            by_dtype[dtype] = by_dtype.get(dtype, 0) + parameter.numel
    for dtype, count in by_dtype.items():
        size = count * max(WIDTH.get(dtype, 4), 4)
        # What is not wide enough is cast before it is put together.
        sizes = (size, size) if WIDTH.get(dtype, 4) < 4 else (size,)
        message = Block(ALL_REDUCE, rounded_sum(sizes, schedule.grain), sizes)
        schedule.ledger.add(message)
        schedule.ledger.drop(message)


@dataclass(slots=True)
class _Taught:
    """A teacher that runs before every forward of the student."""

    schedule: Schedule
    pieces: list[Piece]
    answer: Block

    def forward(self) -> Block:
        """Run it; returns its prediction, which is alive."""
        self.schedule.micro_batch(self.pieces, backward=False)
        self.schedule.reshard()
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
