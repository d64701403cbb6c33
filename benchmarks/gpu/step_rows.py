"""Rows that run training steps of one rank: memory per phase, step time by operator class, kernels, the plan.

One process acts as rank 0 of N over torch's ``fake`` process group: collectives do nothing, every kernel of
the rank is real, and so are gathered values (``own_rows.py``). One GPU cannot show NCCL, context parallelism
or HSDP.

A row takes two measured steps (the second is the one that counts, with optimizer states), some timed ones,
and two profiled ones.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "memory"))

from matrix import FAMILIES
from settings import Setting, records_of

from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import FsdpSettings

Write = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One setting, and what a :class:`Setting` does not say.

    Attributes:
        setting: ``family`` is a key of the matrix, whose small model a rehearsal takes.
        compile: Compile the blocks.
        fp8: Train whole weights in float8.
        environment: Variables of the process: the allocator, the choice of attention kernels.
        timed: Steps that are timed.
        offload: Parameters and optimizer states live in host memory.
        offload_activations: Inputs of recomputed blocks live there.
        lengths: Further steps of these lengths (in 64ths of the sequence), twice: new ones and known ones.
    """

    setting: Setting
    compile: bool = False
    fp8: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    timed: int = 5
    offload: bool = False
    offload_activations: bool = False
    lengths: tuple[int, ...] = ()


def records(row: StepRow, *, small: bool) -> tuple[Recipe, FsdpSettings]:
    """Return the recipe and the settings of a row; ``small`` cuts the model down."""
    setting = row.setting
    if small:
        _, reference, overrides, batch = FAMILIES[setting.family]
        kept = {"sequence_length": 64, "micro_batch": 1} if "sequence_length" in batch else batch
        setting = replace(setting, reference=reference, overrides=overrides, batch=kept)
    recipe, settings = records_of(setting)
    recipe = replace(recipe, sharding=replace(recipe.sharding, compile=row.compile))
    on_cpu = not on_cuda()
    precision = "fp8" if row.fp8 and not on_cpu else settings.mixed_precision
    return recipe, replace(
        settings,
        use_cpu=on_cpu,
        mixed_precision=precision,
        cpu_offload=row.offload,
        activation_checkpointing_offload=row.offload_activations,
    )


def on_cuda() -> bool:
    """Say whether this process has a GPU."""
    import torch

    return torch.cuda.is_available()


def run(row: StepRow, write: Write, *, small: bool) -> None:
    """Plan and measure one row; ``write`` is called with each part as soon as it is known."""
    import torch

    recipe, settings = records(row, small=small)
    if on_cuda():
        torch.zeros(1, device="cuda")
        free, total = torch.cuda.mem_get_info()
        write({"before": {"driver_used_bytes": total - free, "device_bytes": total}})
    write({"plan": _plan(recipe, settings, row.setting.ranks)})
    try:
        _measure(row, recipe, settings, write, timed=2 if small else row.timed)
    finally:
        _clear()


def _clear() -> None:
    """Leave nothing to the next row of this process."""
    import torch

    from fsdptool.distributed.session import close_session

    close_session()
    gc.collect()
    if on_cuda():
        torch.cuda.empty_cache()


