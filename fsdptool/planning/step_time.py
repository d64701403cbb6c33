"""Step time: a rank's units and their work as stages of the schedule, and the throughput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdptool.memory.simulation.groups import Rank, Share
from fsdptool.memory.simulation.sizes import WIDTH, stored_dtype
from fsdptool.memory.simulation.states import trained_shards
from fsdptool.modeling.optimizers import TrainedTensor, optimizer_spec
from fsdptool.planning.compute_time import Cost
from fsdptool.planning.overlap import Run, Stage, StepTime, time_step
from fsdptool.records.cluster import Cluster, Machine
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import ParallelDims

_ORDER = {"root": 0, "shared": 1, "embedding": 2, "block": 3, "tail": 4}
"""Forward order by kind: the root gathers first, the tail computes last."""


@dataclass(frozen=True, slots=True)
class Timing:
    """A step's time and what it amounts to."""

    step: StepTime
    tokens_per_second: float | None
    samples_per_second: float


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank moves in a step, as far as no micro-batch changes it.

    Attributes:
        order: Places of the units in their plan, as forward visits them.
        stages: Their collectives in that order, without any work.
        trained: Elements one rank updates: its shards, and whole what is replicated.
        tensors: Parameters with a gradient that are sharded, as this rank stores them.
        offloaded: Bytes of shards copied to the device for forward and backward, and of gradients back.
        prefetch: FSDP units to prefetch.
    """

    order: tuple[int, ...]
    stages: tuple[Stage, ...]
    trained: float
    tensors: tuple[TrainedTensor, ...]
    offloaded: float
    prefetch: int


def measure_traffic(rank: Rank) -> Traffic:
    """Return what a rank moves for its units."""
    plan = rank.plan
    order = sorted(range(len(rank.shares)), key=lambda place: _ORDER.get(plan.units[place].kind, 3))
    sharded = [p for unit in plan.units for p in unit.parameters]
    whole = sum(p.numel for p in plan.ignored if p.trainable)
    trained = sum(p.numel for p in sharded if p.trainable)
    offloaded = 0.0
    if plan.cpu_offload:
        weights = sum(p.numel * WIDTH.get(p.dtype, 4) for p in sharded)
        offloaded = (2 * weights + 4 * trained) / rank.degree
    return Traffic(
        order=tuple(order),
        stages=tuple(_stage(rank.shares[place], rank) for place in order),
        trained=trained / rank.degree + whole,
        tensors=trained_shards(rank),
        offloaded=offloaded,
        prefetch=plan.prefetch,
    )


def fill(
    traffic: Traffic, work: Sequence[Cost], sharing: int = 1, exchanged: Sequence[Cost] | None = None
) -> list[Stage]:
    """Return the stages with their work.

    Args:
        traffic: The collectives.
        work: Compute of each unit, in the plan's order (:func:`~fsdptool.planning.compute_time.unit_costs`).
        sharing: Ranks that share a sequence, and so its work.
        exchanged: Bytes each unit gathers from them, under ``forward``.
    """
    return [
        Stage(
            stage.gather_bytes,
            stage.reduce_bytes,
            stage.shard_reduce_bytes,
            stage.backward_ranks,
            work[place].forward / sharing,
            work[place].backward / sharing,
            exchanged[place].forward if exchanged is not None else 0.0,
            stage.exchanges,
        )
        for place, stage in zip(traffic.order, traffic.stages, strict=True)
    ]


def time_candidate(
    traffic: Traffic,
    stages: Sequence[Stage],
    recipe: Recipe,
    mesh: ParallelDims,
    cluster: Cluster,
    machine: Machine,
    *,
    teacher: Sequence[Stage] = (),
) -> Timing | None:
    """Return the time of one optimizer step of ``recipe`` (sizes resolved); None without GPUs.

    Args:
        traffic: What the rank moves.
        stages: Its units in forward order, with their work.
        recipe: Accumulation and optimizer.
        mesh: Resolved mesh.
        cluster, machine: The hardware.
        teacher: A distillation teacher's units, which run before every forward.
    """
    spec = optimizer_spec(recipe.optimizer)
    kernel = spec.kernel(recipe.optimizer.implementation)
    moved = traffic.trained * spec.update_bytes[kernel]
    work = spec.work(recipe.optimizer, traffic.tensors)
    run = Run(
        accumulation=recipe.batch.accumulation,
        reduce_each=recipe.sharding.accumulation == "sharded",
        prefetch=traffic.prefetch,
        optimizer_bytes=moved + traffic.trained * _ema(recipe),
        optimizer_operators=spec.operators(kernel, len(traffic.tensors)) + work.operators,
        optimizer_flops=work.flops,
        optimizer_exchanged=work.exchanged,
        offloaded_bytes=traffic.offloaded,
    )
    step = time_step(stages, run, mesh, cluster, machine, teacher=teacher)
    if step is None or step.seconds <= 0:
        return None
    samples = recipe.batch.micro_batch * recipe.batch.accumulation * mesh.data_ranks
    length = recipe.batch.sequence_length
    return Timing(
        step=step,
        tokens_per_second=samples * length / step.seconds if length is not None else None,
        samples_per_second=samples / step.seconds,
    )


def model_states(rank: Rank) -> dict[str, int]:
    """Return parameter and gradient bytes of rank 0, which has the largest shards (torch 2.13)."""
    sharded = [(w.shard * w.stored, w.trainable) for share in rank.shares for w in share.weights]
    whole = [(p.numel * WIDTH.get(stored_dtype(p, rank.plan), 4), p.trainable) for p in rank.plan.ignored]
    kept = [*sharded, *whole]
    return {
        "parameters": sum(size for size, _ in kept),
        "gradients": sum(size for size, trained in kept if trained),
    }


def _stage(share: Share, rank: Rank) -> Stage:
    reduce = sum(share.reduction.input.sizes)
    return Stage(
        gather_bytes=sum(share.buffers.whole.sizes),
        reduce_bytes=reduce,
        shard_reduce_bytes=reduce / rank.degree,
        backward_ranks=_backward_ranks(share, rank.degree),
        forward=0.0,
        backward=0.0,
        exchanges=2 if share.unit.checkpointed else 1,
    )


def _backward_ranks(share: Share, ranks: int) -> int:
    if not share.unit.unshard_in_backward or share.reshard is False:
        return 1
    return ranks if share.reshard is True else share.reshard


def _ema(recipe: Recipe) -> int:
    return 12 if recipe.ema.decay is not None else 0
