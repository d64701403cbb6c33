"""Micro-batches: the largest one that fits, and what the memory that is left free would buy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.candidate.verdict import HEADROOM, least_device_bytes
from fsdptool.planning.request.recipe import MAX_TOKENS
from fsdptool.planning.search.choice import SAME, roomy
from fsdptool.planning.search.search import Progress
from fsdptool.records.plan import Candidate, PlanInputs, SearchPoint
from fsdptool.records.plan_details import LargestBatch, TriedSettings
from fsdptool.records.trace import ColourGroup, Component

_LIMIT = 1 << 16
"""Largest micro-batch to try, where ``MAX_TOKENS`` is not reached before."""

_LARGEST_FACTOR = 64
"""By how much a micro-batch is enlarged at most to use spare memory: beyond, matrix products gain nothing."""


def largest_batch(
    estimator: Estimator,
    inputs: PlanInputs,
    requested: Sequence[SearchPoint],
    *,
    progress: Progress | None = None,
) -> tuple[list[SearchPoint], tuple[LargestBatch, ...]]:
    """Return the requested points with the micro-batch that makes the most of the memory, per cluster.

    Settings of activation checkpointing and resharding that are left open are tried as well, each with the
    largest micro-batch that fits with headroom; of those the fastest is taken. With a global batch only its
    divisors are tried, and accumulation makes up the rest; otherwise the global batch grows.

    Returns:
        The points (unchanged where nothing fits), and what was tried on each cluster.
    """
    results, attempts = [], []
    for point in requested:
        variants: list[tuple[SearchPoint, Candidate | None, dict[int, Candidate]]] = []
        for variant in _variants(point, inputs):
            tried: dict[int, Candidate] = {}
            size = _largest_size(_Sizes(estimator, inputs, variant, tried, progress), inputs)
            variants.append((variant, None if size is None else tried[size], tried))
        best = _fastest([candidate for _, candidate, _ in variants if candidate is not None])
        taken = next((tried for _, candidate, tried in variants if candidate is best), variants[0][2])
        results.append(best.settings if best is not None else point)
        attempts.append(
            LargestBatch(
                cluster=point.cluster,
                micro_batch=best.settings.micro_batch if best is not None else None,
                tried={str(size): c.device_total_bytes for size, c in sorted(taken.items())},
                settings=tuple(_describe(variant, candidate) for variant, candidate, _ in variants),
            )
        )
    return results, tuple(attempts)


def _variants(point: SearchPoint, inputs: PlanInputs) -> list[SearchPoint]:
    """Return the point and what differs from it in the open settings that trade time for memory."""
    native = point.layout == "native"
    modes: tuple[str, ...] = ("none", "selective", "full") if native else ("none", "full")
    if "checkpointing" in inputs.fixed or inputs.clusters[point.cluster].gpu is None:
        modes = (point.checkpointing,)
    reshards: tuple[bool | int, ...] = (True, False)
    if "reshard_after_forward" in inputs.fixed or len(modes) == 1 or point.dp_shard * point.cp == 1:
        reshards = (point.reshard_after_forward,)
    others = [
        replace(point, checkpointing=mode, reshard_after_forward=reshard)
        for mode, reshard in product(modes, reshards)
    ]
    return list(dict.fromkeys([point, *others]))


def _fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the fastest candidate, the first of equally fast ones; by size where no time is known."""
    if any(candidate.samples_per_second is None for candidate in candidates):
        return max(candidates, key=lambda c: c.settings.global_batch, default=None)
    speed = max((c.samples_per_second or 0.0 for c in candidates), default=0.0)
    return next((c for c in candidates if (c.samples_per_second or 0.0) >= speed * (1 - SAME)), None)


def _describe(variant: SearchPoint, candidate: Candidate | None) -> TriedSettings:
    return TriedSettings(
        checkpointing=variant.checkpointing,
        reshard_after_forward=variant.reshard_after_forward,
        micro_batch=candidate.settings.micro_batch if candidate is not None else None,
        accumulation=candidate.settings.accumulation if candidate is not None else None,
        device_total_bytes=candidate.device_total_bytes if candidate is not None else None,
        samples_per_second=candidate.samples_per_second if candidate is not None else None,
        tokens_per_second=candidate.tokens_per_second if candidate is not None else None,
    )


