"""From units and a trace to the stages the schedule plays, and to throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from fsdptool.memory.sizes import WIDTH, weigh
from fsdptool.planning.compute import Cost, exchanged_bytes, peak_flops, unit_costs
from fsdptool.planning.machine import Machine
from fsdptool.planning.schedule import Run, Stage, StepTime, time_step
from fsdptool.records.anatomy import Parameter
from fsdptool.records.cluster import Cluster
from fsdptool.records.recipe import Optimizer, Recipe
from fsdptool.records.settings import Mesh
from fsdptool.records.trace import Trace
from fsdptool.records.units import Unit, UnitPlan

_ORDER = {"root": 0, "shared": 1, "embedding": 2, "block": 3, "tail": 4}
"""Forward order by kind: the root gathers first, the tail computes last."""

_UPDATE_BYTES = {
    # Per trained parameter: reads of gradient, weight and states, writes of weight and states.
    ("adamw", "fused"): 28,
    ("adamw", "foreach"): 84,
    ("adamw", "for_loop"): 84,
    ("adamw8bit", "fused"): 16,
    ("adafactor", "fused"): 20,
    ("sgd", "fused"): 12,
    ("sgd", "foreach"): 20,
    ("sgd", "for_loop"): 20,
}
_PASSES = {"adamw": 12, "adamw8bit": 1, "adafactor": 20, "sgd": 3}


@dataclass(frozen=True, slots=True)
class Timing:
    """A step's time and what it amounts to."""

    step: StepTime
    tokens_per_second: float | None
    samples_per_second: float
    mfu: float | None


def time_candidate(
    units: UnitPlan,
    costs: Mapping[str, Cost],
    trace: Trace,
    recipe: Recipe,
    mesh: Mesh,
    cluster: Cluster,
    machine: Machine,
    *,
    teacher: Cost | None = None,
    shared: Trace | None = None,
) -> Timing | None:
    """Return the time of one optimizer step of ``recipe`` (sizes resolved); None without GPUs.

    Args:
        units: The FSDP units.
        costs: Compute per traced module (:func:`~fsdptool.planning.compute.module_costs`).
        trace: Where they come from.
        recipe: Accumulation and optimizer.
        mesh: Resolved mesh.
        cluster, machine: The hardware.
        teacher: Compute of a distillation teacher's forward.
        shared: The trace of one of several ranks that share a sequence: says what they exchange.
    """
    if cluster.gpu is None or not trace.known:
        return None
    work = unit_costs(costs, trace.repeats, units)
    if teacher is not None:
        work[-1] = work[-1] + teacher
    order = sorted(range(len(units.units)), key=lambda index: _ORDER.get(units.units[index].kind, 3))
    exchanged = [0.0] * len(work)
    if shared is not None:
        exchanged = [cost.forward for cost in unit_costs(exchanged_bytes(shared), shared.repeats, units)]
    stages = [_stage(units.units[index], units, work[index], mesh, exchanged[index]) for index in order]
    implementation = _implementation(recipe.optimizer)
    local = local_trained(units, mesh)
    run = Run(
        accumulation=recipe.batch.accumulation,
        reduce_each=recipe.sharding.accumulation == "sharded",
        prefetch=units.prefetch,
        optimizer_bytes=local * _update_bytes(recipe.optimizer.name, implementation) + local * _ema(recipe),
        optimizer_operators=_kernels(recipe.optimizer.name, implementation, units),
        offloaded_bytes=_offloaded(units, mesh),
    )
    step = time_step(stages, run, mesh, cluster, machine)
    if step is None or step.seconds <= 0:
        return None
    samples = recipe.batch.micro_batch * recipe.batch.accumulation * mesh.dp_replicate * (mesh.dp_shard or 1)
    length = recipe.batch.sequence_length
    flops = sum(cost.flops for cost in work) * recipe.batch.accumulation
    peak = peak_flops(cluster.gpu, trace.compute_dtype)
    return Timing(
        step=step,
        tokens_per_second=samples * length / step.seconds if length is not None else None,
        samples_per_second=samples / step.seconds,
        mfu=flops / mesh.cp / step.seconds / peak if flops else None,
    )


