"""Micro-batches padded to their longest sample: plans of the median, 95th percentile and longest one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from fsdptool.inspection.micro_batch import planned_batch
from fsdptool.modeling.objective import objective_for
from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.records.lengths import LengthsPlan, PlannedLength, SampleLengths
from fsdptool.records.plan import Candidate, PlanInputs, SearchPoint
from fsdptool.records.recipe import PADDING_MULTIPLE

if TYPE_CHECKING:
    from fsdptool.records.anatomy import ModelSpec

PERCENTILES = (0.5, 0.95, 1.0)
"""The shares of micro-batches that are no longer than the planned lengths."""


def padded_length(length: int, limit: int) -> int:
    """Return the length that a micro-batch with a longest sample of ``length`` is padded to."""
    return min(-(-min(length, limit) // PADDING_MULTIPLE) * PADDING_MULTIPLE, limit)


class LongestSample:
    """The distribution of the longest of several samples that are drawn independently, padded.

    The probability that none of ``n`` samples is longer than some length is the ``n``-th power of the
    probability that one sample is not.

    Args:
        lengths: Of all samples.
        limit: Tokens to which a sample is truncated.
    """

    def __init__(self, lengths: SampleLengths, limit: int) -> None:
        counts: dict[int, int] = {}
        for item in lengths.counts:
            padded = padded_length(item.length, limit)
            counts[padded] = counts.get(padded, 0) + item.count
        self.lengths = sorted(counts)
        self._shares = [
            total / lengths.samples for total in accumulate(counts[length] for length in self.lengths)
        ]

    def percentile(self, share: float, samples: int) -> int:
        """Return the least length that the longest of ``samples`` exceeds with at most ``1 - share``."""
        # Shares of 1 are exact: the last sum is the number of samples.
        return self.lengths[bisect_left(self._shares, share ** (1 / samples))]

    def probabilities(self, samples: int) -> Iterator[tuple[int, float]]:
        """Yield each length with the probability that the longest of ``samples`` has it."""
        powers = [0.0, *(share**samples for share in self._shares)]
        for length, (before, upto) in zip(self.lengths, pairwise(powers), strict=True):
            yield length, upto - before


def plan_lengths(
    estimator: Estimator,
    inputs: PlanInputs,
    candidate: Candidate,
    *,
    progress: Callable[[str], None] | None = None,
) -> LengthsPlan | None:
    """Return what the lengths of ``inputs`` do to a configuration; None where nothing varies or is known.

    A note of the estimator gives the reason if the lengths cannot be planned.

    Args:
        estimator: Evaluates the model at the recipe's sequence length.
        inputs: With lengths.
        candidate: The configuration.
        progress: Called with a line of progress for each length.
    """
    lengths, data = inputs.lengths, inputs.recipe.data
    if lengths is None:
        return None
    point, limit = candidate.settings, inputs.recipe.batch.sequence_length or lengths.longest
    if data.padded != "longest":
        shape = "packed into" if data.padded == "packed" else "padded to"
        estimator.notes[
            f"samples are {shape} sequences of {limit:,} tokens, so that all steps have one shape: their"
            " lengths do not change memory"
        ] = None
        full = lengths.tokens(limit) / (lengths.samples * limit) if data.padded == "length" else 1.0
        speed = candidate.tokens_per_second
        speed = speed * full if speed is not None else None
        return _plan(lengths, inputs, limit, 1 - full, speed, (), candidate.allocated_peak_bytes)
    reason = _unsupported(estimator.spec, inputs, point)
    if reason is not None:
        estimator.notes[f"lengths were not planned: {reason}"] = None
        return None
    longest = LongestSample(lengths, limit)
    percentiles = [longest.percentile(share, point.micro_batch) for share in PERCENTILES]
    planned = []
    below = 0.0
    for length, share in dict(zip(percentiles, PERCENTILES, strict=True)).items():
        if progress is not None:
            progress(f"planning micro-batches of {length:,} tokens per sample")
        at_length = _candidate(estimator, inputs, point, length)
        if at_length.allocated_peak_bytes is None:
            estimator.notes["lengths were not planned: the activations are unknown"] = None
            return None
        planned.append(
            PlannedLength(
                length,
                share - below,
                at_length.allocated_peak_bytes,
                at_length.reserved_peak_bytes,
                at_length.step_seconds,
            )
        )
        below = share
    positions = sum(length * share for length, share in longest.probabilities(point.micro_batch))
    tokens = lengths.tokens(limit) / lengths.samples
    seconds = _step_seconds(longest, planned, point)
    samples = point.micro_batch * point.accumulation * point.data_parallel
    speed = tokens * samples / seconds if seconds else None
    return _plan(
        lengths,
        inputs,
        planned[-1].length,
        1 - tokens / positions,
        speed,
        tuple(planned),
        planned[-1].allocated_peak_bytes,
    )


def _plan(
    lengths: SampleLengths,
    inputs: PlanInputs,
    worst: int,
    padding: float,
    speed: float | None,
    planned: tuple[PlannedLength, ...],
    peak: int | None,
) -> LengthsPlan:
    limit = inputs.recipe.batch.sequence_length or lengths.longest
    return LengthsPlan(
        padding=inputs.recipe.data.padded,
        samples=lengths.samples,
        shortest=min(lengths.shortest, limit),
        longest=min(lengths.longest, limit),
        padding_share=padding,
        tokens_per_second=speed,
        traced=planned,
        worst_length=worst,
        worst_allocated_bytes=peak,
    )


def _unsupported(spec: ModelSpec, inputs: PlanInputs, point: SearchPoint) -> str | None:
    if "input_ids" not in {item.name for item in planned_batch(spec, inputs.recipe)}:
        return "the model does not train on text"
    if not objective_for(inputs.recipe, spec).single_length:
        return "the texts of a sample have lengths of their own"
    if point.cp > 1:
        return "ranks that share a sequence need one length for all"
    return None


def _candidate(estimator: Estimator, inputs: PlanInputs, point: SearchPoint, length: int) -> Candidate:
    """Return the configuration with sequences of ``length`` tokens."""
    recipe = estimator.run.recipe
    recipe = replace(recipe, batch=replace(recipe.batch, sequence_length=length))
    at_length = replace(estimator, run=replace(estimator.run, recipe=recipe))
    cluster, machine = inputs.clusters[point.cluster], inputs.machines[point.cluster]
    return at_length.candidate("length", point, cluster, machine, detail=False, replay=True)


def _step_seconds(longest: LongestSample, planned: list[PlannedLength], point: SearchPoint) -> float | None:
    """Return the mean time of a step, in which ranks wait for the longest of their micro-batches.

    Between two planned lengths time is interpolated; a shorter micro-batch takes as long as the median.
    """
    seconds = [item.step_seconds for item in planned]
    known = [value for value in seconds if value is not None]
    if len(known) < len(planned):
        return None
    lengths = [item.length for item in planned]

    def at(length: int) -> float:
        place = bisect_left(lengths, length)
        if place == 0:
            return known[0]
        part = (length - lengths[place - 1]) / (lengths[place] - lengths[place - 1])
        return known[place - 1] + part * (known[place] - known[place - 1])

    samples = point.micro_batch * point.data_parallel
    return sum(at(length) * share for length, share in longest.probabilities(samples))
