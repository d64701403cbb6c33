"""Suggestions: what to change when nothing fits, what each change gives and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fsdptool.errors import FsdptoolError
from fsdptool.formatting import amount
from fsdptool.planning.estimator import Estimator
from fsdptool.planning.hardware import all_entries, expands, machine_for
from fsdptool.planning.search_point import changed_settings
from fsdptool.records.cluster import Cluster, Gpu
from fsdptool.records.plan import (
    Candidate,
    Cost,
    CostKind,
    PlanInputs,
    SearchPoint,
    Suggestion,
    SuggestionKind,
)

COSTS = {
    SuggestionKind.QUANTISED_BASE: Cost(
        CostKind.WEIGHT_PRECISION,
        "the base weights are rounded; nf4 (needs bitsandbytes) takes about half of int8",
    ),
    SuggestionKind.REDUCE_DTYPE: Cost(CostKind.GRADIENT_PRECISION, "gradients are summed in lower precision"),
    SuggestionKind.CPU_OFFLOAD: Cost(CostKind.HOST_OPTIMIZER, "the optimizer runs on the host"),
    SuggestionKind.MICRO_BATCH: Cost(CostKind.SMALLER_PRODUCTS, "smaller matrix products"),
    SuggestionKind.SHARDED_GRADIENTS: Cost(
        CostKind.MORE_REDUCTIONS, "one gradient reduction per micro-batch"
    ),
    SuggestionKind.MORE_GPUS: Cost(
        CostKind.LARGER_BATCH, "more GPUs; the global batch grows with their number"
    ),
    SuggestionKind.LARGER_GPU: Cost(CostKind.OTHER_HARDWARE, "a different GPU"),
}
"""What a kind of change always costs, besides the step time and host memory that are computed."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One change to try: what it is, and the configuration and hardware with it."""

    kind: SuggestionKind
    text: str
    point: SearchPoint
    cluster: Cluster


def suggest(
    estimator: Estimator, inputs: PlanInputs, point: SearchPoint, requested: Candidate
) -> tuple[Suggestion, ...]:
    """Return suggestions for a configuration that does not fit, cheapest change first.

    Each is one change alone; the last ones are all of them together, more GPUs, and the smallest GPU
    of the catalogue that would do.
    """
    cluster = inputs.clusters[point.cluster]
    suggestions: list[Suggestion] = []
    combined, combined_cluster = point, cluster
    for change in _changes(point, cluster):
        candidate = _evaluate(estimator, change, inputs, replay=True)
        if candidate is None or not _saves(candidate, requested):
            continue
        suggestions.append(_suggestion(change, point, candidate, requested))
        combined = replace(combined, **changed_settings(point, change.point))
        if change.kind is SuggestionKind.EXPANDABLE_SEGMENTS:
            combined_cluster = change.cluster
    suggestions += _quantised(estimator, inputs, point, cluster, requested)
    if len(suggestions) > 1 and not any(item.fits for item in suggestions):
        change = _Change(SuggestionKind.COMBINED, "all of the changes above", combined, combined_cluster)
        candidate = _evaluate(estimator, change, inputs, replay=True)
        if candidate is not None:
            suggestions.append(_suggestion(change, point, candidate, requested))
    if any(item.fits for item in suggestions):
        combined, combined_cluster = point, cluster
    suggestions += _hardware(estimator, inputs, point, combined, combined_cluster)
    return tuple(suggestions)


