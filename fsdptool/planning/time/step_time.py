"""Step time: seconds of compute per FSDP unit, units as stages of the schedule, and the throughput.

Compute is a roofline over the operators of the trace's segments (``operator_time.py``).
Segments of module paths are summed, then units collect the paths they contain; blocks that were not traced
take the times of the block they repeat.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdptool.memory.simulation.collective_bytes import WIDTH, stored_dtype
from fsdptool.memory.simulation.groups import Rank, UnitShare
from fsdptool.memory.simulation.off_step import trained_shards
from fsdptool.memory.simulation.program import traced_path
from fsdptool.modeling.optimizer_costs import optimizer_spec
from fsdptool.modeling.optimizer_costs.tensors import TrainedTensor
from fsdptool.planning.time.fused_kernels import KernelShares
from fsdptool.planning.time.operator_time import (
    Float8Scaling,
    cast_traffic,
    float8_seconds,
    memory_rate,
    operation_seconds,
    segment_seconds,
)
from fsdptool.planning.time.overlap import Run, Stage, StepTime, time_step
from fsdptool.records.cluster import Cluster, Gpu, Machine
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import UnitPlan
from fsdptool.records.trace import KINDS, Repeat, Segment, Trace


@dataclass(frozen=True, slots=True)
class ModuleSeconds:
    """One module's own work in one micro-batch.

    Attributes:
        forward, backward: Seconds, recomputation included.
        launching: Those of them in which the GPU waits for the host to launch kernels.
    """

    forward: float = 0.0
    backward: float = 0.0
    launching: float = 0.0

    def __add__(self, other: ModuleSeconds) -> ModuleSeconds:
        return ModuleSeconds(
            self.forward + other.forward, self.backward + other.backward, self.launching + other.launching
        )

    def times(self, count: int) -> ModuleSeconds:
        """Return the work of ``count`` such modules."""
        return ModuleSeconds(self.forward * count, self.backward * count, self.launching * count)


def product_seconds(
    trace: Trace,
    gpu: Gpu,
    machine: Machine,
    *,
    wide: Collection[str] | None = None,
    scaling: Float8Scaling = "tensor",
) -> list[float]:
    """Return the time of every product and attention kernel of a micro-batch.

    Args:
        trace: The micro-batch.
        gpu, machine: The hardware.
        wide: Traced modules whose products stay in 16 bits where those of blocks run in float8; None: no
            product runs in float8.
        scaling: What shares a scale in those that do.
    """
    seconds = [operation_seconds(operation, gpu, machine) for operation in trace.operations]
    if wide is None:
        return seconds
    narrow = {
        n for owner, s in owners_of(trace) if _in_block(owner) and owner not in wide for n in s.operations
    }
    for number in narrow:
        seconds[number] = float8_seconds(trace.operations[number], gpu, machine, scaling)
    return seconds


def stacked_modules(units: UnitPlan, trace: Trace) -> frozenset[str]:
    """Return the traced modules that multiply by stacked matrices, such as experts, and what calls them.

    torchao converts ``nn.Linear`` alone.
    """
    parameters = (p for unit in units.units for p in unit.parameters)
    paths = {p.fqn.rpartition(".")[0] for p in parameters if len(p.shape) > 2}
    paths |= {path.rpartition(".")[0] for path in paths}
    return frozenset(traced_path(path, trace.repeats) for path in paths)


_EAGER = KernelShares()


def module_costs(
    trace: Trace,
    gpu: Gpu,
    machine: Machine,
    *,
    compiled: bool = False,
    products: Sequence[float] | None = None,
    fused: Mapping[str, KernelShares] | None = None,
) -> dict[str, ModuleSeconds]:
    """Return every traced module's own work; key ``""`` is the root's and the loss's.

    A module takes as long as the device needs for it, or the host to launch it.

    Args:
        trace: The micro-batch.
        gpu, machine: The hardware.
        compiled: Whether blocks are compiled, one by one, which leaves ``machine.compiled_traffic`` of their
            elementwise traffic and as much of their launches.
        fused: What fused kernels leave of those of traced modules; None: no module has any.
        products: What :func:`product_seconds` returned; None: no product runs in float8.
    """
    device: dict[str, ModuleSeconds] = {}
    host: dict[str, ModuleSeconds] = {}
    backward = False
    operations = trace.operations
    seconds = products if products is not None else product_seconds(trace, gpu, machine)
    for owner, segment in owners_of(trace):
        if segment.marker == "backward":
            backward = True
        if not segment.kernels:
            continue
        shares = fused.get(owner, _EAGER) if fused else _EAGER
        if compiled and _in_block(owner):
            shares = shares.narrowed(machine.compiled_traffic)
        running, launching = segment_seconds(
            segment,
            operations,
            seconds,
            gpu,
            machine,
            traffic=shares.traffic[backward],
            launches=shares.launches[backward],
        )
        for sums, value in ((device, running), (host, launching)):
            cost = ModuleSeconds(0.0, value) if backward else ModuleSeconds(value)
            sums[owner] = sums.get(owner, ModuleSeconds()) + cost
    found = {}
    for path, busy in device.items():
        longest = ModuleSeconds(
            max(busy.forward, host[path].forward), max(busy.backward, host[path].backward)
        )
        waits = longest.forward - busy.forward + longest.backward - busy.backward
        found[path] = replace(longest, launching=waits)
    return found


def _in_block(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


def exchanged_bytes(trace: Trace) -> dict[str, int]:
    """Return the bytes that every traced module gathers in forward from the ranks that share its sequence.

    A collective's output is the one thing in a forward that ``new_empty`` allocates
    (``families.objectives.context``).
    """
    exchanged: dict[str, int] = {}
    for owner, segment in owners_of(trace):
        if segment.marker == "backward":
            break
        allocated = [event - 1 for event in segment.events if event > 0]
        size = sum(trace.sizes[n] for n in allocated if trace.vocabulary[trace.names[n]] == "new_empty")
        if size:
            exchanged[owner] = exchanged.get(owner, 0) + size
    return exchanged


def hosted_bytes(trace: Trace) -> dict[str, int]:
    """Return the bytes that are copied to the host while every traced module runs forward."""
    hosted: dict[str, int] = {}
    kind = KINDS.index("offloaded")
    for owner, segment in owners_of(trace):
        size = sum(
            trace.sizes[event - 1] for event in segment.events if event > 0 and trace.kinds[event - 1] == kind
        )
        if size:
            hosted[owner] = hosted.get(owner, 0) + size
    return hosted


def copies_of(path: str, repeats: Sequence[Repeat], within: str = "") -> int:
    """Return how many modules of the real model a traced one stands for, in one module ``within``."""
    count = 1
    for repeat in repeats:
        prefix = f"{repeat.path}." if repeat.path else ""
        if within.startswith(prefix):
            # Its parent is itself in one block of this list: each copy of the parent has its own.
            continue
        number = path[len(prefix) :].partition(".")[0] if path.startswith(prefix) else ""
        if not number.isdigit():
            continue
        if repeat.cut - repeat.period <= int(number) < repeat.cut:
            count *= 1 + repeat.copies
        rest = path.removeprefix(f"{prefix}{number}")
        path = f"{prefix}{repeat.real_index(int(number))}{rest}"
    return count


def owners_of(trace: Trace) -> Iterator[tuple[str, Segment]]:
    """Yield every segment with the module whose code runs in it."""
    owner = ""
    for segment in trace.segments:
        owner = _owner(segment, owner)
        yield owner, segment


def _owner(segment: Segment, current: str) -> str:
    """Return the module whose code runs after a module boundary: the module itself, or who called it."""
    if segment.marker in ("enter", "grad_enter"):
        return segment.path
    if segment.marker in ("leave", "grad_leave"):
        return segment.path.rpartition(".")[0]
    return "" if segment.marker in ("start", "loss", "backward", "end") else current


def unit_costs(
    costs: Mapping[str, ModuleSeconds], repeats: Sequence[Repeat], units: UnitPlan
) -> list[ModuleSeconds]:
    """Return the seconds of each unit, in the plan's order: what its modules do, nested units apart.

    Args:
        costs: What :func:`module_costs` returned.
        repeats: The trace's shortened lists.
        units: The units of the real model.
    """
    modules = _modules_of_units(costs, repeats, units)
    return [sum((costs[path].times(copies) for path, copies in own), ModuleSeconds()) for own in modules]


def unit_bytes(sizes: Mapping[str, int], repeats: Sequence[Repeat], units: UnitPlan) -> list[int]:
    """Return the bytes of each unit, in the plan's order; arguments as :func:`unit_costs`."""
    modules = _modules_of_units(sizes, repeats, units)
    return [sum(sizes[path] * copies for path, copies in own) for own in modules]


