"""Plays a run on one rank: loading, the steps, and what happens between them. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from fsdptool.memory.simulation.collective_bytes import (
    WIDTH,
    MemoryDevice,
    alike,
    gradient_buckets,
    replicated_messages,
    rounded,
    rounded_sum,
    stored_dtype,
)
from fsdptool.memory.simulation.fsdp_schedule import FsdpSchedule
from fsdptool.memory.simulation.groups import Rank, cut
from fsdptool.memory.simulation.ledger import (
    BUFFERS,
    COPIES,
    EMA,
    INPUTS,
    LOSS,
    OPTIMIZER,
    TEACHER,
    WORKSPACES,
    Block,
    Ledger,
)
from fsdptool.memory.simulation.loading import play_loading
from fsdptool.memory.simulation.off_step import OffStep, States, play_off_step, rank_states
from fsdptool.memory.simulation.program import Piece, program, traced_path
from fsdptool.modeling.objective import GradientSync, gradient_syncs
from fsdptool.records.anatomy import Buffer
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import OWN_LOOP, TrainingLoop
from fsdptool.records.recipe import Recipe
from fsdptool.records.run import RunPhase
from fsdptool.records.sharding import StateDictType, UnitPlan
from fsdptool.records.trace import KINDS, Trace

_OUTPUT = KINDS.index("output")


@dataclass(frozen=True, slots=True)
class PreparedSimulation:
    """What is simulated, as far as no micro-batch changes it: a search makes it once for many steps.

    Attributes:
        rank: The units.
        states: What the rank keeps between steps.
        teacher: A distillation's teacher, or None.
    """

    rank: Rank
    states: States
    teacher: Rank | None


def prepare(
    units: UnitPlan,
    mesh: ParallelDims,
    recipe: Recipe,
    *,
    device: MemoryDevice,
    teacher: UnitPlan | None = None,
    trace: Trace | None = None,
    states: States | None = None,
) -> PreparedSimulation:
    """Work out everything that depends on units, ranks and optimizer alone.

    Args:
        units, teacher: How model and teacher are sharded.
        mesh: Resolved; only how many ranks share a copy counts here.
        recipe: Optimizer and average.
        device: Whose memory is counted.
        trace: Tells which trainable parameters no gradient reaches (a vision tower in training on text);
            None assumes that one reaches all.
        states: What the rank keeps between steps, if it is known; None works it out.
    """
    rank = hold_units(units, mesh, device)
    teacher_rank = hold_units(teacher, mesh, device) if teacher is not None else None
    if states is None:
        idle = without_gradient(units, trace) if trace is not None and trace.known else ()
        states = rank_states(rank, recipe, cuda=device.host_apart, without_gradient=idle)
    return PreparedSimulation(rank, states, teacher_rank)


def hold_units(units: UnitPlan, mesh: ParallelDims, device: MemoryDevice) -> Rank:
    """Return what one rank holds of a plan. Where the host is the device, offloading moves nothing:
    ``.to("cpu")`` returns the tensor itself."""
    moves = units.cpu_offload and device.host_apart
    return cut(replace(units, cpu_offload=moves), mesh.shard_degree, device)


def without_gradient(units: UnitPlan, trace: Trace) -> frozenset[str]:
    """Return the trainable parameters that have no gradient in the trace."""
    parameters = chain(units.ignored, *(unit.parameters for unit in units.units))
    return frozenset(
        p.fqn
        for p in parameters
        if p.trainable and not any(traced_path(name, trace.repeats) in trace.gradients for name in p.names)
    )


@dataclass(frozen=True, slots=True)
class Simulated:
    """A played run.

    Attributes:
        ledger: What was counted.
        states: The rank's states.
        off_step: What is done between steps.
        complete: Whether activations were known.
    """

    ledger: Ledger
    states: States
    off_step: OffStep
    complete: bool


def simulate(
    trace: Trace,
    prepared: PreparedSimulation,
    mesh: ParallelDims,
    recipe: Recipe,
    *,
    ledger: Ledger | None = None,
    warm: bool = False,
    saves: StateDictType = "sharded",
    workspaces: tuple[int, ...] = (),
    loop: TrainingLoop = OWN_LOOP,
) -> Simulated:
    """Play a run of what was prepared.

    Args:
        trace: One micro-batch.
        prepared: The rank.
        mesh: Resolved mesh.
        recipe: Accumulation, EMA, evaluation, checkpoints.
        ledger: Where to count; None makes one.
        warm: Play step 1, too, which makes the optimizer's states at its end: what an allocator
            has reserved by step 2 depends on it.
        saves: Whether checkpoints are sharded or full.
        workspaces: Bytes of each workspace that matrix products keep on the device.
        loop: What is assumed about the training loop.
    """
    states, device = prepared.states, prepared.rank.device
    grain = device.grain
    ledger = ledger if ledger is not None else Ledger()
    logits = (
        _logits(trace, grain, wide=loop.keeps_logits) if loop.keeps_logits or loop.keeps_outputs else None
    )
    ranks = prepared.rank.degree * mesh.dp_replicate
    schedule = FsdpSchedule(
        prepared.rank,
        mesh.dp_replicate,
        ledger,
        trace,
        logits=logits,
        loss_in_forward=loop.loss_in_forward,
        completes=loop == OWN_LOOP and ranks > 1,
    )
    # A thread of fsdptool's loop copies the next step's inputs to a GPU (``training/data/loader.py``).
    reads_ahead = device.host_apart and loop.program == OWN_LOOP.program
    off_step = OffStep(schedule, states, recipe, device, saves, reads_ahead)
    ledger.note("between steps")
    ledger.begin(RunPhase.LOAD)
    kept = {block.kind: block for block in states.device}
    play_loading(ledger, prepared.rank, kept, _buffers(trace.buffers, grain), recipe, loop.loading or "rows")
    teacher = _load_teacher(trace, prepared.teacher, mesh.dp_replicate, ledger)
    _add(ledger, states, EMA)
    ledger.begin(None)
    # Made by the first products of forward and of backward, and kept to the end of the process.
    ledger.add(Block(WORKSPACES, rounded_sum(workspaces, grain), workspaces))
    complete = trace.known and (trace.teacher is None or teacher is not None)
    inputs = _inputs(trace, recipe, grain, stream=COPIES if reads_ahead else 0)
    if reads_ahead and complete:
        # Each step finds its own here, adds those of the next one, and drops its own.
        ledger.add(inputs)
    if loop.program != OWN_LOOP.program and mesh.dp_replicate > 1 and prepared.rank.degree == 1:
        buckets = gradient_buckets(prepared.rank.plan, grain)
        if buckets is not None:
            ledger.add(buckets)
    if warm and complete:
        ledger.whole = RunPhase.FIRST_STEP
        _step(schedule, teacher, recipe, states, loop, inputs, first=True)
        ledger.whole = None
    else:
        _add(ledger, states, OPTIMIZER)
    if off_step.staged is not None:
        ledger.begin(None)  # the first save comes after the first step
        ledger.add(off_step.staged)
    if complete:
        _step(schedule, teacher, recipe, states, loop, inputs)
        play_off_step(off_step)
    ledger.close()
    return Simulated(ledger, states, off_step, complete)


def _step(
    schedule: FsdpSchedule,
    teacher: _Teacher | None,
    recipe: Recipe,
    states: States,
    loop: TrainingLoop,
    inputs: Block,
    *,
    first: bool = False,
) -> None:
    """Play one optimizer step in the order of ``training/step.py``."""
    ledger, trace, grain = schedule.ledger, schedule.trace, schedule.grain
    ledger.note("batch")
    ledger.begin(RunPhase.FORWARD)
    ledger.add(inputs)
    pieces = program(trace, schedule.rank.modules, grain)
    for sync in _distinct_syncs(recipe, loop):
        ledger.begin(RunPhase.FORWARD)
        output = teacher.forward() if teacher is not None else None
        schedule.micro_batch(pieces, sync, teacher_output=output)
    ledger.note("optimizer step")
    ledger.begin(RunPhase.OPTIMIZER)
    if loop.program == OWN_LOOP.program:
        _reduce_replicated(schedule)
    if first:
        _add(ledger, states, OPTIMIZER)
    if states.update is not None:
        ledger.add(states.update)
        ledger.drop(states.update)
    ledger.note("zero_grad")
    schedule.zero_gradients()
    ledger.begin(None)
    ledger.drop(inputs)
    ledger.note("between steps")


def _inputs(trace: Trace, recipe: Recipe, grain: int, *, stream: int) -> Block:
    """Return the micro-batches of one step."""
    sizes = alike(trace.input_bytes, recipe.batch.accumulation, grain)
    return Block(INPUTS, rounded_sum(sizes, grain), sizes, stream)


def _add(ledger: Ledger, states: States, kind: int) -> None:
    for block in states.device:
        if block.kind == kind:
            ledger.add(block)


def _reduce_replicated(schedule: FsdpSchedule) -> None:
    """Sum the gradients of parameters that FSDP does not manage (``training/step.py``)."""
    if schedule.rank.degree * schedule.replicate == 1:
        return
    for message in replicated_messages(schedule.plan, schedule.grain):
        schedule.ledger.add(message)
        schedule.ledger.drop(message)


@dataclass(slots=True)
class _Teacher:
    """A teacher that runs before every forward of the student."""

    schedule: FsdpSchedule
    pieces: list[Piece]
    output: Block

    def forward(self) -> Block:
        """Run it; returns its prediction, which is alive."""
        self.schedule.micro_batch(self.pieces)
        self.schedule.reshard()
        return self.output


def _load_teacher(trace: Trace, rank: Rank | None, replicate: int, ledger: Ledger) -> _Teacher | None:
    """Hold the teacher's shards, and return it ready to run if its forward is known."""
    teacher_trace = trace.teacher
    if teacher_trace is None or rank is None:
        return None
    schedule = FsdpSchedule(rank, replicate, ledger, teacher_trace)
    for group in schedule.groups:
        sizes = tuple(w.shard * w.stored for w in group.weights)
        ledger.add(Block(TEACHER, rounded_sum(sizes, rank.device.grain), sizes))
    whole = tuple(p.numel * WIDTH.get(stored_dtype(p, rank.plan), 4) for p in rank.plan.ignored)
    if whole:
        ledger.add(Block(TEACHER, rounded_sum(whole, rank.device.grain), whole))
    if not teacher_trace.known:
        return None
    pieces = program(teacher_trace, rank.modules, rank.device.grain)
    kept = sum(piece.body.total for piece in pieces)
    return _Teacher(schedule, pieces, Block(TEACHER, kept, (kept,)))


