"""The choice among evaluated configurations, and what each of the others is rejected for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from fsdptool.formatting import amount
from fsdptool.planning.candidate.point import changed_settings
from fsdptool.planning.candidate.verdict import HEADROOM
from fsdptool.records.plan import Candidate, Rejection, RejectionKind, SearchPoint

SAME = 0.02
"""Relative difference in speed (or price) below which two configurations count as equally good."""


@dataclass(frozen=True, slots=True)
class EarlyEnd:
    """A search that did not evaluate every configuration.

    Attributes:
        interrupted: Whether it was told to end; else it ended at the first configuration that fits.
        evaluated: Configurations that were evaluated of those around the point that it had reached.
        of: How many there are.
    """

    interrupted: bool
    evaluated: int
    of: int


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Every candidate that was evaluated, and what became of it.

    Attributes:
        candidates: All of them; of each cluster the requested one first.
        chosen: Id of the chosen candidate; None where none fits.
        front: Ids of the Pareto front of speed and allocated memory.
        requested: Id of the requested candidate of each cluster.
        best: Id of the best candidate of each cluster; None where none fits.
        ended: How the search ended early; None where it did not.
    """

    candidates: tuple[Candidate, ...]
    chosen: str | None
    front: tuple[str, ...]
    requested: tuple[str, ...]
    best: tuple[str | None, ...] = ()
    ended: EarlyEnd | None = None


def choose(
    candidates: Sequence[Candidate],
    requested: Sequence[str],
    *,
    prefer: str = "speed",
    among: Collection[str] | None = None,
) -> SearchResult:
    """Choose the fastest (or cheapest) candidate that fits with headroom; deterministic.

    Differences below :data:`SAME` are within the time model's error: among those the least memory
    wins, then what changes the fewest settings, then the earlier candidate. CPU offload is chosen only where
    nothing else fits or where it is faster by more than that error: it moves the optimizer to the host, whose
    speed and memory are known least. Without any that leave headroom, the others are eligible.

    Args:
        candidates: Everything that was evaluated.
        requested: Ids of the requested candidates.
        prefer: ``speed`` or ``price``.
        among: Ids that may be chosen; None: any.
    """
    fitting = [c for c in candidates if c.rejected_by is None]
    front = pareto(fitting)
    allowed = [c for c in fitting if among is None or c.id in among]
    eligible = [c for c in allowed if roomy(c)] or allowed
    if not eligible:
        return SearchResult(tuple(candidates), None, front, tuple(requested))
    best = max(merit(candidate, prefer) for candidate in eligible)
    resident = [c for c in eligible if not c.settings.cpu_offload]
    if any(merit(c, prefer) >= best * (1 - SAME) for c in resident):
        eligible = resident
    near = [c for c in eligible if merit(c, prefer) >= best * (1 - SAME)]
    start = {c.settings.cluster: c.settings for c in candidates if c.id in requested}
    place = {candidate.id: index for index, candidate in enumerate(candidates)}
    chosen = min(near, key=lambda c: (*_thrift(c, start[c.settings.cluster]), place[c.id]))
    explained = tuple(_reject(candidate, chosen, prefer) for candidate in candidates)
    return SearchResult(explained, chosen.id, front, tuple(requested))


def roomy(candidate: Candidate) -> bool:
    """Return whether the headroom stays free (always on hosts, where nothing is known of others)."""
    if candidate.slack_bytes is None or candidate.usable_bytes is None:
        return True
    return candidate.slack_bytes >= HEADROOM * candidate.usable_bytes


def pareto(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Return the ids no other candidate beats in both speed and allocated memory, fastest first.

    Allocated, because it is known of all alike; reserved memory is replayed for few.
    """
    known = [c for c in candidates if c.samples_per_second and c.allocated_peak_bytes is not None]
    known.sort(key=lambda c: (-(c.samples_per_second or 0), c.allocated_peak_bytes or 0))
    front: list[str] = []
    least: int | None = None
    for candidate in known:
        if least is None or (candidate.allocated_peak_bytes or 0) < least:
            front.append(candidate.id)
            least = candidate.allocated_peak_bytes
    return tuple(front)


def merit(candidate: Candidate, prefer: str) -> float:
    """Return samples per second, or per unit of money."""
    price = candidate.price_per_million_samples
    if prefer == "price" and price:
        return 1 / price
    return candidate.samples_per_second or 0.0


def _thrift(candidate: Candidate, start: SearchPoint) -> tuple[int, int]:
    """Memory in steps of 64 MiB, and how many settings differ from what was requested."""
    changed = len(changed_settings(start, candidate.settings))
    return (candidate.allocated_peak_bytes or 0) // (64 * 2**20), changed


def _reject(candidate: Candidate, chosen: Candidate, prefer: str) -> Candidate:
    if candidate.id == chosen.id or candidate.rejected_by is not None:
        return candidate
    return replace(candidate, rejected_by=_rejection(candidate, chosen, prefer))


def _rejection(candidate: Candidate, chosen: Candidate, prefer: str) -> Rejection:
    """Return why a candidate that fits was not chosen."""
    if not roomy(candidate) and roomy(chosen):
        free = f"leaves only {amount(candidate.slack_bytes)} free; the search keeps {HEADROOM:.0%} free"
        return Rejection(RejectionKind.HEADROOM, free)
    own, best = merit(candidate, prefer), merit(chosen, prefer)
    by_price = prefer == "price"
    if own < best:
        factor = best / own - 1 if own else float("inf")
        if by_price:
            return Rejection(RejectionKind.PRICE, f"{factor:.1%} more expensive per sample than {chosen.id}")
        slower = f"{factor:.1%} slower than" if factor < 1 else f"{1 + factor:.1f} times as slow as"
        return Rejection(RejectionKind.SPEED, f"{slower} {chosen.id}")
    extra = (candidate.allocated_peak_bytes or 0) - (chosen.allocated_peak_bytes or 0)
    if candidate.settings.cpu_offload and not chosen.settings.cpu_offload:
        gain = f"at most {SAME:.0%} {'cheaper' if by_price else 'faster'} than {chosen.id}"
        return Rejection(RejectionKind.CPU_OFFLOAD, f"{gain}, which runs the optimizer on the GPUs")
    if extra > 0:
        better = "cheaper per sample" if by_price else "faster"
        clear = best and own > best * 1.0005
        gain = f"only {own / best - 1:.1%} {better}" if clear else f"not {better}"
        detail = f"{gain} than {chosen.id} and needs {amount(extra)} more memory"
        return Rejection(RejectionKind.MEMORY_FOR_SPEED, detail)
    detail = f"equivalent to {chosen.id}, which changes fewer of your settings"
    return Rejection(RejectionKind.MORE_CHANGES, detail)
