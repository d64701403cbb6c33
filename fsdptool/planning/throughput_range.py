"""How far published throughput lay from our plans of the same runs, and the range of a plan that follows.

The range is a weighted split-conformal one (Tibshirani et al. 2019, "Conformal prediction under covariate
shift"): the 10th and the 90th percentile of the logarithm of published over planned throughput. Runs that
resemble the planned one count for more in it, and each run of a source that published many for less. The
weights and the widening were chosen so that four of five runs lie in the range that the runs of all other
sources give (``benchmarks/planning/published.py``, which also writes the data).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from fsdptool.planning.hardware import machine_for
from fsdptool.records.cluster import Cluster, Gpu
from fsdptool.records.plan import RangeBasis, SearchPoint

_DATA = Path(__file__).parent / "data" / "published_errors.json"

Division = Literal["dense", "float8", "tensor", "pipeline", "mixture"]
"""What divides the model or rounds its products, as far as it changes how well a step's time is known."""

TAIL = 0.1
"""Share of the runs below the range, and above it."""
_SAME_PRODUCT = 2.0
_SAME_GENERATION = 4.0
_SAME_DIVISION = 2.0
"""How many times a published run counts that shares this with the planned one. The last also divides the
weight of a run that is a mixture of experts where the other is none."""
_WIDENED = 1.3
"""Distance of each end from the median, over that of the percentile, which alone would contain 65 %."""
_NEAREST = 5


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
    rows = json.loads(_DATA.read_text(encoding="utf-8"))["rows"]
    return tuple(PublishedError(**row) for row in rows)


def division_of(point: SearchPoint, *, float8: bool, mixture: bool) -> Division:
    """Return what divides the model of a candidate; ``mixture``: it has experts."""
    if mixture or point.ep > 1:
        return "mixture"
    if point.tp > 1:
        return "tensor"
    return "float8" if float8 else "dense"


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
    many = Counter(item.source for item in errors)
    weights = [_likeness(item, gpu, generation, division) / math.sqrt(many[item.source]) for item in errors]
    logarithms = [math.log(item.ratio) for item in errors]
    ordered = sorted(zip(logarithms, weights, strict=True))
    middle = _percentile(ordered, 0.5)
    # The planned run takes a place among the others, at the end.
    total = sum(weights)
    effective = total * total / sum(weight * weight for weight in weights)
    tail = TAIL * (1 - 1 / (effective + 1))
    low, high = _percentile(ordered, tail), _percentile(ordered, 1 - tail)
    near = [item for item in errors if item.generation == generation and item.division == division]
    likest = sorted(zip(weights, errors, strict=True), key=lambda pair: -pair[0])
    return ThroughputRange(
        math.exp(middle - _WIDENED * (middle - low)),
        math.exp(middle + _WIDENED * (high - middle)),
        RangeBasis(
            rows=len(errors),
            sources=len(many),
            alike=len(near),
            alike_sources=len({item.source for item in near}),
            nearest=tuple(
                f"{item.id}: {item.what}: {item.ratio:.2f} of the plan" for _, item in likest[:_NEAREST]
            ),
        ),
    )


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


def _likeness(item: PublishedError, gpu: str, generation: str, division: Division) -> float:
    weight = _SAME_PRODUCT if item.gpu == gpu else 1.0
    if item.generation == generation:
        weight *= _SAME_GENERATION
    if item.division == division:
        weight *= _SAME_DIVISION
    alike = (item.division == "mixture") == (division == "mixture")
    return weight * _SAME_DIVISION if alike else weight / _SAME_DIVISION


def _percentile(ordered: Sequence[tuple[float, float]], share: float) -> float:
    """Return the value at which the weights of sorted (value, weight) pairs reach a share of their sum."""
    wanted = share * sum(weight for _, weight in ordered)
    reached = 0.0
    for value, weight in ordered:
        reached += weight
        if reached >= wanted:
            return value
    return ordered[-1][0]
