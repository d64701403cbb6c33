"""Offers of clusters side by side: the best configuration of each, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence

from fsdptool.planning.clusters import describe
from fsdptool.records.plan import Candidate, PlanInputs
from fsdptool.records.plan_details import PlannedOffer


def describe_offers(
    inputs: PlanInputs, candidates: Sequence[Candidate], best: Sequence[str | None]
) -> tuple[PlannedOffer, ...]:
    """Return one offer per cluster, in the order they were named.

    Args:
        inputs: The clusters, and the recipe's number of steps.
        candidates: Everything that was evaluated.
        best: Id of the best candidate of each cluster; None where none fits.
    """
    known = {candidate.id: candidate for candidate in candidates}
    offers = []
    for cluster, name in zip(inputs.clusters, best, strict=True):
        candidate = known.get(name) if name is not None else None
        per_hour = None
        if cluster.price_per_gpu_hour is not None:
            per_hour = cluster.price_per_gpu_hour * cluster.world_size
        offers.append(
            PlannedOffer(
                name=cluster.name or describe(cluster),
                cluster=describe(cluster),
                candidate=name,
                price_per_hour=per_hour,
                **_costs(candidate, per_hour, inputs.recipe.steps),
            )
        )
    return tuple(offers)


def _costs(candidate: Candidate | None, per_hour: float | None, steps: int | None) -> dict[str, float | None]:
    seconds = candidate.step_seconds if candidate is not None else None
    tokens = candidate.tokens_per_second if candidate is not None else None
    run = seconds * steps if seconds is not None and steps is not None else None
    per_second = per_hour / 3600 if per_hour is not None else None
    return {
        "price_per_million_tokens": per_second / tokens * 1e6 if per_second is not None and tokens else None,
        "price_per_run": per_second * run if per_second is not None and run is not None else None,
        "run_seconds": run,
    }
