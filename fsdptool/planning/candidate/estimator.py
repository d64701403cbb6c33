"""Estimate one configuration: memory from the trace, time from the roofline, and whether it fits."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from fsdptool.memory.simulation.collective_bytes import DEVICES, ShardedParameter, stored_dtype
from fsdptool.memory.simulation.groups import Rank
from fsdptool.memory.simulation.off_step import States, least_bytes, rank_states
from fsdptool.memory.simulation.program import traced_path
from fsdptool.memory.simulation.simulate import hold_units, without_gradient
from fsdptool.modeling.compilation import decide_compilation
from fsdptool.modeling.fused_loss import decide_fused_loss
from fsdptool.modeling.objective import objective_for
from fsdptool.planning.candidate.assembly import assemble
from fsdptool.planning.candidate.point import at_point, point_of
from fsdptool.planning.candidate.reserved_peaks import ReservedPeaks
from fsdptool.planning.candidate.stage_cut import VirtualStage, cut_trace, cut_units
from fsdptool.planning.candidate.throughput_range import division_of
from fsdptool.planning.candidate.verdict import check_fit, outside_allocator
from fsdptool.planning.hardware import expands, machine_for, workspaces
from fsdptool.planning.time.expert_time import exchange_seconds, make_all_to_all
from fsdptool.planning.time.fused_kernels import fused_shares
from fsdptool.planning.time.measured_kernels import on_device, timed_device
from fsdptool.planning.time.operator_time import Float8Scaling, peak_flops
from fsdptool.planning.time.overlap import Stage, make_ring
from fsdptool.planning.time.step_time import (
    ModuleSeconds,
    Timing,
    Traffic,
    exchanged_bytes,
    fill,
    hosted_bytes,
    measure_traffic,
    model_states,
    module_costs,
    product_seconds,
    stacked_modules,
    time_candidate,
    unit_bytes,
    unit_costs,
    without_casts,
)
from fsdptool.planning.time.tensor_time import model_flops, summed_seconds
from fsdptool.records.advice import GatheredUnit
from fsdptool.records.anatomy import Anatomy, ModelSpec
from fsdptool.records.cluster import Cluster, DeviceProfile, Gpu, Machine
from fsdptool.records.compilation import Compilation
from fsdptool.records.fused_loss import FusedLoss
from fsdptool.records.plan import BESIDE_TP, Candidate, SearchPoint, TrainingLoop
from fsdptool.records.plan_details import StoredDtypes
from fsdptool.records.resolved_run import ResolvedRun
from fsdptool.records.sharding import UnitPlan
from fsdptool.tensor.sites import experts_of

if TYPE_CHECKING:
    from fsdptool.memory.simulation.simulate import PreparedSimulation
    from fsdptool.modeling.units import DividedModel, Groups, TrainedModel
    from fsdptool.records.trace import Trace


_CONTEXT_PARALLEL = (
    "context parallelism on GPUs is unverified: the attention kernel follows torch's rules, and the memory"
    " that NCCL keeps for the group is not known"
)

_TENSOR_PARALLEL = (
    "tensor parallelism on GPUs is unverified: no collective of the group is assumed to overlap with"
    " computation"
)

_ASSUMED = {
    "compile": "compiled blocks",
    "float8": "linear layers of the blocks in float8",
    "async_tp": "collectives of tensor parallelism that overlap with products as much as they can (async TP)",
    "fused_norm": "norms in one kernel",
    "fused_rope": "rotary embeddings in one kernel",
    "fused_glu": "gated activations in one kernel",
    "fused_lora": "adapters in the products of their layers",
    "float8_rowwise": "float8 scaled by row",
    "mxfp8": "float8 scaled by blocks of 32",
}

_EXPERT_PARALLEL = (
    "expert parallelism on GPUs is unverified: routing is assumed to be balanced, and no all-to-all is"
    " assumed to overlap with computation"
)


def predict(
    spec: ModelSpec,
    anatomy: Anatomy,
    run: ResolvedRun,
    *,
    cluster: Cluster | None = None,
    profile: DeviceProfile = "cuda",
    machine: Machine | None = None,
) -> Candidate:
    """Return the memory of every rank and the time of a step when fsdptool trains exactly this configuration.

    Args:
        spec, anatomy: The model.
        run: How it is trained.
        cluster: What it is trained on; None: CPU processes, as many as the run has ranks.
        profile: Device profile.
        machine: Overheads and efficiencies; None takes the shipped table's.

    Raises:
        PlanError: The inputs contradict each other; the message names the pair.
    """
    point = point_of(run)
    cluster = cluster if cluster is not None else Cluster(None, point.ranks)
    estimator = Estimator(spec, anatomy, run, profile=profile)
    return estimator.candidate("requested", point, cluster, machine or machine_for(cluster.gpu))


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank stores and moves under one sharding; a distillation's teacher moves bytes, too."""

    memory: PreparedSimulation
    traffic: Traffic
    teacher_traffic: Traffic | None