def _distinct_syncs(recipe: Recipe, loop: TrainingLoop) -> list[GradientSync]:
    """Return the micro-batches worth simulating: further ones between them only repeat the one before.

    Gradients that stay unsharded are widened by the first micro-batch and added to by the second.
    """
    unsharded = recipe.sharding.accumulation == "unsharded"
    count = min(recipe.batch.accumulation, 3)
    *earlier, last = gradient_syncs(count, unsharded=unsharded, marked=loop.marks_last)
    return [*earlier[: 2 if unsharded else 1], last]


def _logits(trace: Trace, grain: int, *, wide: bool) -> Block | None:
    """Return the largest output of the model, or its copy in fp32, as ``logits.float()`` makes it.

    Pipeline stages before the last one make none.
    """
    made = {event - 1 for segment in trace.segments for event in segment.events if event > 0}
    outputs = [
        size
        for number, (size, kind) in enumerate(zip(trace.sizes, trace.kinds, strict=True))
        if kind == _OUTPUT and number in made
    ]
    if not outputs:
        return None
    size = max(outputs) * 4 // WIDTH.get(trace.compute_dtype, 4) if wide else max(outputs)
    return Block(LOSS, rounded(size, grain), (size,))


def _buffers(buffers: tuple[Buffer, ...], grain: int) -> Block:
    sizes = []
    for buffer in buffers:
        numel = 1
        for dim in buffer.shape:
            numel *= dim
        sizes.append(numel * WIDTH.get(buffer.dtype, 4))
    return Block(BUFFERS, rounded_sum(sizes, grain), tuple(sizes))
