"""Weighted split-conformal ranges: what published runs say about a planned one.

Tibshirani et al. 2019, "Conformal prediction under covariate shift": the 10th and the 90th percentile of the
logarithm of published over planned. Runs that resemble the planned one count for more, and each run of a
source that published many for less. :mod:`~fsdptool.planning.candidate.throughput_range` and
:mod:`~fsdptool.planning.candidate.memory_range` say what resembles what.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from fsdptool.records.plan import RangeBasis

PUBLISHED = Path(__file__).parents[1] / "data" / "published_errors.json"
"""How far published runs lay from our plans of them (``benchmarks/planning/published.py`` writes it)."""

TAIL = 0.1
"""Share of the runs below a range, and above it."""
_NEAREST = 5


class PublishedFigure(Protocol):
    """A published run beside its plan."""

    @property
    def id(self) -> str:
        """Its name in ``benchmarks/planning/published.jsonl``."""

    @property
    def source(self) -> str:
        """Who published it; one source may have many runs."""

    @property
    def what(self) -> str:
        """Model and hardware."""

    @property
    def ratio(self) -> float:
        """Published over planned."""


RunT = TypeVar("RunT", bound=PublishedFigure)


@dataclass(frozen=True, slots=True)
class Spread:
    """Weighted ratios around their median.

    Attributes:
        low, high: Factors on a plan: the 10th and the 90th percentile, widened.
        ratios: Every run's factor, widened, with its weight; sorted.
        basis: What it rests on.
    """

    low: float
    high: float
    ratios: tuple[tuple[float, float], ...]
    basis: RangeBasis

    def share(self, holds: Callable[[float], bool]) -> float:
        """Return the share of the runs, by weight, with whose factor something holds."""
        total = sum(weight for _, weight in self.ratios)
        return sum(weight for factor, weight in self.ratios if holds(factor)) / total


def spread_of(
    runs: Sequence[RunT],
    likeness: Callable[[RunT], float],
    alike: Callable[[RunT], bool],
    *,
    widened: float,
) -> Spread:
    """Return the range that published runs give a plan.

    Args:
        runs: Published runs; those of the run's own source must not be among them if it is to be judged.
        likeness: How often a run counts before the runs of its source share their weight.
        alike: Whether a run is of the planned one's kind, which the range states.
        widened: Distance of each end from the median, over that of the percentile.
    """
    many = Counter(item.source for item in runs)
    weights = [likeness(item) / math.sqrt(many[item.source]) for item in runs]
    logarithms = [math.log(item.ratio) for item in runs]
    ordered = sorted(zip(logarithms, weights, strict=True))
    middle = _percentile(ordered, 0.5)
    # The planned run takes a place among the others, at the end.
    total = sum(weights)
    effective = total * total / sum(weight * weight for weight in weights)
    tail = TAIL * (1 - 1 / (effective + 1))

    def widen(value: float) -> float:
        return math.exp(middle + widened * (value - middle))

    near = [item for item in runs if alike(item)]
    likest = sorted(zip(weights, runs, strict=True), key=lambda pair: -pair[0])
    return Spread(
        widen(_percentile(ordered, tail)),
        widen(_percentile(ordered, 1 - tail)),
        tuple((widen(value), weight) for value, weight in ordered),
        RangeBasis(
            rows=len(runs),
            sources=len(many),
            alike=len(near),
            alike_sources=len({item.source for item in near}),
            nearest=tuple(
                f"{item.id}: {item.what}: {item.ratio:.2f} of the plan" for _, item in likest[:_NEAREST]
            ),
        ),
    )


def _percentile(ordered: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value at which the weights of sorted (value, weight) pairs reach a share of their sum."""
    wanted = share * sum(weight for _, weight in ordered)
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted:
            return value
    return ordered[-1][0]