def _plan(recipe: Recipe, settings: FsdpSettings, ranks: int) -> dict[str, Any]:
    """Return what the plan expects of this rank."""
    import torch

    from fsdptool.inspection import inspect
    from fsdptool.planning.candidate.estimator import predict
    from fsdptool.planning.hardware import find_gpu
    from fsdptool.records.cluster import Cluster
    from fsdptool.source import resolve_choice

    spec = resolve_choice(recipe.model)
    cluster = None
    if on_cuda():
        per_node = min(ranks, 8)
        variables = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")
        cluster = Cluster(
            find_gpu(torch.cuda.get_device_name()).gpu,
            per_node,
            max(ranks // per_node, 1),
            inter_node_bandwidth=50e9,
            environment={name: os.environ[name] for name in variables if name in os.environ},
        )
    began = time.perf_counter()
    profile = "cuda" if on_cuda() else "cpu-fake"
    candidate = predict(
        spec,
        inspect(spec),
        resolve_run(recipe, settings, ranks=cluster.world_size if cluster is not None else None),
        cluster=cluster,
        profile=profile,  # type: ignore[arg-type]
    )
    took = time.perf_counter() - began
    return {
        "seconds_to_plan": took,
        "allocated_peak_bytes": candidate.allocated_peak_bytes,
        "reserved_peak_bytes": candidate.reserved_peak_bytes,
        "reserved_range_bytes": candidate.reserved_range_bytes,
        "device_total_bytes": candidate.device_total_bytes,
        "components": {part.name: part.bytes for part in candidate.components},
        "peak": candidate.peak.moment if candidate.peak else None,
        "phases": {phase.name: phase.allocated_bytes for phase in candidate.phases},
        "step_seconds": candidate.step_seconds,
        "step_seconds_range": candidate.step_seconds_range,
        "seconds": dict(candidate.seconds),
        "mfu": candidate.mfu,
        "model_flops": candidate.step_flops,
    }


def _measure(row: StepRow, recipe: Recipe, settings: FsdpSettings, write: Write, *, timed: int) -> None:
    """Run the steps."""
    import torch
    import torch.distributed as dist
    from measure import Undaunted
    from own_rows import use_own_rows
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from fsdptool.distributed.session import open_session
    from fsdptool.distributed.shard import local
    from fsdptool.families.registry import family_of
    from fsdptool.families.synthetic import synthesise
    from fsdptool.inspection import inspect
    from fsdptool.modeling.methods import method_of
    from fsdptool.modeling.objective import objective_for
    from fsdptool.modeling.units import plan_units
    from fsdptool.records.run import RunPhase
    from fsdptool.source import resolve_choice
    from fsdptool.training.memory_meter import open_meter
    from fsdptool.training.optimizers.sharded import build_optimizer
    from fsdptool.training.trainer import build_sharded

    torch.manual_seed(0)
    spec = resolve_choice(recipe.model)
    units = plan_units(inspect(spec), resolve_run(recipe, settings))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=row.setting.ranks)
    session = open_session(settings)
    meter = open_meter(session.device)
    began = time.perf_counter()
    with meter.moment(RunPhase.LOAD):
        model = build_sharded(spec, recipe.model, units, settings, session, recipe=recipe, seed=0)[0]
        use_own_rows(model)
        optimizer = build_optimizer(recipe.optimizer, list(model.named_parameters()), rate=1e-4)
    write({"seconds_to_load": time.perf_counter() - began})
    objective = objective_for(recipe, spec)
    stepper = Undaunted(
        model,
        method_of(recipe).micro_loss(recipe, objective, None),
        optimizer,
        session,
        clip=recipe.optimizer.clip_grad_norm,
        unsharded=recipe.sharding.accumulation == "unsharded",
    )
    stepper.moment = meter.moment
    generator = torch.Generator().manual_seed(0)

    def step(length: int | None = None) -> None:
        sizes = recipe.batch if length is None else replace(recipe.batch, sequence_length=length)
        specs = family_of(spec).batch_spec(spec.config, replace(recipe, batch=sizes))
        batches = [synthesise(specs, generator) for _ in range(recipe.batch.accumulation)]
        stepper.run(batches, rate=1e-4)
        if on_cuda():
            torch.cuda.synchronize()

    for number in (1, 2):
        gc.collect()
        with meter.step(number):
            step()
        allocated, reserved = meter.last()
        write({f"step_{number}": {"allocated_peak_bytes": allocated, "reserved_peak_bytes": reserved}})
    memory: dict[str, Any] = {"instrument": meter.instrument, "moments": meter.moments()}
    if on_cuda():
        free, total = torch.cuda.mem_get_info()
        stats = torch.cuda.memory_stats()
        keys = (
            "num_alloc_retries",
            "segment.all.peak",
            "inactive_split_bytes.all.peak",
            "active_bytes.all.peak",
        )
        memory |= {"driver_used_bytes": total - free, **{key: stats.get(key) for key in keys}}
    write({"memory": memory})
    from contextlib import nullcontext

    stepper.moment = lambda name: nullcontext()
    step()
    seconds = []
    for _ in range(timed):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    write({"time": {"median_seconds": statistics.median(seconds), "seconds": seconds}})
    write({"operators": profiled(step)})
    if row.lengths:
        write({"lengths": _lengths(row, recipe, step)})
    write({"finite": all(bool(local(p).isfinite().all()) for p in model.parameters())})
    write({"summary": f"step {statistics.median(seconds):.3f} s"})


