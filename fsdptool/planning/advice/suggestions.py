"""Suggestions: what to change, what each change gives and what it costs.

Where nothing fits, changes that save memory; where something does, what its spare memory would buy, and what
would make CPU offload unnecessary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdptool.errors import FsdptoolError
from fsdptool.formatting import amount
from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.candidate.point import changed_settings
from fsdptool.planning.candidate.verdict import highest_total
from fsdptool.planning.hardware import all_entries, expands, machine_for
from fsdptool.planning.search.batch_sizes import spend_spare_memory
from fsdptool.records.advice import Cost, CostKind, Suggestion, SuggestionKind
from fsdptool.records.cluster import EXPANDABLE, Cluster, Gpu
from fsdptool.records.plan import Candidate, PlanInputs, SearchPoint, TrainingLoop
from fsdptool.records.trace import ColourGroup

COSTS = {
    SuggestionKind.QUANTISED_BASE: Cost(
        CostKind.WEIGHT_PRECISION,
        "the base weights are rounded; nf4 (needs bitsandbytes) takes about half of int8",
    ),
    SuggestionKind.REDUCE_DTYPE: Cost(CostKind.GRADIENT_PRECISION, "gradients are summed in lower precision"),
    SuggestionKind.LOW_PRECISION_STATES: Cost(
        CostKind.UPDATE_PRECISION,
        "updates smaller than bf16 resolves are lost; the optimizer's moments are rounded to 8 bits",
    ),
    SuggestionKind.LARGER_BATCH: Cost(CostKind.GLOBAL_BATCH, "the global batch grows"),
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
    """One change to try: what it is, the configuration and hardware with it, and variables that it sets."""

    kind: SuggestionKind
    text: str
    point: SearchPoint
    cluster: Cluster
    environment: Mapping[str, str] = field(default_factory=dict)
    with_all_above: bool = False


def suggest(
    estimator: Estimator, inputs: PlanInputs, point: SearchPoint, requested: Candidate
) -> tuple[Suggestion, ...]:
    """Return suggestions for a configuration that does not fit, cheapest change first.

    Each is one change alone; the last ones are all of them together, more GPUs, and the smallest GPU
    of the catalogue that would do.

    Args:
        estimator: Evaluates a configuration.
        inputs: The canonical inputs.
        point, requested: Where the changes start, and its memory and time.
    """
    cluster = inputs.clusters[point.cluster]
    suggestions: list[Suggestion] = []
    combined, combined_cluster = point, cluster
    for change in _changes(point, cluster, estimator.run.loop):
        candidate = _evaluate(estimator, change, inputs, replay=True)
        if candidate is None or not _saves(candidate, requested):
            continue
        suggestions.append(_suggestion(change, point, candidate, requested))
        combined = replace(combined, **changed_settings(point, change.point))
        if change.kind is SuggestionKind.EXPANDABLE_SEGMENTS:
            combined_cluster = change.cluster
    if not any(item.fits for item in suggestions) or not _needs_more_than_weights(requested):
        suggestions += _fewer_bits(estimator, inputs, point, cluster, requested)
    if len(suggestions) > 1 and not any(item.fits for item in suggestions):
        added = _added(cluster, combined_cluster)
        change = _Change(
            SuggestionKind.COMBINED, "all of the changes above", combined, combined_cluster, added
        )
        candidate = _evaluate(estimator, change, inputs, replay=True)
        if candidate is not None:
            suggestions.append(_suggestion(change, point, candidate, requested))
    if any(item.fits for item in suggestions):
        combined, combined_cluster = point, cluster
    suggestions += _hardware(estimator, inputs, point, combined, combined_cluster)
    return tuple(suggestions)


def _grown(point: SearchPoint, factor: int) -> SearchPoint:
    """Return a point on so many times its ranks: more copies where each rank holds one, else more shards."""
    if point.dp_shard == 1 and point.dp_replicate > 1:
        return replace(point, dp_replicate=point.dp_replicate * factor)
    return replace(point, dp_shard=point.dp_shard * factor)


def _changes(point: SearchPoint, cluster: Cluster, loop: TrainingLoop) -> Iterator[_Change]:
    """Yield the changes worth trying, cheapest first."""
    kind = SuggestionKind

    def change(kind: SuggestionKind, text: str, **settings: object) -> _Change:
        return _Change(kind, text, replace(point, **settings), cluster)  # type: ignore[arg-type]

    if cluster.gpu is not None and not expands(cluster, loop):
        yield _expandable(point, cluster)
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
        instead = "HSDP" if point.dp_shard > 1 else "a copy on each (FSDP)"
        text = f"shard over all {ranks} ranks instead of {instead}"
        yield change(kind.FULL_SHARDING, text, dp_replicate=1, dp_shard=ranks)
    if point.reduce_dtype == "float32" and point.layout == "native":
        yield change(kind.REDUCE_DTYPE, "reduce gradients in the parameters' dtype", reduce_dtype=None)
    if not point.cpu_offload:
        yield change(
            kind.CPU_OFFLOAD, "CPU offload", cpu_offload=True, prefetch=1, reshard_after_forward=True
        )


def _expandable(point: SearchPoint, cluster: Cluster) -> _Change:
    """Return the change to segments that grow, whose reserved memory hardly depends on fragmentation."""
    text = "expandable segments (PYTORCH_ALLOC_CONF=expandable_segments:True)"
    changed = replace(cluster, environment={**cluster.environment, **EXPANDABLE})
    return _Change(SuggestionKind.EXPANDABLE_SEGMENTS, text, point, changed, _added(cluster, changed))


def _added(before: Cluster, after: Cluster) -> Mapping[str, str]:
    """Return the variables that one cluster sets and the other does not."""
    return dict(after.environment.items() - before.environment.items())


def _smaller_batches(size: int) -> list[int]:
    """Return half the micro-batch where that is whole, then one sample."""
    half = [size // 2] if size > 1 and size % 2 == 0 else []
    return list(dict.fromkeys([*half, 1])) if size > 1 else []


def avoid_fragmentation(
    estimator: Estimator, inputs: PlanInputs, chosen: Candidate
) -> tuple[Suggestion, ...]:
    """Suggest expandable segments where a configuration fits only without unusual fragmentation."""
    highest = highest_total(chosen)
    if highest is None or chosen.usable_bytes is None or highest <= chosen.usable_bytes:
        return ()
    cluster = inputs.clusters[chosen.settings.cluster]
    if expands(cluster, inputs.loop):
        return ()
    change = _expandable(chosen.settings, cluster)
    growing = _evaluate(estimator, change, inputs, replay=True)
    if growing is None or growing.rejected_by is not None:
        return ()
    return (_suggestion(change, chosen.settings, growing, chosen),)


def improve(estimator: Estimator, inputs: PlanInputs, chosen: Candidate) -> tuple[Suggestion, ...]:
    """Return suggestions for a configuration that fits.

    A larger micro-batch in the memory that it leaves free; where it offloads to the host, what would make
    that unnecessary.
    """
    point = chosen.settings
    cluster = inputs.clusters[point.cluster]
    suggestions: list[Suggestion] = []
    larger = spend_spare_memory(estimator, inputs, chosen)
    if larger is not None:
        settings = larger.settings
        text = f"micro-batch {settings.micro_batch} (global batch {settings.global_batch})"
        change = _Change(SuggestionKind.LARGER_BATCH, text, settings, cluster)
        suggestions.append(_suggestion(change, point, larger, chosen))
    if point.cpu_offload:
        resident = replace(point, cpu_offload=False)
        suggestions += [s for s in _fewer_bits(estimator, inputs, resident, cluster, None, chosen) if s.fits]
        if cluster.gpu is not None:
            suggestions += _hardware(estimator, inputs, resident, resident, cluster, offloaded=chosen)
    return tuple(suggestions)


def _fewer_bits(
    estimator: Estimator,
    inputs: PlanInputs,
    point: SearchPoint,
    cluster: Cluster,
    larger: Candidate | None,
    compared: Candidate | None = None,
) -> list[Suggestion]:
    """Return suggestions to store weights or optimizer in fewer bits, each of which takes a trace of its own.

    int8 needs torch alone: other packages installed here may be missing where the run will be. bf16 weights
    have no fp32 masters only without mixed precision: the model then computes in the dtype it is stored in.

    Args:
        estimator: Of the recipe as it is.
        inputs: The canonical inputs.
        point, cluster: The configuration.
        larger: The candidate that a suggestion must need less memory than; None: any will do.
        compared: The candidate that times are compared with; None is ``larger``.
    """
    run = estimator.run
    recipe, settings = run.recipe, run.settings
    lora, optimizer = recipe.method.lora, recipe.optimizer
    if recipe.method.name == "lora":
        if lora is None or lora.base != "unchanged":
            return []
        kind = SuggestionKind.QUANTISED_BASE
        recipe = replace(recipe, method=replace(recipe.method, lora=replace(lora, base="int8")))
        text, changed = "store the frozen base in int8 (--lora-base int8)", {"lora_base": "int8"}
    else:
        gpu = cluster.gpu
        if optimizer.name != "adamw" or settings.mixed_precision != "bf16" or gpu is None:
            return []
        kind = SuggestionKind.LOW_PRECISION_STATES
        recipe = replace(
            recipe,
            model=replace(recipe.model, dtype="bfloat16"),
            optimizer=replace(optimizer, name="adamw8bit", implementation="auto"),
        )
        settings = replace(settings, mixed_precision="no")
        point = replace(point, optimizer_implementation="auto")
        text = "bf16 weights with 8-bit Adam (--precision no --dtype bfloat16 --optimizer adamw8bit)"
        changed = {"precision": "no", "dtype": "bfloat16", "optimizer": "adamw8bit"}
    run = replace(run, recipe=recipe, settings=settings)
    smaller = Estimator(estimator.spec, estimator.anatomy, run, profile=estimator.profile)
    change = _Change(kind, text, point, cluster)
    candidate = _evaluate(smaller, change, inputs, replay=True)
    if candidate is None or (larger is not None and not _saves(candidate, larger)):
        return []
    return [replace(_suggestion(change, point, candidate, compared or larger), settings=changed)]


def _needs_more_than_weights(requested: Candidate) -> bool:
    """Whether a configuration would not fit without its parameters and optimizer states either.

    Fewer bits for these cannot be enough alone then. Their trace is skipped only if another suggestion
    fits already: where none does, they can still be enough together with the others.
    """
    groups = (ColourGroup.STATES, ColourGroup.GATHERED)
    stored = sum(part.bytes or 0 for part in requested.components if part.name.group in groups)
    total, usable = requested.device_total_bytes, requested.usable_bytes
    return total is not None and usable is not None and total - stored > usable


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
        samples_per_second=candidate.samples_per_second,
        tokens_per_second=candidate.tokens_per_second,
        environment=change.environment,
        hardware=_options(change.cluster) if change.kind in _OTHER_HARDWARE else {},
        with_all_above=change.with_all_above,
    )


_OTHER_HARDWARE = (SuggestionKind.MORE_GPUS, SuggestionKind.LARGER_GPU)


def _options(cluster: Cluster) -> dict[str, str | int]:
    """Return the options of ``plan`` that name a cluster's GPUs."""
    name = {} if cluster.gpu is None else {"gpu": cluster.gpu.name}
    return {**name, "gpus": cluster.gpus_per_node, "nodes": cluster.nodes}


