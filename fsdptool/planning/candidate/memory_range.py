"""How far published reserved memory lay from our plans of the same runs, and what that says of a plan.

What a caching allocator reserves depends on fragmentation, on the libraries' workspaces and on what a
program keeps beside its model. The runs that published it say how far a plan may be off. The weights and the
widening were chosen so that four of five runs lie in the range that the runs of all other sources give
(``benchmarks/planning/published.py``, which also writes the data).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from fsdptool.files.values import read_data
from fsdptool.planning.candidate.conformal import PUBLISHED, Spread, spread_of
from fsdptool.planning.candidate.throughput_range import Division, division_weight

_SAME_SEGMENTS = 2.0
_SAME_SHARDING = 2.0
"""How many times a published run counts that shares this with the planned one."""
_WIDENED = 1.15
"""Distance of each end from the median, over that of the percentile, which alone would contain 74 %."""


@dataclass(frozen=True, slots=True)
class PublishedPeak:
    """One run that published its reserved peak.

    Attributes:
        id: Its name in ``benchmarks/planning/published.jsonl``.
        source: Who published it; one source may have many runs.
        what: Model and hardware.
        expandable: Whether its allocator's segments grow (``expandable_segments``).
        sharded: Whether it ran on several GPUs.
        division: Of the model.
        ratio: Published over planned reserved peak.
    """

    id: str
    source: str
    what: str
    expandable: bool
    sharded: bool
    division: Division
    ratio: float


@cache
def published_peaks() -> tuple[PublishedPeak, ...]:
    """Return the shipped runs."""
    rows = read_data(PUBLISHED)["reserved"]
    return tuple(PublishedPeak(**row) for row in rows)


def reserved_spread(
    expandable: bool, sharded: bool, division: Division, peaks: Sequence[PublishedPeak]
) -> Spread:
    """Return the factors on a planned reserved peak.

    Args:
        expandable: Whether the planned run's segments grow.
        sharded: Whether it has several GPUs.
        division: Of its model.
        peaks: Published runs; those of the run's own source must not be among them if it is to be judged.
    """

    def likeness(item: PublishedPeak) -> float:
        weight = _SAME_SEGMENTS if item.expandable == expandable else 1.0
        if item.sharded == sharded:
            weight *= _SAME_SHARDING
        return weight * division_weight(division, item.division)

    def alike(item: PublishedPeak) -> bool:
        same = item.expandable == expandable and item.sharded == sharded
        return same and item.division == division

    return spread_of(peaks, likeness, alike, widened=_WIDENED)


@cache
def shipped_spread(expandable: bool, sharded: bool, division: Division) -> Spread:
    """Return the same by all shipped runs."""
    return reserved_spread(expandable, sharded, division, published_peaks())
