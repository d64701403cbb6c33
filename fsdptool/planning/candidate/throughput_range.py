"""How far published throughput lay from our plans of the same runs, and the range of a plan that follows.

The weights and the widening were chosen so that four of five runs lie in the range that the runs of all other
sources give (``benchmarks/planning/published.py``, which also writes the data).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from fsdptool.files.values import read_data
from fsdptool.planning.candidate.conformal import PUBLISHED, spread_of
from fsdptool.planning.hardware import machine_for
from fsdptool.records.cluster import Cluster, Gpu
from fsdptool.records.plan import RangeBasis, SearchPoint

Division = Literal["dense", "float8", "tensor", "pipeline", "mixture"]
"""What divides the model or rounds its products, as far as it changes how well a plan is known."""

_SAME_PRODUCT = 2.0
_SAME_GENERATION = 4.0
_SAME_DIVISION = 2.0
"""How many times a published run counts that shares this with the planned one. The last also divides the
weight of a run that is a mixture of experts where the other is none."""
_WIDENED = 1.3
"""Distance of each end from the median, over that of the percentile, which alone would contain 65 %."""


@dataclass(frozen=True, slots=True)
class PublishedError:
    """One published run.

    Attributes:
        id: Its name in ``benchmarks/planning/published.jsonl``.
        source: Who published it; one source may have many runs.
        what: Model and hardware.
        gpu: Catalogue name.
        generation: The GPU's (:attr:`~fsdptool.records.cluster.Machine.architecture`).
        division: Of the model.
        ratio: Published over planned throughput.
    """

    id: str
    source: str
    what: str
    gpu: str
    generation: str
    division: Division
    ratio: float


@dataclass(frozen=True, slots=True)
class ThroughputRange:
    """Factors on a planned throughput: the 10th and the 90th percentile, and what they rest on."""

    slow: float
    fast: float
    basis: RangeBasis


@cache
def published_errors() -> tuple[PublishedError, ...]:
    """Return the shipped runs."""
    rows = read_data(PUBLISHED)["rows"]
    return tuple(PublishedError(**row) for row in rows)


def division_of(point: SearchPoint, *, float8: bool, mixture: bool) -> Division:
    """Return what divides the model of a candidate; ``mixture``: it has experts."""
    if mixture or point.ep > 1:
        return "mixture"
    if point.tp > 1:
        return "tensor"
    return "float8" if float8 else "dense"


def division_weight(planned: Division, published: Division) -> float:
    """Return how many times a published run counts for what divides its model."""
    weight = _SAME_DIVISION if planned == published else 1.0
    alike = (planned == "mixture") == (published == "mixture")
    return weight * _SAME_DIVISION if alike else weight / _SAME_DIVISION


def throughput_range(
    gpu: str, generation: str, division: Division, errors: Sequence[PublishedError]
) -> ThroughputRange:
    """Return the range of a plan.

    Args:
        gpu: Catalogue name of its GPU.
        generation: The GPU's.
        division: Of its model.
        errors: Published runs; those of the run's own source must not be among them if it is to be judged.
    """

    def likeness(item: PublishedError) -> float:
        weight = _SAME_PRODUCT if item.gpu == gpu else 1.0
        if item.generation == generation:
            weight *= _SAME_GENERATION
        return weight * division_weight(division, item.division)

    def alike(item: PublishedError) -> bool:
        return item.generation == generation and item.division == division

    found = spread_of(errors, likeness, alike, widened=_WIDENED)
    return ThroughputRange(found.low, found.high, found.basis)


def range_of(cluster: Cluster, division: Division) -> ThroughputRange | None:
    """Return the range of a plan on a cluster of catalogued GPUs; None on CPUs."""
    if cluster.gpu is None:
        return None
    return _cached(cluster.gpu.name, generation_of(cluster.gpu), division)


def generation_of(gpu: Gpu) -> str:
    """Return the name of the GPU's generation."""
    return machine_for(gpu).architecture


@cache
def _cached(gpu: str, generation: str, division: Division) -> ThroughputRange:
    return throughput_range(gpu, generation, division, published_errors())
