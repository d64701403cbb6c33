"""The ladder: what to change when nothing fits, what each change gives and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from fsdptool.errors import FsdptoolError
from fsdptool.formatting import amount
from fsdptool.planning.estimator import Estimator
from fsdptool.planning.gpu_catalogue import all_entries
from fsdptool.planning.machine import expands, machine_for
from fsdptool.planning.options import PlanInputs
from fsdptool.planning.search_point import SearchPoint
from fsdptool.records.cluster import Cluster, Gpu
from fsdptool.records.plan import Candidate, Suggestion

_EXPANDABLE = "expandable segments (PYTORCH_ALLOC_CONF=expandable_segments:True)"
_SEVERAL = "everything above together"


def suggest(
    estimator: Estimator, inputs: PlanInputs, point: SearchPoint, requested: Candidate
) -> tuple[Suggestion, ...]:
    """Return the rungs for a configuration that does not fit, cheapest change first.

    Each rung is that one change alone; the last ones are all of them together, more GPUs, and the
    smallest GPU of the catalogue that would do.
    """
    cluster = inputs.clusters[point.cluster]
    steps: list[Suggestion] = []
    together, best_cluster = point, cluster
    rungs = [(text, rung, cluster) for text, rung in _rungs(point, cluster)]
    if cluster.gpu is not None and not expands(cluster):
        expandable = {**cluster.environment, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        rungs.insert(0, (_EXPANDABLE, point, replace(cluster, environment=expandable)))
    for text, rung, where in rungs:
        judged = _try(estimator, text, rung, where, inputs, replay=True)
        if judged is None:
            continue
        gain = (requested.device_total_bytes or 0) - (judged.device_total_bytes or 0)
        if gain <= 0:
            continue
        steps.append(_step(text, rung, point, judged, requested))
        together = _merge(together, point, rung)
        if text == _EXPANDABLE:
            best_cluster = where
    steps += _quantised(estimator, inputs, point, cluster, requested)
    if len(steps) > 1 and not any(step.fits for step in steps):
        judged = _try(estimator, _SEVERAL, together, best_cluster, inputs, replay=True)
        if judged is not None:
            steps.append(_step(_SEVERAL, together, point, judged, requested))
    if any(step.fits for step in steps):
        together, best_cluster = point, cluster
    steps += _hardware(estimator, inputs, point, together, best_cluster)
    return tuple(steps)


def _rungs(point: SearchPoint, cluster: Cluster) -> Iterator[tuple[str, SearchPoint]]:
    if point.reshard_after_forward is not True:
        yield "reshard after forward", replace(point, reshard_after_forward=True)
    if point.prefetch > 1:
        yield "gather one unit ahead (prefetch 1)", replace(point, prefetch=1)
    if point.gradients == "unsharded" and point.accumulation > 1:
        yield "accumulate sharded gradients", replace(point, gradients="sharded")
    if point.optimizer_implementation in ("foreach", "for_loop") and cluster.gpu is not None:
        yield "fused optimizer", replace(point, optimizer_implementation="fused")
    if point.checkpointing == "none" and point.layout == "native":
        yield "selective activation checkpointing", replace(point, checkpointing="selective")
    if point.checkpointing != "full":
        yield "full activation checkpointing", replace(point, checkpointing="full")
    if point.micro_batch > 1:
        half = point.micro_batch // 2
        if point.micro_batch % 2 == 0:
            more = replace(point, micro_batch=half, accumulation=point.accumulation * 2)
            yield f"micro-batch {half}, accumulation {more.accumulation}", more
        if half > 1 or point.micro_batch % 2:
            one = replace(point, micro_batch=1, accumulation=point.accumulation * point.micro_batch)
            yield f"micro-batch 1, accumulation {one.accumulation}", one
    if point.dp_replicate > 1:
        shard = point.dp_shard * point.dp_replicate
        yield f"shard over all {shard} ranks instead of HSDP", replace(point, dp_replicate=1, dp_shard=shard)
    if point.reduce_dtype == "float32" and point.layout == "native":
        yield "reduce gradients in the parameters' dtype", replace(point, reduce_dtype=None)
    if not point.cpu_offload:
        yield "CPU offload", replace(point, cpu_offload=True, prefetch=1, reshard_after_forward=True)


def _quantised(
    estimator: Estimator, inputs: PlanInputs, point: SearchPoint, cluster: Cluster, requested: Candidate
) -> list[Suggestion]:
    """Return the rung that holds LoRA's frozen base in fewer bits, which takes a trace of its own.

    int8 needs torch alone: what else is installed here says nothing of where the run will be.
    """
    method = inputs.recipe.method
    if method.lora is None or method.lora.base != "unchanged":
        return []
    base: Literal["int8"] = "int8"
    recipe = replace(inputs.recipe, method=replace(method, lora=replace(method.lora, base=base)))
    other = Estimator(
        estimator.spec, estimator.anatomy, recipe, estimator.settings, profile=estimator.profile
    )
    text = f"hold the frozen base in {base} (--lora-base {base})"
    judged = _try(other, text, point, cluster, inputs, replay=True)
    if judged is None or (requested.device_total_bytes or 0) <= (judged.device_total_bytes or 0):
        return []
    step = _step(text, point, point, judged, requested)
    return [replace(step, settings={"lora_base": base})]


_COSTS = (
    ("hold the frozen base", "weights are rounded; nf4 (needs bitsandbytes) takes about half of int8"),
    ("reduce gradients", "gradients are summed in lower precision"),
    ("CPU offload", "the optimizer runs on the host"),
    ("micro-batch", "smaller matrix products"),
    ("accumulate", "a reduction for each micro-batch"),
)


def _step(
    text: str, rung: SearchPoint, base: SearchPoint, judged: Candidate, requested: Candidate
) -> Suggestion:
    changed = {
        key: value
        for key, value in rung.to_json().items()
        if value != base.to_json()[key] and key != "cluster"
    }
    return Suggestion(
        change=text,
        settings=changed,
        device_total_bytes=judged.device_total_bytes,
        fits=_fits(judged),
        cost=_cost(text, judged, requested),
    )


def _fits(candidate: Candidate) -> bool | None:
    if candidate.device_total_bytes is None:
        return None
    return candidate.rejected_by is None


def _cost(text: str, judged: Candidate, requested: Candidate) -> str:
    words = []
    if judged.samples_per_second and requested.samples_per_second:
        change = requested.samples_per_second / judged.samples_per_second - 1
        if abs(change) < 0.005:
            words.append("no time")
        else:
            words.append(f"{abs(change):.0%} {'slower' if change > 0 else 'faster'} (estimate)")
    words += [cost for start, cost in _COSTS if text.startswith(start)]
    before, after = requested.host_bytes_per_node, judged.host_bytes_per_node
    if before is not None and after is not None and after > before:
        words.append(f"{amount(after - before)} more host memory per node")
    return "; ".join(words) or "nothing known"


def _merge(together: SearchPoint, base: SearchPoint, rung: SearchPoint) -> SearchPoint:
    changed = {
        name: getattr(rung, name)
        for name in SearchPoint.__dataclass_fields__
        if getattr(rung, name) != getattr(base, name)
    }
    return replace(together, **changed)


def _try(
    estimator: Estimator,
    text: str,
    rung: SearchPoint,
    cluster: Cluster,
    inputs: PlanInputs,
    *,
    replay: bool = False,
) -> Candidate | None:
    """Judge a rung; one that its own settings rule out (a layout that cannot) is no rung.

    What was asked has its allocator replayed, so what is held against it is replayed, too (``replay``);
    where only the verdict counts, near the limit.
    """
    try:
        machine = inputs.machines[rung.cluster]
        if cluster != inputs.clusters[rung.cluster]:
            machine = (
                machine if cluster.gpu == inputs.clusters[rung.cluster].gpu else machine_for(cluster.gpu)
            )
        judged = estimator.candidate(text, rung, cluster, machine, detail=False, replay=replay)
        if not replay and _close(judged):
            judged = estimator.candidate(text, rung, cluster, machine, detail=False, replay=True)
        return judged
    except FsdptoolError:
        return None


def _close(candidate: Candidate) -> bool:
    """Whether the allocator's own share decides, so that it is worth a replay."""
    total, usable = candidate.device_total_bytes, candidate.usable_bytes
    return total is not None and usable is not None and 0.75 < total / usable < 1.25