def _changes(point: SearchPoint, cluster: Cluster) -> Iterator[_Change]:
    """Yield the changes worth trying, cheapest first."""
    kind = SuggestionKind

    def change(kind: SuggestionKind, text: str, **settings: object) -> _Change:
        return _Change(kind, text, replace(point, **settings), cluster)  # type: ignore[arg-type]

    if cluster.gpu is not None and not expands(cluster):
        environment = {**cluster.environment, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        text = "expandable segments (PYTORCH_ALLOC_CONF=expandable_segments:True)"
        yield _Change(kind.EXPANDABLE_SEGMENTS, text, point, replace(cluster, environment=environment))
    if point.reshard_after_forward is not True:
        yield change(kind.RESHARD, "reshard after forward", reshard_after_forward=True)
    if point.prefetch > 1:
        yield change(kind.PREFETCH, "prefetch one FSDP unit (prefetch 1)", prefetch=1)
    if point.gradients == "unsharded" and point.accumulation > 1:
        yield change(kind.SHARDED_GRADIENTS, "accumulate sharded gradients", gradients="sharded")
    if point.optimizer_implementation in ("foreach", "for_loop") and cluster.gpu is not None:
        yield change(kind.FUSED_OPTIMIZER, "fused optimizer", optimizer_implementation="fused")
    if point.checkpointing == "none" and point.layout == "native":
        yield change(kind.CHECKPOINTING, "selective activation checkpointing", checkpointing="selective")
    if point.checkpointing != "full":
        yield change(kind.CHECKPOINTING, "full activation checkpointing", checkpointing="full")
    samples = point.micro_batch * point.accumulation
    yield from (
        change(
            kind.MICRO_BATCH,
            f"micro-batch {size}, accumulation {samples // size}",
            micro_batch=size,
            accumulation=samples // size,
        )
        for size in _smaller_batches(point.micro_batch)
    )
    if point.dp_replicate > 1:
        ranks = point.dp_shard * point.dp_replicate
        text = f"shard over all {ranks} ranks instead of HSDP"
        yield change(kind.FULL_SHARDING, text, dp_replicate=1, dp_shard=ranks)
    if point.reduce_dtype == "float32" and point.layout == "native":
        yield change(kind.REDUCE_DTYPE, "reduce gradients in the parameters' dtype", reduce_dtype=None)
    if not point.cpu_offload:
        yield change(
            kind.CPU_OFFLOAD, "CPU offload", cpu_offload=True, prefetch=1, reshard_after_forward=True
        )


def _smaller_batches(size: int) -> list[int]:
    """Return half the micro-batch where that is whole, then one sample."""
    half = [size // 2] if size > 1 and size % 2 == 0 else []
    return list(dict.fromkeys([*half, 1])) if size > 1 else []


def _quantised(
    estimator: Estimator, inputs: PlanInputs, point: SearchPoint, cluster: Cluster, requested: Candidate
) -> list[Suggestion]:
    """Return the suggestion to store LoRA's frozen base in fewer bits, which takes a trace of its own.

    int8 needs torch alone: other packages installed here may be missing where the run will be.
    """
    method = inputs.recipe.method
    if method.lora is None or method.lora.base != "unchanged":
        return []
    base: Literal["int8"] = "int8"
    recipe = replace(inputs.recipe, method=replace(method, lora=replace(method.lora, base=base)))
    quantised = Estimator(
        estimator.spec, estimator.anatomy, recipe, estimator.settings, profile=estimator.profile
    )
    text = f"store the frozen base in {base} (--lora-base {base})"
    change = _Change(SuggestionKind.QUANTISED_BASE, text, point, cluster)
    candidate = _evaluate(quantised, change, inputs, replay=True)
    if candidate is None or not _saves(candidate, requested):
        return []
    return [replace(_suggestion(change, point, candidate, requested), settings={"lora_base": base})]


def _suggestion(
    change: _Change, start: SearchPoint, candidate: Candidate, requested: Candidate | None
) -> Suggestion:
    """Return the suggestion of a change that was evaluated; without ``requested``, times are not compared."""
    costs = tuple(_costs(change.kind, candidate, requested))
    return Suggestion(
        change=change.text,
        settings=changed_settings(start, change.point),
        device_total_bytes=candidate.device_total_bytes,
        fits=_fits(candidate),
        cost="; ".join(cost.detail for cost in costs) or "no known cost",
        kind=change.kind,
        costs=costs,
    )


def _fits(candidate: Candidate) -> bool | None:
    if candidate.device_total_bytes is None:
        return None
    return candidate.rejected_by is None


def _saves(candidate: Candidate, requested: Candidate) -> bool:
    return (requested.device_total_bytes or 0) > (candidate.device_total_bytes or 0)


def _costs(kind: SuggestionKind, candidate: Candidate, requested: Candidate | None) -> Iterator[Cost]:
    if requested is not None and candidate.samples_per_second and requested.samples_per_second:
        change = requested.samples_per_second / candidate.samples_per_second - 1
        text = f"{abs(change):.0%} {'slower' if change > 0 else 'faster'} (estimate)"
        yield Cost(CostKind.STEP_TIME, "no slower (estimate)" if abs(change) < 0.005 else text)
    if kind in COSTS:
        yield COSTS[kind]
    if requested is None:
        return
    before, after = requested.host_bytes_per_node, candidate.host_bytes_per_node
    if before is not None and after is not None and after > before:
        yield Cost(CostKind.HOST_MEMORY, f"{amount(after - before)} more host memory per node")


def _evaluate(
    estimator: Estimator, change: _Change, inputs: PlanInputs, *, replay: bool = False
) -> Candidate | None:
    """Evaluate a change; None where its own settings rule it out (a layout that cannot).

    The requested configuration has its allocator replayed, so what is compared with it is replayed, too
    (``replay``); where only the verdict counts, near the limit.
    """
    place = change.point.cluster
    cluster, machine = inputs.clusters[place], inputs.machines[place]
    if change.cluster.gpu != cluster.gpu:
        machine = machine_for(change.cluster.gpu)

    def evaluate(replay: bool) -> Candidate:
        return estimator.candidate(
            change.kind, change.point, change.cluster, machine, detail=False, replay=replay
        )

    try:
        candidate = evaluate(replay)
        return evaluate(True) if not replay and _close(candidate) else candidate
    except FsdptoolError:
        return None


def _close(candidate: Candidate) -> bool:
    """Whether the allocator's own share decides, so that it is worth a replay."""
    total, usable = candidate.device_total_bytes, candidate.usable_bytes
    return total is not None and usable is not None and 0.75 < total / usable < 1.25


def _hardware(
    estimator: Estimator, inputs: PlanInputs, start: SearchPoint, best: SearchPoint, cluster: Cluster
) -> list[Suggestion]:
    """More GPUs of the kind, then the smallest other GPU that would do, both with the best settings."""
    if cluster.gpu is None:
        return []
    changed = best != start or cluster != inputs.clusters[start.cluster]
    suffix = ", with all changes above" if changed else ""
    larger = [replace(cluster, nodes=cluster.nodes * factor) for factor in (2, 4, 8)]
    more = [
        _Change(
            SuggestionKind.MORE_GPUS,
            f"{item.world_size} GPUs in {item.nodes} nodes{suffix}",
            replace(best, dp_shard=best.dp_shard * (item.nodes // cluster.nodes)),
            item,
        )
        for item in larger
    ]
    other = [
        _Change(
            SuggestionKind.LARGER_GPU,
            f"{cluster.gpus_per_node} x {gpu.name}{suffix}",
            best,
            replace(cluster, gpu=gpu),
        )
        for gpu in _larger(cluster.gpu)
    ]
    suggestions = []
    for changes in (more, other):
        for change in changes:
            candidate = _evaluate(estimator, change, inputs)
            if candidate is not None and _fits(candidate):
                suggestions.append(_suggestion(change, start, candidate, None))
                break
    return suggestions


def _larger(gpu: Gpu) -> Sequence[Gpu]:
    """Return the catalogue's GPUs of the same maker with more memory, smallest first."""
    amd = gpu.link == "xgmi"
    by_size = {
        entry.gpu.memory_bytes: entry.gpu
        for entry in reversed(all_entries())
        if (entry.gpu.link == "xgmi") == amd
    }
    return [by_size[size] for size in sorted(by_size) if size > gpu.memory_bytes]
