"""What a rank holds between steps, and what a run does there.

It holds shards, optimizer states and an average; it loads, averages, evaluates, samples and saves. Each is
played in the order of the trainer's own code: ``training/trainer.py`` and ``training/checkpoint``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from math import prod

from fsdptool.memory.simulation.collective_bytes import (
    WIDTH,
    MemoryDevice,
    ShardedParameter,
    alike,
    full_tensor,
    pinned,
    rounded,
    rounded_sum,
    shard_shape,
    stored_dtype,
)
from fsdptool.memory.simulation.fsdp_schedule import FsdpSchedule
from fsdptool.memory.simulation.groups import Rank
from fsdptool.memory.simulation.ledger import (
    EMA,
    GATHER,
    INPUTS,
    OPTIMIZER,
    OPTIMIZER_TEMPORARIES,
    PARAMETERS,
    REPLICATED,
    STAGED,
    TEMPORARIES,
    Block,
)
from fsdptool.memory.simulation.loading import in_model_order, loading_temporaries
from fsdptool.memory.simulation.program import program
from fsdptool.modeling.optimizer_costs import optimizer_spec
from fsdptool.modeling.optimizer_costs.tensors import TrainedTensor
from fsdptool.records.anatomy import Parameter
from fsdptool.records.recipe import Recipe
from fsdptool.records.run import RunPhase
from fsdptool.records.sharding import StateDictType, UnitPlan
from fsdptool.records.trace import Trace


@dataclass(frozen=True, slots=True)
class States:
    """Long-lived bytes of one rank, on the device and on the host."""

    device: tuple[Block, ...]
    host: int
    update: Block | None
    """Temporaries of ``optimizer.step``, on the device."""
    saved: tuple[int, ...] = ()
    """Bytes of each tensor this rank adds to a checkpoint: trained parameters, optimizer, average."""
    copied: int = 0
    """Host bytes of a copy of those: page-locked, but as they are where they are offloaded already."""


def rank_states(rank: Rank, recipe: Recipe, *, cuda: bool, without_gradient: Collection[str] = ()) -> States:
    """Return what the rank holds from step 2 on (optimizer states exist).

    Args:
        rank: The units.
        recipe: Optimizer, EMA.
        cuda: Whether the states lie on a GPU.
        without_gradient: Trainable parameters that no gradient reaches, by name: optimizers skip them and
            make no states for them (torch 2.13, ``Adam._init_group``).
    """
    plan, grain = rank.plan, rank.device.grain
    tensors = {id(w): _shard(w) for weights in rank.distinct for w in weights}
    # Units of one signature share their weights, so each parameter's own name says what it is.
    shards = [
        (tensors[id(w)], w.trainable, p.fqn not in without_gradient)
        for s in in_model_order(rank)
        for p, w in zip(s.unit.parameters, s.weights, strict=True)
    ]
    whole = [(_whole(p, plan), p.trainable, p.fqn not in without_gradient) for p in plan.ignored]
    spec = optimizer_spec(recipe.optimizer)
    kernel = spec.kernel(recipe.optimizer.implementation)

    def kept(parameters: Sequence[tuple[TrainedTensor, bool, bool]]) -> tuple[Block, Block, Block]:
        trained = [tensor for tensor, trainable, _ in parameters if trainable]
        updated = [tensor for tensor, trainable, has_gradient in parameters if trainable and has_gradient]
        optimizer = [s for t in updated for s in spec.states(recipe.optimizer, t, kernel, cuda)]
        average = [t.numel * max(t.width, 4) for t in trained] if recipe.ema.decay is not None else []
        update = spec.temporaries(recipe.optimizer, updated, kernel, cuda)
        return (
            _block(OPTIMIZER, optimizer, grain),
            _block(EMA, average, grain),
            _block(OPTIMIZER_TEMPORARIES, update, grain),
        )

    parameters = _block(PARAMETERS, [s.bytes for s, *_ in shards], grain)
    replicated = _block(REPLICATED, [p.bytes for p, *_ in whole], grain)
    trained = [tensor for tensor, trainable, _ in [*shards, *whole] if trainable]
    optimizer, average, update = kept([*shards, *whole])
    saved = (*(t.bytes for t in trained), *optimizer.sizes, *average.sizes)
    host, copied = 0, sum(pinned(size) for size in saved)
    if plan.cpu_offload:
        copied = sum(saved)
        # FSDP moves what it manages; parameters it does not stay on the device with all that is theirs.
        gradients = [tensor.bytes for tensor, trainable, gradient in shards if trainable and gradient]
        managed = kept(shards)
        host = sum(sum(block.sizes) for block in (parameters, *managed))
        host += sum(gradients)
        parameters = _block(PARAMETERS, [], grain)
        optimizer, average, update = kept(whole)
    device = (parameters, replicated, optimizer, average)
    return States(device, host, update if update.sizes else None, saved, copied)


def least_bytes(rank: Rank, states: States, idle: Collection[str]) -> int:
    """Return the device bytes that a rank's allocator holds at least at the peak of a step.

    Args:
        rank: Its units.
        states: What it keeps between steps.
        idle: Trainable parameters that no gradient reaches: their units may never be gathered.
    """
    gathered = 0
    for share in rank.shares:
        used = any(p.trainable and p.fqn not in idle for p in share.unit.parameters)
        if not used or share.reshard is True:
            continue
        stays = share.buffers.whole if share.reshard is False else share.buffers.smaller
        gathered += stays.total if stays is not None else 0
    return sum(block.total for block in states.device) + gathered


def trained_shards(rank: Rank) -> tuple[TrainedTensor, ...]:
    """Return the sharded parameters that a rank's optimizer updates."""
    # Units of one signature share their weights.
    tensors = {id(w): _shard(w) for weights in rank.distinct for w in weights if w.trainable}
    return tuple(tensors[id(w)] for share in rank.shares for w in share.weights if w.trainable)