def _hardware(
    estimator: Estimator, inputs: PlanInputs, point: SearchPoint, best: SearchPoint, cluster: Cluster
) -> list[Suggestion]:
    """More GPUs of the kind, then the smallest other GPU that would do, both with the best knobs."""
    changed = best != point or cluster != inputs.clusters[point.cluster]
    beside = ", with everything above" if changed else ""
    if cluster.gpu is None:
        return []
    steps = []
    for factor in (2, 4, 8):
        larger = replace(cluster, nodes=cluster.nodes * factor)
        rung = replace(best, dp_shard=best.dp_shard * factor)
        judged = _try(estimator, "more", rung, larger, inputs)
        if judged is None:
            break
        if _fits(judged):
            text = f"{larger.world_size} GPUs in {larger.nodes} nodes{beside}"
            steps.append(_more(text, rung, point, judged, "more GPUs; the global batch grows with them"))
            break
    for gpu in _larger(cluster):
        judged = _try(estimator, "other", best, replace(cluster, gpu=gpu), inputs)
        if judged is not None and _fits(judged):
            text = f"{cluster.gpus_per_node} x {gpu.name}{beside}"
            steps.append(_more(text, best, point, judged, "another machine"))
            break
    return steps


def _larger(cluster: Cluster) -> Sequence[Gpu]:
    assert cluster.gpu is not None
    least = cluster.gpu.memory_bytes
    amd = cluster.gpu.link == "xgmi"
    found = {
        entry.gpu.memory_bytes: entry.gpu
        for entry in reversed(all_entries())
        if (entry.gpu.link == "xgmi") == amd
    }
    return [found[size] for size in sorted(found) if size > least]


def _more(text: str, rung: SearchPoint, base: SearchPoint, judged: Candidate, cost: str) -> Suggestion:
    kept = {k: v for k, v in rung.to_json().items() if v != base.to_json()[k] and k != "cluster"}
    return Suggestion(text, kept, judged.device_total_bytes, True, cost)