def _lengths(row: StepRow, recipe: Recipe, step: Callable[[int], None]) -> dict[str, list[float]]:
    """Return the seconds of steps of lengths that are new, and of the same lengths once more."""
    whole = recipe.batch.sequence_length
    assert whole is not None
    seconds: dict[str, list[float]] = {"new": [], "known": []}
    for turn in seconds.values():
        for part in row.lengths:
            began = time.perf_counter()
            step(whole * part // 64)
            turn.append(time.perf_counter() - began)
    return seconds


CLASSES = (
    ("attention", ("attention", "fmha", "sdpa")),
    ("matmul", ("mm", "linear", "convolution", "conv2d", "conv3d", "matmul")),
    ("optimizer", ("_fused_adam", "_foreach_")),
    ("copy", ("copy", "_to_copy", "cat", "stack", "split_with_sizes", "chunk", "clone", "all_gather_copy")),
    ("reduction", ("sum", "mean", "norm", "softmax", "logsumexp", "nll", "max", "argmax", "topk", "sort")),
)
"""Classes of operators by parts of their names; the first that fits counts. The rest is elementwise."""


def classify(name: str) -> str:
    """Return the class of an operator."""
    plain = name.removeprefix("aten::").lower()
    for label, parts in CLASSES:
        if any(part in plain for part in parts):
            return label
    return "elementwise"


def profiled(step: Callable[[], None]) -> dict[str, Any]:
    """Profile two steps: device time by class, the costliest operators with shapes, kernel names, idle gaps.

    On a CPU, "device time" is the operators' own time there. ``flops`` are torch's (matrix products and
    convolutions), so time and FLOPs of equal shapes give the efficiency by size.
    """
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda() else [])]
    with profile(activities=activities, record_shapes=True, with_flops=True) as profiler:
        step()
        step()
    attribute = "self_device_time_total" if on_cuda() else "self_cpu_time_total"
    classes: dict[str, float] = {}
    shaped = []
    for event in profiler.key_averages(group_by_input_shape=True):
        if not str(event.key).startswith(("aten::", "bitsandbytes", "torchao", "fsdp::", "c10d::", "triton")):
            continue
        microseconds = float(getattr(event, attribute))
        if microseconds <= 0:
            continue
        label = classify(event.key)
        classes[label] = classes.get(label, 0.0) + microseconds / 1e6
        shaped.append(
            {
                "operator": event.key,
                "class": label,
                "shapes": str(event.input_shapes)[:160],
                "calls": event.count,
                "seconds": microseconds / 1e6,
                "flops": float(event.flops or 0),
            }
        )
    kernels: dict[str, list[float]] = {}
    for item in profiler.events() or ():
        if item.device_type == DeviceType.CUDA:
            entry = kernels.setdefault(item.name[:140], [0, 0.0])
            entry[0] += 1
            entry[1] += item.self_device_time_total / 1e6
    spans = [
        (item.time_range.start, item.time_range.end)
        for item in profiler.events() or ()
        if item.device_type == DeviceType.CUDA
    ]
    ranked = sorted(kernels.items(), key=lambda pair: -pair[1][1])
    attention = [
        name for name, _ in ranked if any(part in name.lower() for part in ("fmha", "flash", "sdpa"))
    ]
    return {
        "seconds_by_class": classes,
        "seconds": sum(classes.values()),
        "top": sorted(shaped, key=lambda each: -each["seconds"])[:32],
        "kernels": [{"name": name, "calls": int(n), "seconds": s} for name, (n, s) in ranked[:32]],
        "kernel_seconds": sum(entry[1] for entry in kernels.values()),
        "launches": sum(int(entry[0]) for entry in kernels.values()),
        "attention_kernels": attention[:6],
        "longest_idle_seconds": longest_gap(spans) / 1e6,
    }


def longest_gap(spans: Sequence[tuple[float, float]]) -> float:
    """Return the longest time within which nothing ran, in the unit of ``spans``: beginnings and ends."""
    longest = 0.0
    until = None
    for begin, end in sorted(spans):
        if until is not None:
            longest = max(longest, begin - until)
        until = end if until is None else max(until, end)
    return longest