class _Sizes:
    """Evaluates one configuration at several micro-batches and keeps what was tried."""

    def __init__(
        self,
        estimator: Estimator,
        inputs: PlanInputs,
        point: SearchPoint,
        tried: dict[int, Candidate],
        progress: Callable[[str], None] | None,
    ) -> None:
        self.estimator, self.inputs, self.point = estimator, inputs, point
        self.tried, self.progress = tried, progress
        batch = inputs.recipe.batch.global_batch
        self.share = None if batch is None else point.micro_batch * point.accumulation

    def fits(self, size: int) -> bool:
        """Return whether a micro-batch fits with headroom."""
        if size not in self.tried:
            if self.progress is not None:
                self.progress(f"trying micro-batch {size} (checkpointing {self.point.checkpointing})")
            accumulation = self.point.accumulation if self.share is None else self.share // size
            trial = replace(self.point, micro_batch=size, accumulation=accumulation)
            place = trial.cluster
            self.tried[size] = self.estimator.candidate(
                f"b{size}",
                trial,
                self.inputs.clusters[place],
                self.inputs.machines[place],
                detail=False,
                replay=True,
            )
        return self.tried[size].rejected_by is None and roomy(self.tried[size])


def _largest_size(sizes: _Sizes, inputs: PlanInputs) -> int | None:
    """Return the largest micro-batch that fits with headroom; every size that decides it is traced.

    Memory is close to affine in the micro-batch, so a line through two traces points at the answer
    and a few more traces around it settle it.
    """
    if sizes.share is not None:
        return _largest_divisor(sizes, sizes.share)
    tried, fits = sizes.tried, sizes.fits
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


def _largest_divisor(sizes: _Sizes, share: int) -> int | None:
    """Return the largest divisor of a rank's share of the global batch that fits, by bisection."""
    divisors = [size for size in range(1, min(share, _LIMIT) + 1) if share % size == 0]
    low, high = -1, len(divisors)
    while high - low > 1:
        middle = (low + high) // 2
        if sizes.fits(divisors[middle]):
            low = middle
        else:
            high = middle
    return divisors[low] if low >= 0 else None


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


def spend_spare_memory(estimator: Estimator, inputs: PlanInputs, chosen: Candidate) -> Candidate | None:
    """Return the chosen configuration with the larger micro-batch that its spare memory allows.

    Micro-batches grow by powers of two. What grows with them at the chosen peak gives an upper bound. The
    highest of many levels that each grow linearly is convex, so a line through the chosen micro-batch and
    its double is a lower bound of larger ones: a size that it excludes is not traced. A trace settles the
    others, and the allocator is replayed for what fits without it.

    Args:
        estimator: Evaluates a configuration.
        inputs: The canonical inputs.
        chosen: Fits.

    Returns:
        A candidate that fits with headroom and is faster by more than the error of the estimate; None where
        there is none.
    """
    point, speed = chosen.settings, chosen.samples_per_second
    if chosen.usable_bytes is None or chosen.device_total_bytes is None or not speed:
        return None
    groups = (ColourGroup.ACTIVATIONS, ColourGroup.PASSING)
    growing = sum(item.bytes or 0 for item in chosen.components if Component(item.name).group in groups)
    room = (1 - HEADROOM) * chosen.usable_bytes - chosen.device_total_bytes
    tokens = point.micro_batch * (inputs.recipe.batch.sequence_length or 1)
    most = min(1 + int(room / growing) if growing and room > 0 else 1, MAX_TOKENS // tokens, _LARGEST_FACTOR)
    factor = 1 << (most.bit_length() - 1) if most > 1 else 1

    def enlarged(factor: int, *, replay: bool = False) -> Candidate:
        return estimator.candidate(
            "spare",
            replace(point, micro_batch=point.micro_batch * factor),
            inputs.clusters[point.cluster],
            inputs.machines[point.cluster],
            detail=False,
            replay=replay,
        )

    limit = (1 - HEADROOM) * chosen.usable_bytes
    # Where a mask begins at the double, the line is too steep, and would exclude sizes that fit.
    masked_from = inputs.loop.masked_from_rows
    if factor > 2 and not point.micro_batch < masked_from <= 2 * point.micro_batch:
        first, second = least_device_bytes(chosen), least_device_bytes(enlarged(2))
        while factor > 2 and first and second and first + (second - first) * (factor - 1) > limit:
            factor //= 2
    while factor > 1:
        least = least_device_bytes(enlarged(factor))
        if least is not None and least <= limit:
            larger = enlarged(factor, replay=True)
            if larger.rejected_by is None and roomy(larger):
                return larger if (larger.samples_per_second or 0) > speed * (1 + SAME) else None
        factor //= 2
    return None
