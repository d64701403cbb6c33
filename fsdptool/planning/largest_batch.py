"""The largest micro-batch that fits, found by estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from fsdptool.planning.estimator import Estimator
from fsdptool.planning.requested_recipe import MAX_TOKENS
from fsdptool.planning.search import roomy
from fsdptool.records.plan import Candidate, PlanInputs, SearchPoint

_LIMIT = 1 << 16
"""Largest micro-batch to try, where ``MAX_TOKENS`` is not reached before."""


def largest_batch(
    estimator: Estimator,
    inputs: PlanInputs,
    requested: Sequence[SearchPoint],
    *,
    progress: Callable[[str], None] | None = None,
) -> tuple[list[SearchPoint], list[dict[str, Any]]]:
    """Return the requested points with the largest micro-batch that fits with headroom, per cluster.

    Memory is close to affine in the micro-batch, so a line through two traces points at the answer
    and a few more traces around it settle it; every size named is traced.

    Returns:
        The points (unchanged where nothing fits), and the sizes that were tried.
    """
    results, attempts = [], []
    for point in requested:
        tried: dict[int, Candidate] = {}
        best = _search(estimator, inputs, point, tried, progress)
        results.append(point if best is None else replace(point, micro_batch=best))
        attempts.append(
            {
                "cluster": point.cluster,
                "micro_batch": best,
                "tried": {str(size): c.device_total_bytes for size, c in sorted(tried.items())},
            }
        )
    return results, attempts


def _search(
    estimator: Estimator,
    inputs: PlanInputs,
    point: SearchPoint,
    tried: dict[int, Candidate],
    progress: Callable[[str], None] | None,
) -> int | None:
    def fits(size: int) -> bool:
        if size not in tried:
            if progress is not None:
                progress(f"trying micro-batch {size}")
            trial = replace(point, micro_batch=size)
            place = point.cluster
            tried[size] = estimator.candidate(
                f"b{size}", trial, inputs.clusters[place], inputs.machines[place], detail=False, replay=True
            )
        return tried[size].rejected_by is None and roomy(tried[size])

    limit = max(min(_LIMIT, MAX_TOKENS // (inputs.recipe.batch.sequence_length or 1)), 2)
    if not fits(1):
        return None
    if not fits(2):
        return 1
    low, high = 2, min(_guess(tried), limit)
    while fits(high):
        low = high
        if high >= limit:
            return high
        high = min(max(_guess(tried), high + max(high // 8, 1)), limit)
    while high - low > 1:
        # No nearer to either end than an eighth: small models' lines are crooked (segments of 2 and 20
        # MiB), and a guess that is always one too low would try thousands of sizes.
        margin = max((high - low) // 8, 1)
        guess = _guess({k: v for k, v in tried.items() if k <= low})
        middle = min(max(guess, low + margin), high - margin)
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _guess(tried: dict[int, Candidate]) -> int:
    """Where the line through the two largest tried sizes meets the memory there is."""
    first, second = sorted(tried)[-2:] if len(tried) > 1 else (1, 2)
    a, b = tried[first], tried[second]
    if a.device_total_bytes is None or b.device_total_bytes is None or b.usable_bytes is None:
        return second + 1
    each = (b.device_total_bytes - a.device_total_bytes) / (second - first)
    if each <= 0:
        return second * 2
    room = 0.95 * b.usable_bytes - b.device_total_bytes
    return max(second + int(room / each), second + 1)
