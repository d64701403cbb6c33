"""When FSDP is not what this run needs, and other advice that costs one more simulation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from fsdptool.errors import FsdptoolError
from fsdptool.families.registry import family_of
from fsdptool.formatting import amount
from fsdptool.planning.estimator import Estimator
from fsdptool.planning.options import PlanInputs
from fsdptool.planning.search_point import SearchPoint
from fsdptool.planning.verdict import HEADROOM
from fsdptool.records.anatomy import Parameter
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.model import ModelSpec
from fsdptool.records.plan import Candidate
from fsdptool.records.recipe import Recipe


def advise(
    estimator: Estimator,
    inputs: PlanInputs,
    point: SearchPoint,
    requested: Candidate,
    chosen: Candidate | None,
) -> list[Diagnostic]:
    """Return what was assumed, what the trainer would refuse, and whether sharding is needed at all."""
    return [
        *_sizes(estimator.spec, inputs.recipe),
        *_packing(estimator.spec, inputs.recipe),
        *_needless(estimator, inputs, point, requested, chosen),
    ]


def _sizes(spec: ModelSpec, recipe: Recipe) -> list[Diagnostic]:
    """Say what a sample is where nobody said it: memory depends on nothing more than on that."""
    batch = recipe.batch
    if any(size is not None for size in (batch.sequence_length, batch.height, batch.width, batch.frames)):
        return []
    tensors = family_of(spec).batch_spec(spec.config, recipe)
    shapes = [
        f"{item.name} {' x '.join(map(str, item.shape[1:]))}" for item in tensors if len(item.shape) > 1
    ]
    if not shapes:
        return []
    return [
        Diagnostic(
            "PLN013",
            "info",
            f"no size of a sample was given; the family's own is assumed: {', '.join(shapes)}",
            help="give --seq-len, --height, --width or --frames, or batch: in the recipe",
        )
    ]


def _packing(spec: ModelSpec, recipe: Recipe) -> list[Diagnostic]:
    data = recipe.data
    kind = recipe.objective.name or spec.objective
    if kind != "causal_lm" or data.source == "synthetic" or not (data.packing and data.document_mask):
        return []
    names = {item.name for item in family_of(spec).batch_spec(spec.config, recipe)}
    if "position_ids" in names or "pixel_values" in names:
        return []
    return [
        Diagnostic(
            "PLN012",
            "warning",
            f"{spec.model_class} cannot keep packed documents apart: training refuses data.document_mask",
            help="let documents run into one another (document_mask: false), or set data.packing: false",
        )
    ]


def _needless(
    estimator: Estimator,
    inputs: PlanInputs,
    point: SearchPoint,
    requested: Candidate,
    chosen: Candidate | None,
) -> list[Diagnostic]:
    """Return advice on whether sharding is needed at all.

    The model, its gradients and its optimizer on one GPU with the asked micro-batch: if that fits
    with room for DDP's gradient buckets, DDP trains it with less communication.
    """
    cluster = inputs.clusters[point.cluster]
    if cluster.gpu is None or requested.device_total_bytes is None or chosen is None:
        return []
    if cluster.world_size == 1:
        return [
            Diagnostic(
                "PLN010",
                "info",
                "one GPU shards nothing: FSDP only adds its own copies here",
                help="train without FSDP on one GPU, or give --gpus 2 or more",
            )
        ]
    alone = replace(cluster, gpus_per_node=1, nodes=1)
    single = replace(
        point,
        dp_replicate=1,
        dp_shard=1,
        cp=1,
        reshard_after_forward=bool(point.reshard_after_forward),
        prefetch=1,
        cpu_offload=False,
    )
    try:
        judged = estimator.candidate(
            "single", single, alone, inputs.machines[point.cluster], detail=False, replay=True
        )
    except FsdptoolError:
        return []
    if judged.device_total_bytes is None or judged.usable_bytes is None:
        return []
    # DDP's buckets hold every gradient once more, from before the first step on.
    total = judged.device_total_bytes + estimator.states(single, alone)["gradients"]
    if total > (1 - HEADROOM) * judged.usable_bytes:
        return []
    return [
        Diagnostic(
            "PLN011",
            "info",
            f"FSDP is not needed: the whole run fits one {cluster.gpu.name} ({amount(total)} of"
            f" {amount(judged.usable_bytes)} with DDP's buckets)",
            help="DDP communicates a third less; use FSDP for larger batches or models, not for fit",
        )
    ]


_LISTED = re.compile(r"\.experts\.(\d+)\.")


def experts_of(parameters: Iterable[Parameter]) -> int | None:
    """Return how many experts a layer routes tokens to, or None if it has none.

    Fused experts are stacked in one tensor below an ``experts`` module; others are listed there.
    """
    count = 0
    for parameter in parameters:
        listed = _LISTED.search(f".{parameter.fqn}")
        if listed is not None:
            count = max(count, int(listed[1]) + 1)
        elif ".experts." in f".{parameter.fqn}" and len(parameter.shape) == 3:
            count = max(count, parameter.shape[0])
    return count if count > 1 else None


def routing(parameters: Iterable[Parameter], candidate: Candidate) -> dict[str, Any] | None:
    """Return the allocated peak under balanced and under the worst routing, and why; None without experts.

    A trace runs without values, so what it holds cannot depend on which expert a token goes to: the
    products of all routed tokens are grouped, or every expert has room for a fixed number of them. A
    model that loops over the experts it hits cannot be traced, and both figures are unknown.
    """
    count = experts_of(parameters)
    if count is None:
        return None
    peak = candidate.allocated_peak_bytes
    if peak is None:
        reason = "what each expert gets decides the sizes of its products, which cannot be known in advance"
    else:
        reason = "all routed tokens are computed together, in buffers whose size no routing changes"
    return {"experts": count, "balanced_bytes": peak, "worst_case_bytes": peak, "reason": reason}


def routing_note(told: Mapping[str, Any]) -> str:
    """Return :func:`routing` in one line."""
    return (
        f"{told['experts']} experts: balanced routing peaks at {amount(told['balanced_bytes'])} allocated,"
        f" the worst at {amount(told['worst_case_bytes'])}: {told['reason']}"
    )