def _fits(candidate: Candidate) -> bool | None:
    if candidate.device_total_bytes is None:
        return None
    return candidate.rejected_by is None


def _saves(candidate: Candidate, requested: Candidate) -> bool:
    return (requested.device_total_bytes or 0) > (candidate.device_total_bytes or 0)


def _costs(kind: SuggestionKind, candidate: Candidate, requested: Candidate | None) -> Iterator[Cost]:
    if requested is not None and candidate.samples_per_second and requested.samples_per_second:
        yield Cost(CostKind.STEP_TIME, f"{_pace(candidate, requested)} (estimate)")
    if kind in COSTS:
        yield COSTS[kind]
    if requested is None:
        return
    before, after = requested.host_bytes_per_node, candidate.host_bytes_per_node
    if before is not None and after is not None and after > before:
        yield Cost(CostKind.HOST_MEMORY, f"{amount(after - before)} more host memory per node")


def _pace(candidate: Candidate, requested: Candidate) -> str:
    """Return how much slower or faster a candidate is per sample, in words."""
    ratio = (candidate.samples_per_second or 0.0) / (requested.samples_per_second or 1.0)
    if abs(1 / ratio - 1) < 0.005:
        return "no slower"
    if ratio >= 2:
        return f"{ratio:.1f} times as fast"
    return f"{1 / ratio - 1:.0%} slower" if ratio < 1 else f"{ratio - 1:.0%} faster"


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
    estimator: Estimator,
    inputs: PlanInputs,
    start: SearchPoint,
    best: SearchPoint,
    cluster: Cluster,
    *,
    offloaded: Candidate | None = None,
) -> list[Suggestion]:
    """More GPUs of the kind, then the smallest other GPU that would do, both with the best settings.

    ``offloaded`` is the candidate with CPU offload that they would make unnecessary.
    """
    if cluster.gpu is None:
        return []
    added = _added(inputs.clusters[start.cluster], cluster)
    changed = best != start or bool(added)
    suffix = ", without CPU offload" if offloaded and not changed else ""
    larger = [replace(cluster, nodes=cluster.nodes * factor) for factor in (2, 4, 8)]
    more = [
        _Change(
            SuggestionKind.MORE_GPUS,
            f"{item.world_size} GPUs in {item.nodes} nodes{suffix}",
            _grown(best, item.nodes // cluster.nodes),
            item,
            added,
            changed,
        )
        for item in larger
    ]
    other = [
        _Change(
            SuggestionKind.LARGER_GPU,
            f"{cluster.gpus_per_node} x {gpu.name}{suffix}",
            best,
            replace(cluster, gpu=gpu),
            added,
            changed,
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