def _shard(weights: ShardedParameter) -> TrainedTensor:
    parameter, ranks = weights.parameter, weights.ranks
    held = shard_shape(parameter.shape, ranks, weights.dimension)
    return TrainedTensor(parameter.fqn, parameter.shape, held, weights.stored, ranks)


def _whole(parameter: Parameter, plan: UnitPlan) -> TrainedTensor:
    width = WIDTH.get(stored_dtype(parameter, plan), 4)
    return TrainedTensor(parameter.fqn, parameter.shape, parameter.shape, width)


def _block(kind: int, sizes: Sequence[int], grain: int) -> Block:
    return Block(kind, rounded_sum(sizes, grain), tuple(sizes))


_RANDOM_STATES = 5056
"""Bytes of a rank's generator state, copied for every save (torch 2.13, Mersenne Twister)."""


@dataclass(frozen=True, slots=True)
class OffStep:
    """A run's states and recipe, as far as what happens between its steps depends on them.

    Attributes:
        schedule: The units, on the ledger everything is counted in.
        states: The rank's states.
        recipe: Evaluation, checkpoints, EMA.
        device: Whose memory is counted.
        saves: How checkpoints are written.
        reads_ahead: Whether the inputs of the next step are copied to the device during a step.
    """

    schedule: FsdpSchedule
    states: States
    recipe: Recipe
    device: MemoryDevice
    saves: StateDictType
    reads_ahead: bool

    @property
    def saving(self) -> bool:
        """Whether the run writes checkpoints at all."""
        return self.recipe.checkpoints.at_end or self.recipe.checkpoints.every_steps is not None

    @property
    def staging(self) -> bool:
        """Whether a save is copied to the host first: asynchronous, sharded, and not the last of the run."""
        policy = self.recipe.checkpoints
        every, steps = policy.every_steps, self.recipe.steps
        early = every is not None and (steps is None or every < steps)
        return early and policy.mode == "async" and self.saves == "sharded"

    @property
    def staged(self) -> Block | None:
        """The copies where they are device memory, too: on the CPU. They are kept for the next save."""
        if not self.staging or self.device.host_apart:
            return None
        copies = (*self.states.saved, *_persistent(self.schedule.trace))
        return Block(STAGED, sum(copies), copies)

    @property
    def exporting(self) -> int:
        """Host bytes of an export, one process after the run: a tensor's parts, and the whole of them."""
        return 2 * max((w.parameter.numel * w.stored for w in _weights(self.schedule)), default=0)

    def on_host(self) -> int:
        """Return the host bytes the copies take in host memory where that is apart.

        Host buffers are page-locked; shards that are offloaded are copied as they are.
        """
        if not self.staging or not self.device.host_apart:
            return 0
        buffers = _persistent(self.schedule.trace)
        offloaded = self.schedule.plan.cpu_offload
        return self.states.copied + (sum(buffers) if offloaded else sum(map(pinned, buffers)))


def play_off_step(run: OffStep) -> None:
    """Play what happens between two steps, each as a phase of its own; the timeline is the step's."""
    ledger = run.schedule.ledger
    timeline, ledger.timeline = ledger.timeline, None
    if run.recipe.ema.decay is not None:
        ledger.note("average")
        ledger.begin(RunPhase.AVERAGE)
        # ``Ema.update`` compares in fp32: parameters kept in another dtype are cast, all at once.
        _spike(run, TEMPORARIES, *(4 * numel for numel, stored in _trained(run) if stored not in (4, 8)))
    trace = run.schedule.trace
    _forwards(run, RunPhase.EVALUATION, trace.evaluation, count=2)
    _forwards(run, RunPhase.SAMPLING, trace.sampling, count=2)
    if run.saving:
        ledger.note("save")
        ledger.begin(RunPhase.SAVE)
        _save(run)
    ledger.begin(None)
    ledger.timeline = timeline


