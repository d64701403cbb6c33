"""Weigh many configurations, choose one, and say for each of the others why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdptool.planning.judge import HEADROOM, gib
from fsdptool.planning.knobs import Knobs
from fsdptool.planning.predict import Estimator
from fsdptool.planning.request import PlanInputs
from fsdptool.planning.space import enumerate_space
from fsdptool.records.plan import Candidate

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Weighed:
    """Every candidate, the asked ones (one per cluster) first; ``chosen`` is an id or None."""

    candidates: tuple[Candidate, ...]
    chosen: str | None
    front: tuple[str, ...]
    asked: tuple[str, ...]


def weigh(
    estimator: Estimator,
    inputs: PlanInputs,
    asked: Sequence[Knobs],
    *,
    progress: Progress | None = None,
) -> Weighed:
    """Judge what was asked and, if a search is wanted, every configuration around it.

    Args:
        estimator: Judges one configuration.
        inputs: The canonical inputs.
        asked: Where the person stands on each cluster.
        progress: Called with a line now and then.
    """
    candidates: list[Candidate] = []
    asked_ids: list[str] = []
    for knobs in asked:
        cluster, machine = inputs.clusters[knobs.cluster], inputs.machines[knobs.cluster]
        name = "asked" if len(asked) == 1 else f"asked{knobs.cluster}"
        asked_ids.append(name)
        space = [knobs]
        if inputs.search != "none":
            space = list(
                enumerate_space(
                    knobs,
                    cluster,
                    estimator.anatomy,
                    fixed=inputs.fixed,
                    wide=inputs.search == "wide",
                    sequence_length=inputs.recipe.batch.sequence_length,
                    hardware=cluster.gpu is not None,
                )
            )
        for point in space:
            label = name if point == knobs else f"c{len(candidates):04d}"
            if progress is not None and len(candidates) % 100 == 99:
                progress(f"weighed {len(candidates) + 1} configurations")
            candidates.append(estimator.candidate(label, point, cluster, machine, detail=label == name))
    return choose(candidates, asked_ids, prefer=inputs.prefer)


def choose(candidates: Sequence[Candidate], asked: Sequence[str], *, prefer: str = "speed") -> Weighed:
    """Choose the fastest (or cheapest) candidate that fits with headroom; deterministic.

    A single asked configuration that fits is taken even with less headroom. Ties go to less
    memory, then to the earlier candidate.
    """
    fitting = [c for c in candidates if c.rejected_by is None]
    eligible = [c for c in fitting if roomy(c)] or fitting
    place = {candidate.id: index for index, candidate in enumerate(candidates)}
    chosen = min(eligible, key=lambda c: (*_rank(c, prefer), place[c.id]), default=None)
    front = pareto(fitting)
    if chosen is None:
        return Weighed(tuple(candidates), None, front, tuple(asked))
    judged = tuple(_why_not(candidate, chosen, prefer) for candidate in candidates)
    return Weighed(judged, chosen.id, front, tuple(asked))


def roomy(candidate: Candidate) -> bool:
    """Return whether the headroom stays free (always on hosts, where nothing is known of others)."""
    if candidate.slack_bytes is None or candidate.usable_bytes is None:
        return True
    return candidate.slack_bytes >= HEADROOM * candidate.usable_bytes


def pareto(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Return the ids no other candidate beats in both speed and memory, fastest first."""
    known = [c for c in candidates if c.samples_per_second and c.device_total_bytes is not None]
    known.sort(key=lambda c: (-(c.samples_per_second or 0), c.device_total_bytes or 0))
    front: list[str] = []
    least: int | None = None
    for candidate in known:
        if least is None or (candidate.device_total_bytes or 0) < least:
            front.append(candidate.id)
            least = candidate.device_total_bytes
    return tuple(front)


def _rank(candidate: Candidate, prefer: str) -> tuple[float, int]:
    speed = candidate.samples_per_second or 0.0
    if prefer == "price" and candidate.price_per_million_samples is not None:
        return candidate.price_per_million_samples, candidate.device_total_bytes or 0
    # Three digits: a difference beyond them is far below the time model's error.
    return -float(f"{speed:.3g}"), candidate.device_total_bytes or 0


def _why_not(candidate: Candidate, chosen: Candidate, prefer: str) -> Candidate:
    if candidate.id == chosen.id or candidate.rejected_by is not None:
        return candidate
    return replace(candidate, rejected_by=_reason(candidate, chosen, prefer))


def _reason(candidate: Candidate, chosen: Candidate, prefer: str) -> str:
    if not roomy(candidate) and roomy(chosen):
        return f"headroom: only {gib(candidate.slack_bytes)} to spare, {HEADROOM:.0%} of the GPU is kept free"
    price, least = candidate.price_per_million_samples, chosen.price_per_million_samples
    if prefer == "price" and price is not None and least is not None and price > least * 1.001:
        return f"price: {price / least - 1:.1%} dearer per sample than {chosen.id}"
    speed, best = candidate.samples_per_second, chosen.samples_per_second
    if speed is not None and best is not None and speed < best * 0.9995:
        return f"speed: {best / speed - 1:.1%} slower than {chosen.id}"
    extra = (candidate.device_total_bytes or 0) - (chosen.device_total_bytes or 0)
    if extra > 0:
        return f"memory: no faster than {chosen.id} and needs {gib(extra)} more"
    return f"equal to {chosen.id}, which comes first"