@dataclass(slots=True)
class Estimator:
    """Evaluates many configurations of one model and keeps what they share.

    Args:
        spec, anatomy: The model.
        run: What no search point changes, and whose loop trains it.
        profile: Device profile whose memory is predicted.
        worst_routing: Whether the tokens of a whole expert-parallel group come to one rank.
    """

    spec: ModelSpec
    anatomy: Anatomy
    run: ResolvedRun
    profile: DeviceProfile = "cuda"
    worst_routing: bool = False
    _traces: dict[str, Trace] = field(default_factory=dict)
    _costs: dict[Any, list[ModuleSeconds]] = field(default_factory=dict)
    _flops: dict[int, float] = field(default_factory=dict)
    _divisions: dict[Groups, DividedModel] = field(default_factory=dict)
    _units: dict[Any, UnitPlan] = field(default_factory=dict)
    _held: dict[Any, Rank] = field(default_factory=dict)
    _ranks: dict[Any, RankState] = field(default_factory=dict)
    _states: dict[Any, States] = field(default_factory=dict)
    _idle: dict[str, frozenset[str]] = field(default_factory=dict)
    _decisions: dict[Any, Any] = field(default_factory=dict)
    _stage: VirtualStage | None = None
    _reserved: ReservedPeaks = field(init=False)
    _mixture: bool = field(init=False)
    _teacher: Anatomy | None = None
    _trained: TrainedModel | None = None
    notes: dict[str, None] = field(default_factory=dict)
    unknowns: dict[str, None] = field(default_factory=dict)
    confidence: Literal["verified", "unverified"] = "verified"

    def __post_init__(self) -> None:
        """Open the cache of reserved peaks, and look for experts."""
        self._reserved = ReservedPeaks(self.anatomy, self._stage)
        self._mixture = experts_of(self.anatomy.parameters) is not None

    def candidate(
        self,
        id: str,
        point: SearchPoint,
        cluster: Cluster,
        machine: Machine,
        *,
        detail: bool = True,
        replay: bool | None = None,
    ) -> Candidate:
        """Return one configuration with its memory, its time and its verdict.

        Args:
            id: What the candidate is called.
            point: The configuration.
            cluster, machine: The hardware.
            detail: Keep the timeline (long; searches keep it for few).
            replay: Replay the caching allocator for the reserved peak (about a second) instead of
                taking the machine's ratio; None: with the detail.
        """
        run, compilation, fused_loss = self._at(point, cluster)
        key, trace = self._trace(run)
        rank = self._rank(point, run)
        expandable = expands(cluster, run.loop)
        footprint = self._reserved.foresee(
            trace,
            rank.memory,
            run,
            traced=(key, self.worst_routing),
            timeline=detail,
            reserved=self.profile == "cuda" and (detail if replay is None else replay),
            expandable=expandable,
            workspaces=workspaces(cluster),
        )
        self.unknowns |= dict.fromkeys(footprint.unknowns)
        if footprint.confidence != "verified":
            self.confidence = "unverified"
        verdict = check_fit(footprint, point, cluster, machine)
        timing = None
        worked = trace
        device = timed_device(cluster, machine)
        if device is not None:
            # Ranks share the work of the whole sequence, whose attention grows with its square.
            if point.cp > 1:
                self.notes[_CONTEXT_PARALLEL] = None
                # Its group of experts may span ranks that share a sequence.
                key, worked = self._trace(replace(run, mesh=replace(run.mesh, cp=1)))
            if worked.known and trace.known:
                if point.tp > 1 and "async_tp" not in run.loop.assumed:
                    self.notes[_TENSOR_PARALLEL] = None
                if run.loop.assumed:
                    self.notes[_assumed_note(run.loop)] = None
                if point.ep > 1:
                    self.notes[_EXPERT_PARALLEL] = None
                work = (key, worked)
                timed = on_device(cluster, device)
                timing = self._time(point, rank, trace, work, run, timed, device, machine)
        float8 = run.settings.mixed_precision == "fp8" or "float8" in run.loop.assumed
        division = division_of(point, float8=float8, mixture=self._mixture)
        candidate = assemble(
            id, point, cluster, footprint, verdict, timing, machine, expandable=expandable, division=division
        )
        candidate = replace(candidate, compilation=compilation, fused_loss=fused_loss)
        if not worked.known or (point.cp > 1 and worked is trace):
            return candidate
        flops = self._work(worked, rank) * (point.accumulation * point.data_parallel)
        if cluster.gpu is None:
            return replace(candidate, step_flops=flops)
        peak = peak_flops(cluster.gpu, worked.compute_dtype)
        mfu = None
        if timing is not None and flops:
            mfu = flops / (cluster.world_size * timing.step.seconds * peak)
        return replace(candidate, step_flops=flops, peak_flops=peak, mfu=mfu)

    def _time(
        self,
        point: SearchPoint,
        rank: RankState,
        trace: Trace,
        work: tuple[str, Trace],
        run: ResolvedRun,
        cluster: Cluster,
        gpu: Gpu,
        machine: Machine,
    ) -> Timing | None:
        """Return the step's time: ``work`` is a whole sequence's trace and its key, ``trace`` one rank's."""
        work_key, worked = work
        group = make_ring(cluster, machine, ranks=point.tp)
        exchange = make_all_to_all(cluster, machine, ranks=point.ep)

        assumed = run.loop.assumed
        compiled = run.recipe.sharding.compile or "compile" in assumed
        float8 = compiled and (run.settings.mixed_precision == "fp8" or "float8" in assumed)

        scaling: Float8Scaling = (
            "row" if "float8_rowwise" in assumed else "block" if "mxfp8" in assumed else "tensor"
        )
        fused = fused_shares(self._as_trained().anatomy, assumed)

        def stages(traffic: Traffic, plan: UnitPlan, part: Trace, whole: Trace, name: str) -> list[Stage]:
            # One table row may serve several GPUs, and one GPU several rows.
            grouping = (point.layout, point.wrap_policy, point.wrap_classes, point.dp_shard > 1)
            divided = (point.tp, point.ep, point.sequence_parallel)
            key = (name, *grouping, *divided, work_key, gpu.name, machine.name)
            wide = stacked_modules(plan, whole) if float8 else None
            if key not in self._costs:
                products = product_seconds(whole, gpu, machine, wide=wide, scaling=scaling)
                own = {traced_path(path, whole.repeats): share for path, share in fused.items()}
                costs = module_costs(whole, gpu, machine, compiled=compiled, products=products, fused=own)
                self._costs[key] = unit_costs(costs, whole.repeats, plan)
            shared = None
            if point.cp > 1:
                shared = unit_bytes(exchanged_bytes(part), part.repeats, plan)
            sums: list[Sequence[ModuleSeconds]] = []
            if point.tp > 1:
                hiding = (
                    product_seconds(part, gpu, machine, wide=wide, scaling=scaling)
                    if "async_tp" in assumed
                    else None
                )
                sums.append(unit_costs(summed_seconds(part, group, hiding), part.repeats, plan))
            if point.ep > 1:
                waits = ("all-to-alls", point.cluster, point.cp, *key)
                if waits not in self._costs:
                    seconds = exchange_seconds(part, plan, exchange)
                    self._costs[waits] = unit_costs(seconds, part.repeats, plan)
                sums.append(self._costs[waits])
            hosted = unit_bytes(hosted_bytes(part), part.repeats, plan)
            filled = fill(traffic, self._costs[key], point.cp, shared, sums, hosted)
            return [without_casts(stage, gpu, machine, point.cp) for stage in filled] if float8 else filled

        student = stages(rank.traffic, rank.memory.rank.plan, trace, worked, "student")
        teacher: list[Stage] = []
        if rank.teacher_traffic is not None and rank.memory.teacher is not None:
            part, whole = trace.teacher, worked.teacher
            if part is None or whole is None or not (part.known and whole.known):
                return None
            teacher = stages(rank.teacher_traffic, rank.memory.teacher.plan, part, whole, "teacher")
        sequences = objective_for(run.recipe, self.spec).sequences
        return time_candidate(
            rank.traffic,
            student,
            run.recipe,
            run.mesh,
            cluster,
            machine,
            teacher=teacher,
            sequences=sequences,
        )

    def _work(self, trace: Trace, rank: RankState) -> float:
        if id(trace) not in self._flops:
            teacher = rank.memory.teacher
            plans = rank.memory.rank.plan, teacher.plan if teacher is not None else None
            self._flops[id(trace)] = model_flops(trace, *plans)
        return self._flops[id(trace)]

    def trace_of(self, point: SearchPoint, cluster: Cluster) -> Trace:
        """Return what one micro-batch does at a point."""
        return self._trace(self._at(point, cluster)[0])[1]

    def of_stage(self, stage: VirtualStage, trace: Trace) -> Estimator:
        """Return what evaluates a virtual stage as if it were a model of its own.

        Args:
            stage: A part of the model.
            trace: The whole model's, at any point.
        """
        return replace(
            self,
            _traces={key: cut_trace(item, stage) for key, item in self._traces.items()},
            _units={key: cut_units(item, trace, stage) for key, item in self._units.items()},
            _costs={},
            _flops={},
            _held={},
            _ranks={},
            _states={},
            _idle={},
            _stage=stage,
        )

    def units_of(self, point: SearchPoint, cluster: Cluster) -> UnitPlan:
        """Return the units at a point."""
        return self._plan_units(self._at(point, cluster)[0])

    def states(self, point: SearchPoint, cluster: Cluster) -> dict[str, int]:
        """Return the bytes one rank keeps for the model by kind: what the rule-of-thumb tables give.

        Gradients are those of a whole step; at the peak fewer may be alive.
        """
        return model_states(self.rank_of(point, cluster))

    def rank_of(self, point: SearchPoint, cluster: Cluster) -> Rank:
        """Return what rank 0 holds at a point."""
        return self._rank(point, self._at(point, cluster)[0]).memory.rank

    def largest_unit(self, point: SearchPoint, cluster: Cluster) -> GatheredUnit | None:
        """Return the unit that takes the most bytes when it is gathered; None where FSDP manages nothing."""

        def size(weights: ShardedParameter) -> int:
            return weights.whole * weights.gathered

        share = max(self.rank_of(point, cluster).shares, key=lambda share: sum(map(size, share.weights)))
        largest = max(share.weights, key=size, default=None)
        if largest is None:
            return None
        return GatheredUnit(
            id=share.unit.id,
            class_name=share.unit.class_name,
            bytes=sum(map(size, share.weights)),
            padding_bytes=sum((w.whole - w.parameter.numel) * w.gathered for w in share.weights),
            parameter=largest.parameter.fqn,
            parameter_bytes=size(largest),
        )

    def stored_dtypes(self, point: SearchPoint, cluster: Cluster) -> StoredDtypes:
        """Return the dtypes that the shards of trained and of frozen parameters are kept in."""
        plan = self.rank_of(point, cluster).plan
        elements: dict[str, Counter[str]] = {"trained": Counter(), "frozen": Counter()}
        for parameter in (*(p for unit in plan.units for p in unit.parameters), *plan.ignored):
            kind = "trained" if parameter.trainable else "frozen"
            elements[kind][stored_dtype(parameter, plan)] += parameter.numel
        return StoredDtypes(
            **{kind: tuple(name for name, _ in count.most_common()) for kind, count in elements.items()},
            compute=(plan.param_dtype,) if plan.param_dtype else (),
        )

    def _at(self, point: SearchPoint, cluster: Cluster) -> tuple[ResolvedRun, Compilation, FusedLoss]:
        """Return the run at a point, and two decisions in it: whether blocks are compiled, and whether the
        head computes the loss."""
        run = at_point(self.run, point, cluster)
        sharding, mesh, on_cpu = run.sharding, run.mesh, run.settings.use_cpu
        # What both read of a point: each takes milliseconds of a large model.
        wrapping = (
            sharding.wrap_policy,
            sharding.wrap_classes,
            sharding.ignored_modules,
            sharding.recomputes,
        )
        compiling = ("compiled", *wrapping, mesh.tp > 1, mesh.cp > 1, on_cpu)
        fusing = ("fused", run.recipe.batch, sharding.compute_dtype, mesh.tp > 1, mesh.cp, on_cpu)
        if compiling not in self._decisions:
            self._decisions[compiling] = decide_compilation(self.anatomy, run)[1]
        compilation: Compilation = self._decisions[compiling]
        if fusing not in self._decisions:
            self._decisions[fusing] = decide_fused_loss(self._as_trained(), run)[1]
        fused_loss: FusedLoss = self._decisions[fusing]
        recipe = replace(
            run.recipe,
            sharding=replace(run.recipe.sharding, compile=compilation.compiled),
            objective=replace(run.recipe.objective, fused=fused_loss.fused),
        )
        return replace(run, recipe=recipe), compilation, fused_loss

    def _trace(self, run: ResolvedRun) -> tuple[str, Trace]:
        """Return the trace of a configuration, and what it depends on as text."""
        from fsdptool.memory.tracing.tracer import trace

        key = _key(run)
        if key not in self._traces:
            self._traces[key] = trace(
                self.spec,
                run,
                trained=self._as_trained(),
                teacher=self._teacher_anatomy(),
                worst_routing=self.worst_routing,
            )
        return key, self._traces[key]

    def notes_at(self, point: SearchPoint, cluster: Cluster) -> tuple[str, ...]:
        """Return the notes of a configuration: those of the whole plan, and those of its own trace.

        Where it has no trace of its own (stages of a pipeline), the notes of every trace count.
        """
        own = self._traces.get(_key(self._at(point, cluster)[0]))
        traces = self._traces.values() if own is None else (own,)
        return tuple(dict.fromkeys((*self.notes, *(note for trace in traces for note in trace.notes))))

    def least_bytes(self, point: SearchPoint, cluster: Cluster, machine: Machine) -> int | None:
        """Return the bytes that the driver reports at least at a point; None before anything was traced.

        Nothing is traced: which parameters have a gradient is the same at every point.
        """
        if not any(trace.known for trace in self._traces.values()):
            return None
        run = self._at(point, cluster)[0]
        key = next(key for key, trace in self._traces.items() if trace.known)
        units = self._grouped_units(point, run)
        idle = self._without_gradient(units, key)
        rank = self._hold(point, run, units)
        states = self._states_of(point, run, units, idle)
        return least_bytes(rank, states, idle) + sum(outside_allocator(point, cluster, machine))

    def _rank(self, point: SearchPoint, run: ResolvedRun) -> RankState:
        """Return what a rank stores and moves: once for all points that differ in their batch only."""
        from fsdptool.memory import prepared

        key = (*_grouping(point), run.mesh.shard_degree, point.optimizer_implementation)
        if key not in self._ranks:
            units = self._grouped_units(point, run)
            traced, trace = self._trace(run)
            states = None
            if trace.known and self._stage is None:
                states = self._states_of(point, run, units, self._without_gradient(units, traced))
            memory = prepared(
                units,
                run.mesh,
                run.recipe,
                profile=self.profile,
                teacher=self._teacher_units(run),
                trace=trace,
                states=states,
            )
            teacher = measure_traffic(memory.teacher) if memory.teacher is not None else None
            self._ranks[key] = RankState(memory, measure_traffic(memory.rank), teacher)
        return self._ranks[key]

    def _states_of(
        self, point: SearchPoint, run: ResolvedRun, units: UnitPlan, idle: frozenset[str]
    ) -> States:
        """Return what a rank keeps between steps: once for all points that shard alike."""
        layout = (point.layout, point.wrap_policy, point.wrap_classes, point.cpu_offload, point.reduce_dtype)
        divided = (point.tp, point.ep, point.sequence_parallel, run.mesh.shard_degree)
        key = (*layout, *divided, point.optimizer_implementation, idle)
        if key not in self._states:
            rank = self._hold(point, run, units)
            cuda = rank.device.host_apart
            self._states[key] = rank_states(rank, run.recipe, cuda=cuda, without_gradient=idle)
        return self._states[key]

    def _hold(self, point: SearchPoint, run: ResolvedRun, units: UnitPlan) -> Rank:
        """Return what a rank holds of a point's units: once for points that differ in their batch only."""
        key = (*_grouping(point), run.mesh.shard_degree)
        if key not in self._held:
            self._held[key] = hold_units(units, run.mesh, DEVICES[self.profile])
        return self._held[key]

    def _without_gradient(self, units: UnitPlan, key: str) -> frozenset[str]:
        """Return the trainable parameters that no gradient reaches, by the trace of a key."""
        if key not in self._idle:
            self._idle[key] = without_gradient(units, self._traces[key])
        return self._idle[key]

    def _grouped_units(self, point: SearchPoint, run: ResolvedRun) -> UnitPlan:
        grouped = _grouping(point)
        if grouped not in self._units:
            self._units[grouped] = self._plan_units(run)
        return self._units[grouped]

    def _plan_units(self, run: ResolvedRun) -> UnitPlan:
        from fsdptool.modeling.units import plan_units

        return plan_units(self._as_trained(), run, divisions=self._divisions)

    def _as_trained(self) -> TrainedModel:
        """Return the model as it will be trained."""
        from fsdptool.modeling.units import as_trained

        if self._trained is None:
            self._trained = as_trained(self.anatomy, self.run.recipe)
        return self._trained

    def _teacher_units(self, run: ResolvedRun) -> UnitPlan | None:
        """Return the units of a distillation's teacher, or None."""
        from fsdptool.modeling.units import plan_teacher

        teacher = self._teacher_anatomy()
        return plan_teacher(teacher, run) if teacher is not None else None

    def _teacher_anatomy(self) -> Anatomy | None:
        """Return a distillation's teacher, which is inspected once, or None."""
        from fsdptool.modeling.methods import method_of

        choice = method_of(self.run.recipe).teacher_choice(self.run.recipe)
        if choice is not None and self._teacher is None:
            from fsdptool.inspection import inspect
            from fsdptool.source import resolve_choice

            # Of the catalogue's models the plan warns about the trained one alone.
            same = choice.reference == self.run.recipe.model.reference
            self._teacher = inspect(resolve_choice(choice, catalogue=same))
        return self._teacher


def _grouping(point: SearchPoint) -> tuple[Any, ...]:
    """Return what the units of a point depend on."""
    return (
        point.layout,
        point.wrap_policy,
        point.wrap_classes,
        point.dp_shard > 1,  # a run whose ranks hold copies ignores every module
        point.tp,
        point.ep,
        point.sequence_parallel,
        point.checkpointing,
        point.reshard_after_forward,
        type(point.reshard_after_forward),
        point.cpu_offload,
        point.prefetch,
        point.reduce_dtype,
    )


def _assumed_note(loop: TrainingLoop) -> str:
    """Return what a plan says of a loop that does more than fsdptool's own."""
    names = [_ASSUMED[name] for name in loop.assumed]
    listed = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    beside = " beside tensor parallelism" if set(loop.assumed) <= set(BESIDE_TP) else ""
    return (
        f"planned only: the step time assumes {listed}, which fsdptool train does not do{beside}; memory is"
        " that of eager blocks"
    )


def _key(run: ResolvedRun) -> str:
    """Return what the trace of a run depends on, as text."""
    from fsdptool.memory.tracing.tracer import traced_configuration

    return json.dumps(traced_configuration(run), sort_keys=True)