def _forwards(run: OffStep, phase: RunPhase, trace: Trace | None, *, count: int) -> None:
    """Play forwards without gradients; units that stay gathered do so until the last one is over."""
    if trace is None or not trace.known:
        return
    before, ledger = run.schedule, run.schedule.ledger
    ledger.note(phase)
    ledger.begin(phase)
    if run.recipe.ema.decay is not None:
        # One parameter's copy in its average's dtype, while the two change places.
        _spike(run, EMA, max((numel * max(stored, 4) for numel, stored in _trained(run)), default=0))
    ledger.prefix = f"{phase}: "
    inside = phase is RunPhase.EVALUATION and before.loss_in_forward
    schedule = FsdpSchedule(before.rank, before.replicate, ledger, trace, loss_in_forward=inside)
    # The loader's batch is all of a step's; a device holds one micro-batch of it, or this batch and the next.
    inputs = trace.input_bytes
    if phase is RunPhase.EVALUATION and (run.reads_ahead or not run.device.host_apart):
        steps = 2 if run.reads_ahead and run.recipe.evaluation.batches > 1 else 1
        inputs = alike(inputs, steps * run.recipe.batch.accumulation, before.grain)
    block = Block(INPUTS, rounded_sum(inputs, before.grain), inputs)
    ledger.add(block)
    pieces = program(trace, before.rank.modules, before.grain)
    for _ in range(count):
        schedule.micro_batch(pieces)
    schedule.reshard()
    ledger.drop(block)
    schedule.forget()
    ledger.prefix = ""


def _save(run: OffStep) -> None:
    """A full checkpoint gathers one whole tensor at a time; a sharded one reads shards where they are."""
    if not run.device.host_apart:
        _spike(run, STAGED, _RANDOM_STATES)
    if run.saves != "full" or run.schedule.plan.cpu_offload:
        return
    _spike(run, GATHER, *_gathered(run))


def _gathered(run: OffStep) -> tuple[int, ...]:
    """Return the allocations behind the largest whole tensor of a full checkpoint."""
    averaged = run.recipe.ema.decay is not None
    trained = (weights for weights in _weights(run.schedule) if weights.trainable)
    return max(
        (full_tensor(w, max(w.stored, 4 if averaged else 0), run.device, w.ranks) for w in trained),
        key=sum,
        default=(),
    )


def host_bytes(run: OffStep, phase: RunPhase) -> tuple[int, int]:
    """Return the host bytes of every rank in a phase, and what rank 0 holds besides.

    Counted are tensors: what the interpreter, the libraries and CUDA's own state take is not.

    Args:
        run: The run.
        phase: Its name.
    """
    offloaded = run.schedule.ledger.hosted
    if not run.device.host_apart:
        return 0, 0
    steady = run.states.host
    if phase is RunPhase.LOAD:
        rows = max((w.shard * w.stored for w in _weights(run.schedule)), default=0)
        random = run.recipe.model.weights == "random"
        return steady + rows + loading_temporaries(run.schedule.rank, random=random), 0
    if phase is RunPhase.FIRST_STEP:
        return steady + offloaded, 0
    steady += run.on_host()
    if phase in (RunPhase.FORWARD, RunPhase.BACKWARD):
        return steady + offloaded, 0
    if phase is not RunPhase.SAVE:
        return steady, 0
    if run.saves == "full":
        largest = max((w.parameter.numel * w.stored for w in _weights(run.schedule)), default=0)
        return steady + (largest if run.schedule.plan.cpu_offload else 0), largest
    # Without staging each tensor is read to the host when it is its turn.
    return steady + (0 if run.staging else max(run.states.saved, default=0)), 0


def _spike(run: OffStep, kind: int, *sizes: int) -> None:
    """Play allocations and their releases."""
    kept = tuple(size for size in sizes if size)
    if kept:
        block = Block(kind, sum(rounded(size, run.schedule.grain) for size in kept), kept)
        run.schedule.ledger.add(block)
        run.schedule.ledger.drop(block)


def _weights(schedule: FsdpSchedule) -> Iterable[ShardedParameter]:
    """Yield the sizes of every kind of parameter there is."""
    return (weights for unit in schedule.rank.distinct for weights in unit)


def _trained(run: OffStep) -> list[tuple[int, int]]:
    """Return elements on this rank and bytes per element of everything that is trained."""
    plan = run.schedule.plan
    sharded = [(w.shard, w.stored) for g in run.schedule.groups for w in g.weights if w.trainable]
    return sharded + [(p.numel, WIDTH.get(stored_dtype(p, plan), 4)) for p in plan.ignored if p.trainable]


def _persistent(trace: Trace) -> tuple[int, ...]:
    """Return the bytes of each buffer that checkpoints hold; a teacher's are in none."""
    own = trace.buffers[: len(trace.buffers) - len(trace.teacher.buffers if trace.teacher else ())]
    return tuple(prod(b.shape) * WIDTH.get(b.dtype, 4) for b in own if b.persistent)