def _modules_of_units(
    traced_modules: Iterable[str], repeats: Sequence[Repeat], units: UnitPlan
) -> list[list[tuple[str, int]]]:
    """Return the traced modules of each unit, each with how many modules of the real model it stands for."""
    traced = [tuple(traced_path(path, repeats) for path in unit.modules) for unit in units.units]
    owners: dict[str, int] = {}
    for index, paths in enumerate(traced):
        for path in paths:
            owners.setdefault(path, index)
    owned: dict[int, list[tuple[str, int]]] = {}
    for path in traced_modules:
        holder = _holder(path, owners)
        owner = owners.get(holder)
        if owner is not None:
            owned.setdefault(owner, []).append((path, copies_of(path, repeats, within=holder)))
    return [owned.get(owners[paths[0]], []) if paths else [] for paths in traced]


def _holder(path: str, owners: Mapping[str, int]) -> str:
    while path and path not in owners:
        path = path.rpartition(".")[0]
    return path


_ORDER = {"root": 0, "shared": 1, "embedding": 2, "block": 3, "experts": 3, "tail": 4}
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
        trained_bytes: Bytes of these elements as the rank stores them.
        tensors: Parameters with a gradient that are sharded, as this rank stores them.
        offloaded: Bytes of shards copied to the device for forward and backward, and of gradients back.
        prefetch: FSDP units to prefetch.
        summed: Bytes of gradients that plain data parallelism sums.
    """

    order: tuple[int, ...]
    stages: tuple[Stage, ...]
    trained: float
    trained_bytes: float
    tensors: tuple[TrainedTensor, ...]
    offloaded: float
    prefetch: int
    summed: float = 0.0


def measure_traffic(rank: Rank) -> Traffic:
    """Return what a rank moves for its units."""
    plan = rank.plan
    order = sorted(range(len(rank.shares)), key=lambda place: _ORDER.get(plan.units[place].kind, 3))
    trained = trained_bytes = 0.0
    for share in rank.shares:
        for weights in share.weights:
            if weights.trainable:
                elements = weights.parameter.numel / share.ranks
                trained += elements
                trained_bytes += elements * weights.stored
    summed = 0.0
    for parameter in plan.ignored:
        if parameter.trainable:
            trained += parameter.numel
            summed += parameter.numel * WIDTH.get(stored_dtype(parameter, plan), 4)
    trained_bytes += summed
    offloaded = 0.0
    if plan.cpu_offload:
        held = sum(
            p.numel * WIDTH.get(p.dtype, 4) / share.ranks
            for share in rank.shares
            for p in share.unit.parameters
        )
        offloaded = 2 * held + 4 * trained
    return Traffic(
        order=tuple(order),
        stages=tuple(_stage(rank.shares[place]) for place in order),
        trained=trained,
        trained_bytes=trained_bytes,
        tensors=trained_shards(rank),
        offloaded=offloaded,
        prefetch=plan.prefetch,
        summed=summed if rank.degree == 1 else 0.0,
    )


def fill(
    traffic: Traffic,
    work: Sequence[ModuleSeconds],
    sharing: int = 1,
    exchanged: Sequence[int] | None = None,
    sums: Sequence[Sequence[ModuleSeconds]] = (),
    hosted: Sequence[int] | None = None,
) -> list[Stage]:
    """Return the stages with their work.

    Args:
        traffic: The collectives.
        work: Compute of each unit, in the plan's order (:func:`unit_costs`).
        sharing: Ranks that share a sequence, and so its work.
        exchanged: Bytes each unit gathers from them in forward.
        sums: Seconds each unit waits for its tensor-parallel and for its expert-parallel group.
        hosted: Bytes of activations each unit copies to the host.
    """
    return [
        replace(
            stage,
            forward=work[place].forward / sharing,
            backward=work[place].backward / sharing,
            launching=work[place].launching / sharing,
            exchanged=exchanged[place] if exchanged is not None else 0,
            summed_forward=sum((waits[place].forward for waits in sums), 0.0),
            summed_backward=sum((waits[place].backward for waits in sums), 0.0),
            hosted_bytes=hosted[place] if hosted is not None else 0,
        )
        for place, stage in zip(traffic.order, traffic.stages, strict=True)
    ]


def with_copies(stage: Stage, ranks: int, gpu: Gpu, machine: Machine) -> Stage:
    """Return a unit with the copies around its collectives, which run among its compute.

    torch 2.13 (``_fsdp_collectives.py``): every all-gather ends in a copy of the gathered buffer to the
    parameters, every reduction begins with a copy of the gradients to its buffer. What is gathered in float8
    is cast before, from fp32 by three kernels (torchao 0.18, ``_ToFloat8ConstrFunc``), and searched for its
    largest entries before each forward.
    """
    if ranks < 2:
        return stage
    rate = memory_rate(gpu, machine)
    again = 2 * stage.reordered_bytes / rate
    rows = stage.narrowed / ranks
    gathered = (2 * stage.gather_bytes + _CAST_ROWS * rows) / rate + again
    gradients = stage.gather_bytes + stage.narrowed
    reduced = (stage.reduce_bytes + min(stage.reduce_bytes, gradients)) / rate
    reduced += again if stage.reduce_bytes else 0.0
    in_backward = reduced + (gathered if stage.backward_ranks > 1 else 0.0)
    forward = stage.forward + gathered + 4 * rows / rate
    return replace(stage, forward=forward, backward=stage.backward + in_backward)


_CAST_ROWS = 4 + 4 + 4 + 4 + 4 + 1
"""Bytes that casting a row to float8 moves per element: scaled, clamped and cast, each out of place."""


def without_casts(stage: Stage, gpu: Gpu, machine: Machine, sharing: int) -> Stage:
    """Return a unit without the casts of its weights in each product, where it gathers them in float8.

    ``operator_time.float8_seconds`` counts them: forward is one product with a weight,
    and backward two.

    Args:
        stage: With its work.
        gpu, machine: The hardware.
        sharing: Ranks that share a sequence, over which its work was divided.
    """
    if not gpu.native_fp8:
        return stage
    once = cast_traffic(2 * stage.narrowed) / memory_rate(gpu, machine) / sharing
    return replace(stage, forward=stage.forward - once, backward=stage.backward - 2 * once)


def time_candidate(
    traffic: Traffic,
    stages: Sequence[Stage],
    recipe: Recipe,
    mesh: ParallelDims,
    cluster: Cluster,
    machine: Machine,
    *,
    teacher: Sequence[Stage] = (),
    sequences: int = 1,
) -> Timing | None:
    """Return the time of one optimizer step of ``recipe`` (sizes resolved); None without GPUs.

    Args:
        traffic: What the rank moves.
        stages: Its units in forward order, with their work.
        recipe: Accumulation and optimizer.
        mesh: Resolved mesh.
        cluster, machine: The hardware.
        teacher: A distillation teacher's units, which run before every forward.
        sequences: Those of a sample.
    """
    spec = optimizer_spec(recipe.optimizer)
    kernel = spec.kernel(recipe.optimizer.implementation)
    # Gradients and the states of elementwise updates have the dtype of the weights.
    words = traffic.trained_bytes / 4 if spec.elementwise else traffic.trained
    moved = words * spec.update_bytes[kernel]
    if recipe.optimizer.clip_grad_norm is not None:
        moved += words * _CLIPPED_BYTES
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
        optimizer_tensors=len(traffic.tensors),
        summed_bytes=traffic.summed,
    )
    if cluster.gpu is not None:
        gpu = cluster.gpu
        stages, teacher = (
            [with_copies(s, mesh.sharding_ranks(experts=s.experts), gpu, machine) for s in part]
            for part in (stages, teacher)
        )
    step = time_step(stages, run, mesh, cluster, machine, teacher=teacher)
    if step is None or step.seconds <= 0:
        return None
    samples = recipe.batch.micro_batch * recipe.batch.accumulation * mesh.data_ranks
    length = recipe.batch.sequence_length
    return Timing(
        step=step,
        tokens_per_second=samples * sequences * length / step.seconds if length is not None else None,
        samples_per_second=samples / step.seconds,
    )


_CLIPPED_BYTES = 12
"""Bytes that clipping moves per fp32 gradient: its norm reads it, and the scaling, which no small norm skips,
reads and writes it (torch 2.13, ``nn/utils/clip_grad.py``)."""


def model_states(rank: Rank) -> dict[str, int]:
    """Return parameter and gradient bytes of rank 0, which has the largest shards (torch 2.13)."""
    sharded = [(w.shard * w.stored, w.trainable) for share in rank.shares for w in share.weights]
    whole = [(p.numel * WIDTH.get(stored_dtype(p, rank.plan), 4), p.trainable) for p in rank.plan.ignored]
    kept = [*sharded, *whole]
    return {
        "parameters": sum(size for size, _ in kept),
        "gradients": sum(size for size, trained in kept if trained),
    }


def _stage(share: UnitShare) -> Stage:
    reduce = sum(share.reduction.input.sizes)
    return Stage(
        gather_bytes=sum(share.buffers.whole.sizes),
        reduce_bytes=reduce,
        shard_reduce_bytes=reduce / share.ranks,
        backward_ranks=_backward_ranks(share, share.ranks),
        forward=0.0,
        backward=0.0,
        exchanges=2 if share.unit.checkpointed else 1,
        experts=share.unit.kind == "experts",
        reordered_bytes=sum(share.buffers.unordered.sizes) if share.buffers.unordered is not None else 0,
        narrowed=sum(w.whole for w in share.weights if w.narrow and w.dtype == "bfloat16"),
    )


def _backward_ranks(share: UnitShare, ranks: int) -> int:
    if not share.unit.unshard_in_backward or share.reshard is False:
        return 1
    return ranks if share.reshard is True else share.reshard


def _ema(recipe: Recipe) -> int:
    return 12 if recipe.ema.decay is not None else 0
