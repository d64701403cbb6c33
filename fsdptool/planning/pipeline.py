"""Plans of pipeline parallelism: memory of every stage, and the time of a step.

Nothing here is trained: all figures are estimates. A pipeline of p ranks and m micro-batches (the
accumulation) idles for (p - 1) / m of the ideal time under 1F1B, and for (p - 1) / (v m) under interleaved
1F1B with v virtual stages per rank (Narayanan et al., arXiv:2104.04473, sections 2.2.1 and 2.2.2).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from fsdptool.errors import PlanError
from fsdptool.planning.candidate.assembly import assemble
from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.candidate.stage_cut import VirtualStage, divide, find_stack, sent_bytes
from fsdptool.planning.candidate.verdict import check_fit
from fsdptool.planning.hardware import expands
from fsdptool.planning.time.overlap import StepTime, network_bandwidth
from fsdptool.planning.time.step_time import Timing
from fsdptool.records.cluster import Cluster, Machine
from fsdptool.records.plan import Candidate, ComponentBytes, Footprint, Pipeline, SearchPoint
from fsdptool.records.plan_details import PipelinePlan, PipelineStage
from fsdptool.records.trace import ColourGroup, Component

NOTE = (
    "pipeline parallelism is planned only: fsdptool train does not run it; memory and time of the stages are"
    " estimates, and no transfer between stages is assumed to overlap with computation"
)
_OUTSIDE = (Component.ALLOCATOR_SLACK, Component.CONTEXT, Component.COMMUNICATORS)


def pipeline_flags(pipeline: Pipeline) -> list[str]:
    """Return the options of ``fsdptool plan`` that say what ``pipeline`` says."""
    flags = ["--pp", str(pipeline.ranks), "--pp-schedule", pipeline.schedule]
    return [*flags, "--pp-virtual", str(pipeline.virtual)] if pipeline.virtual > 1 else flags


def stage_cluster(pipeline: Pipeline, cluster: Cluster) -> Cluster:
    """Return the part of a cluster that one stage runs on: whole nodes, or an equal part of one.

    Raises:
        PlanError: The cluster cannot be divided so; the help names the nearest valid sizes.
    """
    part = _part(pipeline.ranks, cluster)
    if part is None:
        raise PlanError(
            f"--pp {pipeline.ranks} does not divide {cluster.nodes} x {cluster.gpus_per_node} ranks into"
            " whole nodes or equal parts of one",
            help=_nearest(pipeline.ranks, lambda n: _part(n, cluster) is not None, cluster.world_size),
        )
    return part


def _part(stages: int, cluster: Cluster) -> Cluster | None:
    if cluster.nodes % stages == 0:
        return replace(cluster, nodes=cluster.nodes // stages)
    ranks, rest = divmod(cluster.world_size, stages)
    if rest or not ranks or cluster.gpus_per_node % ranks:
        return None
    return replace(cluster, nodes=1, gpus_per_node=ranks)


def _nearest(given: int, valid: Callable[[int], bool], most: int, flag: str = "--pp") -> str:
    below = [size for size in range(1, min(given, most + 1)) if valid(size)][-1:]
    above = [size for size in range(given + 1, most + 1) if valid(size)][:1]
    return f"use {flag} {' or '.join(map(str, below + above))}"


@dataclass(frozen=True, slots=True)
class _Rank:
    """A pipeline rank: its virtual stages, what each needs with one micro-batch, and what all need."""

    parts: tuple[VirtualStage, ...]
    needs: tuple[Candidate, ...]
    in_flight: int
    components: dict[Component, int]
    seconds: float | None
    """Forward and backward of one micro-batch, through all virtual stages."""

    @property
    def allocated(self) -> int:
        return sum(self.components.values())

    def update(self) -> float:
        """Return seconds of the optimizer and of its traffic to the host."""
        return sum(item.seconds.get(name, 0.0) for item in self.needs for name in ("optimizer", "offload"))


def plan_pipeline(
    estimator: Estimator, pipeline: Pipeline, point: SearchPoint, cluster: Cluster, machine: Machine
) -> tuple[Candidate, PipelinePlan]:
    """Return the configuration as its most loaded stage runs it, and its stages.

    Args:
        estimator: Of the whole model.
        pipeline: Stages and schedule.
        point: The configuration of one stage: its mesh is that of :func:`stage_cluster`.
        cluster, machine: The hardware of the whole run.

    Raises:
        PlanError: The model or the micro-batches cannot be divided so.
    """
    small = stage_cluster(pipeline, cluster)
    if estimator.run.recipe.method.name == "distillation":
        raise PlanError("--pp does not plan the teacher of a distillation", help="leave --pp out")
    # The whole model at the stage's mesh: its trace, its units and the work of a step.
    whole = estimator.candidate("whole", point, small, machine, detail=False, replay=False)
    trace, units = estimator.trace_of(point, small), estimator.units_of(point, small)
    if not trace.known:
        raise PlanError("--pp needs activations that are known", help="leave --pp out")
    stack, total = find_stack(units, trace)
    micro_batches = point.accumulation
    _check(pipeline, stack, total, micro_batches, cluster)
    parts = divide(stack, total, pipeline.ranks * pipeline.virtual)
    needs = [_evaluate(estimator, part, point, small, machine) for part in parts]
    ranks = []
    for rank in range(pipeline.ranks):
        mine = range(rank, len(parts), pipeline.ranks)
        held = [parts[i] for i in mine], [needs[i] for i in mine]
        ranks.append(_gather(*held, pipeline, micro_batches, rank))
    worst = max(ranks, key=lambda rank: rank.allocated)
    sent = sent_bytes(trace, stack) if len(parts) > 1 else 0
    transfer = _transfer(pipeline, micro_batches, sent, cluster, machine)
    bubble = bubble_fraction(pipeline, micro_batches)
    timing, parts_of_step = _time(ranks, point, transfer, bubble, small, cluster, machine, estimator)
    further = machine.further_communicator_bytes if pipeline.ranks > 1 else 0
    machine = replace(machine, communicator_bytes=machine.communicator_bytes + further)
    footprint = Footprint(
        allocated_peak_bytes=worst.allocated,
        reserved_peak_bytes=_reserved(estimator, worst, point, small, machine),
        components=tuple(ComponentBytes(name, size, name.basis) for name, size in worst.components.items()),
        peak=None,
        timeline=(),
        host_bytes_per_rank=sum(
            max((phase.host_bytes_per_rank for phase in item.phases), default=0) for item in worst.needs
        ),
    )
    verdict = check_fit(footprint, point, cluster, machine)
    candidate = assemble(
        "requested",
        point,
        cluster,
        footprint,
        verdict,
        timing,
        machine,
        expandable=expands(cluster, estimator.run.loop),
        division="pipeline",
    )
    candidate = replace(candidate, seconds=parts_of_step, step_flops=whole.step_flops)
    if whole.peak_flops and whole.step_flops and timing is not None:
        mfu = whole.step_flops / (cluster.world_size * timing.step.seconds * whole.peak_flops)
        candidate = replace(candidate, peak_flops=whole.peak_flops, mfu=mfu)
    planned = PipelinePlan(
        ranks=pipeline.ranks,
        schedule=pipeline.schedule,
        virtual=pipeline.virtual,
        micro_batches=micro_batches,
        bubble=bubble,
        bubble_seconds=parts_of_step.get("pipeline_bubble"),
        sent_bytes=sent,
        transfer_seconds=transfer if timing is not None else None,
        basis="estimated",
        trained=False,
        stages=tuple(_describe(rank) for rank in ranks),
    )
    return candidate, planned


def _check(pipeline: Pipeline, stack: str, total: int, micro_batches: int, cluster: Cluster) -> None:
    def fits(ranks: int) -> bool:
        return ranks * pipeline.virtual <= total and _part(ranks, cluster) is not None

    if not fits(pipeline.ranks):
        raise PlanError(
            f"{pipeline.ranks * pipeline.virtual} stages are more than the {total} blocks of {stack}",
            help=_nearest(pipeline.ranks, fits, cluster.world_size)
            if fits(1)
            else f"use --pp-virtual {total} or less",
        )
    if pipeline.schedule == "interleaved" and micro_batches % pipeline.ranks:
        # Narayanan et al., section 2.2.2.
        raise PlanError(
            f"the interleaved schedule needs a multiple of {pipeline.ranks} micro-batches, not"
            f" {micro_batches}",
            help=_nearest(micro_batches, lambda n: n % pipeline.ranks == 0, 1 << 20, "--accumulation"),
        )


def _evaluate(
    estimator: Estimator,
    part: VirtualStage,
    point: SearchPoint,
    cluster: Cluster,
    machine: Machine,
    *,
    replay: bool = False,
) -> Candidate:
    """Return what a virtual stage needs as if it were a model of its own, with one micro-batch in flight."""
    name = f"{part.stack}.{part.first}"
    return estimator.of_stage(part, estimator.trace_of(point, cluster)).candidate(
        name, point, cluster, machine, detail=True, replay=replay
    )


def _reserved(
    estimator: Estimator, rank: _Rank, point: SearchPoint, cluster: Cluster, machine: Machine
) -> int | None:
    """Return the reserved peak of a rank: allocated bytes, and the slack of its largest virtual stage.

    The allocator is replayed for that stage with one micro-batch in flight: streams have pools of their own,
    whose slack does not grow with the activations that wait for backward.
    """
    sizes = [item.allocated_peak_bytes or 0 for item in rank.needs]
    part = rank.parts[sizes.index(max(sizes))]
    alone = _evaluate(estimator, part, point, cluster, machine, replay=True)
    if alone.allocated_peak_bytes is None or alone.reserved_peak_bytes is None:
        return None
    return rank.allocated + alone.reserved_peak_bytes - alone.allocated_peak_bytes


def _gather(
    parts: Sequence[VirtualStage],
    needs: Sequence[Candidate],
    pipeline: Pipeline,
    micro_batches: int,
    rank: int,
) -> _Rank:
    """Return a rank at its peak: one virtual stage runs; the others, and waiting forwards, keep theirs."""
    kept = [
        max((moment.components.get(Component.ACTIVATIONS.value, 0) for moment in item.timeline), default=0)
        for item in needs
    ]
    states = [_others(needs, own) for own in range(len(needs))]
    alive: Counter[int] = Counter()
    peaks: dict[int, int] = {}
    for own, backward in schedule_order(pipeline, micro_batches, rank):
        alive[own] += not backward
        # What a stage needs contains the activations of the micro-batch that runs.
        waiting = sum(kept[stage] * count for stage, count in alive.items()) - kept[own]
        peaks[own] = max(peaks.get(own, 0), waiting)
        alive[own] -= backward
    components = max(
        (
            _inside(needs[own]) + states[own] + Counter({Component.ACTIVATIONS: size})
            for own, size in peaks.items()
        ),
        key=Counter.total,
    )
    seconds = None
    if all(item.step_seconds is not None for item in needs):
        busy = (sum(item.seconds.get(n, 0.0) for n in ("optimizer", "offload")) for item in needs)
        seconds = (sum(item.step_seconds or 0.0 for item in needs) - sum(busy)) / micro_batches
    held = in_flight(pipeline, micro_batches, rank)
    return _Rank(tuple(parts), tuple(needs), held, dict(components), seconds)


def _others(needs: Sequence[Candidate], own: int) -> Counter[Component]:
    """Return what the other virtual stages of a rank keep while stage ``own`` runs."""
    kept: Counter[Component] = Counter()
    for place, item in enumerate(needs):
        if place != own:
            resharded = item.settings.reshard_after_forward is True
            kept += Counter({n: s for n, s in _inside(item).items() if _lasting(n, resharded=resharded)})
    return kept


def _inside(candidate: Candidate) -> Counter[Component]:
    """Return what the allocator holds at the peak, by component."""
    return Counter({i.name: i.bytes or 0 for i in candidate.components if i.name not in _OUTSIDE})


def _lasting(name: Component, *, resharded: bool) -> bool:
    """Whether a virtual stage keeps it while another one of the same rank runs.

    Parameters that are not resharded after forward stay gathered until backward, which other virtual stages
    begin before.
    """
    if name in (Component.UNSHARDED, Component.RESHARDED):
        return not resharded
    return name.group is ColourGroup.STATES or name is Component.UNSHARDED_GRADIENTS


def _transfer(pipeline: Pipeline, micro_batches: int, sent: int, cluster: Cluster, machine: Machine) -> float:
    """Return seconds per step that the slowest rank waits for hidden states and their gradients."""
    if cluster.gpu is None or pipeline.ranks == 1:
        return 0.0
    # The slowest boundary paces the pipeline: between nodes, if there are several.
    link = cluster.gpu.link_bandwidth * machine.link_efficiency, machine.link_latency
    far = network_bandwidth(cluster) * machine.network_efficiency, machine.network_latency
    bandwidth, latency = far if cluster.nodes > 1 else link
    return 2 * (micro_batches * pipeline.virtual + pipeline.ranks - 1) * (sent / bandwidth + latency)


def _time(
    ranks: Sequence[_Rank],
    point: SearchPoint,
    transfer: float,
    bubble: float,
    small: Cluster,
    cluster: Cluster,
    machine: Machine,
    estimator: Estimator,
) -> tuple[Timing | None, dict[str, float]]:
    """Return the step's time and its parts: the slowest rank's work, the bubble, and the transfers."""
    if any(rank.seconds is None for rank in ranks):
        return None, {}
    slowest = max(ranks, key=lambda rank: rank.seconds or 0.0)
    ideal = (slowest.seconds or 0.0) * point.accumulation
    idle = bubble * ideal
    seconds = ideal + idle + transfer + max(rank.update() for rank in ranks)
    # Each stage was delayed by the nodes of its own; all nodes of the run wait for each other.
    delay, alone = (1 + machine.node_slowdown * math.log2(item.nodes) for item in (cluster, small))
    names = sorted({name for item in slowest.needs for name in item.seconds})
    parts = {name: sum(item.seconds.get(name, 0.0) for item in slowest.needs) for name in names}
    parts["contention"] = parts.get("contention", 0.0) + seconds * (delay / alone - 1)
    seconds *= delay / alone
    step = StepTime(seconds=seconds, **parts)
    samples = point.global_batch / seconds
    length = estimator.run.recipe.batch.sequence_length
    timing = Timing(step, samples * length if length is not None else None, samples)
    return timing, {**step.parts(), "pipeline_bubble": idle, "pipeline_transfers": transfer}


def _describe(rank: _Rank) -> PipelineStage:
    return PipelineStage(
        blocks=tuple((part.first, part.last) for part in rank.parts),
        parameters=rank.components.get(Component.PARAMETERS, 0),
        allocated_bytes=rank.allocated,
        activation_bytes=rank.components.get(Component.ACTIVATIONS, 0),
        in_flight=rank.in_flight,
        micro_batch_seconds=rank.seconds,
    )


def bubble_fraction(pipeline: Pipeline, micro_batches: int) -> float:
    """Return the idle time of a step divided by its ideal time (arXiv:2104.04473, section 2.2)."""
    return (pipeline.ranks - 1) / (pipeline.virtual * micro_batches)


def in_flight(pipeline: Pipeline, micro_batches: int, rank: int) -> int:
    """Return the most forwards of a virtual stage whose activations pipeline rank ``rank`` holds at once.

    torch 2.13 (``distributed/pipelining/schedules.py``): 1F1B begins with min(m, p - rank) forwards;
    interleaved 1F1B with (v - 1) p + 2 (p - 1 - rank) (``_get_warmup_ops``), and runs one more forward before
    the first backward.
    """
    stages = pipeline.ranks - rank
    if pipeline.schedule == "1f1b":
        return min(micro_batches, stages)
    warmup = (pipeline.virtual - 1) * pipeline.ranks + 2 * (stages - 1)
    return min(micro_batches * pipeline.virtual, warmup + 1)


def schedule_order(pipeline: Pipeline, micro_batches: int, rank: int) -> Iterator[tuple[int, bool]]:
    """Yield what pipeline rank ``rank`` runs: which of its virtual stages, and whether backward.

    torch 2.13 (``distributed/pipelining/schedules.py``): forwards, then forwards and backwards by turns, then
    the remaining backwards. Interleaved 1F1B changes the virtual stage after every p micro-batches; backwards
    begin with the last one (``ScheduleInterleaved1F1B._calculate_single_rank_operations``).
    """
    warmup = in_flight(pipeline, micro_batches, rank) - 1
    total = micro_batches * pipeline.virtual
    for step in range(total + warmup):
        if step < total:
            yield step // pipeline.ranks % pipeline.virtual, False
        if step >= warmup:
            yield pipeline.virtual - 1 - (step - warmup) // pipeline.ranks % pipeline.virtual, True