def local_trained(units: UnitPlan, mesh: Mesh) -> float:
    """Return trained elements one rank updates: its shards, and whole what is replicated."""
    sharded = sum(p.numel for unit in units.units for p in unit.parameters if p.trainable)
    whole = sum(p.numel for p in units.ignored if p.trainable)
    return sharded / mesh.shard_degree + whole


def model_states(units: UnitPlan, mesh: Mesh) -> dict[str, int]:
    """Return parameter and gradient bytes of rank 0, which holds the largest shards (torch 2.13)."""
    kept = {"parameters": 0, "gradients": 0}
    sharded = [(p, mesh.shard_degree) for unit in units.units for p in unit.parameters]
    for parameter, ranks in [*sharded, *((p, 1) for p in units.ignored)]:
        stored = units.master_dtype if units.master_dtype and parameter.trainable else parameter.dtype
        size = _padded(parameter, ranks) // ranks * WIDTH.get(stored, 4)
        kept["parameters"] += size
        kept["gradients"] += size if parameter.trainable else 0
    return kept


def _stage(unit: Unit, units: UnitPlan, cost: Cost, mesh: Mesh, exchanged: float) -> Stage:
    ranks = mesh.shard_degree
    padded = [(_padded(p, ranks), p) for p in unit.parameters]
    gather = sum(size * weigh(p, units, ranks).computed for size, p in padded)
    reduce = sum(
        size * WIDTH.get(units.reduce_dtype or units.param_dtype or p.dtype, 4)
        for size, p in padded
        if p.trainable
    )
    return Stage(
        gather_bytes=gather,
        reduce_bytes=reduce,
        shard_reduce_bytes=reduce / ranks,
        backward_ranks=_backward_ranks(unit, ranks),
        forward=cost.forward / mesh.cp,
        backward=cost.backward / mesh.cp,
        exchanged=exchanged,
        exchanges=2 if unit.checkpointed else 1,
    )


def _backward_ranks(unit: Unit, ranks: int) -> int:
    reshard = unit.reshard_after_forward
    if not unit.unshard_in_backward or reshard is False or (reshard is None and unit.kind == "root"):
        return 1
    if reshard is True or reshard is None:
        return ranks
    return reshard


def _padded(parameter: Parameter, ranks: int) -> int:
    """Elements gathered: dim 0 is padded to a multiple of the ranks (torch 2.13, ``_fsdp_param.py``)."""
    if not parameter.shape:
        return ranks
    return -(-parameter.shape[0] // ranks) * ranks * prod(parameter.shape[1:])


def _implementation(optimizer: Optimizer) -> str:
    return "fused" if optimizer.implementation == "auto" else optimizer.implementation


def _update_bytes(name: str, implementation: str) -> int:
    return _UPDATE_BYTES.get((name, implementation), _UPDATE_BYTES[(name, "fused")])


def _kernels(name: str, implementation: str, units: UnitPlan) -> int:
    tensors = sum(1 for unit in units.units for p in unit.parameters if p.trainable)
    if implementation == "for_loop":
        return tensors * _PASSES[name]
    # Multi-tensor kernels take about a hundred tensors at a time (``ForeachUtils.h``, torch 2.13).
    return -(-tensors // 100) * (1 if implementation == "fused" else _PASSES[name])


def _ema(recipe: Recipe) -> int:
    return 12 if recipe.ema.decay is not None else 0


def _offloaded(units: UnitPlan, mesh: Mesh) -> float:
    """Bytes of shards copied to the device for forward and backward, and of gradients back."""
    if not units.cpu_offload:
        return 0.0
    shards: Sequence[Parameter] = [p for unit in units.units for p in unit.parameters]
    weights = sum(p.numel * WIDTH.get(p.dtype, 4) for p in shards)
    gradients = sum(p.numel * 4 for p in shards if p.trainable)
    return (2 * weights + gradients) / mesh.shard_degree
