"""Lengths of a data set's samples, and what micro-batches of such lengths do to memory and speed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fsdptool.records.annotations import Keywords, Positive
from fsdptool.records.recipe import Padding


@dataclass(frozen=True, slots=True)
class LengthCount:
    """How many samples have one length in tokens."""

    length: Positive
    count: Positive


@dataclass(frozen=True, slots=True)
class SampleLengths:
    """A data set's lengths before truncation and padding, the shortest first."""

    counts: Annotated[tuple[LengthCount, ...], Keywords(minItems=1)]

    @property
    def samples(self) -> int:
        """Number of samples."""
        return sum(item.count for item in self.counts)

    @property
    def shortest(self) -> int:
        """Tokens of the shortest sample."""
        return self.counts[0].length

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.counts[-1].length

    def tokens(self, limit: int) -> int:
        """Return the tokens of all samples, each truncated to ``limit``."""
        return sum(min(item.length, limit) * item.count for item in self.counts)


@dataclass(frozen=True, slots=True)
class PlannedLength:
    """Micro-batches of one padded length.

    Attributes:
        length: Tokens of each of their samples, padding included.
        share: Of all micro-batches, those that are no longer and exceed the planned length before, 0 to 1.
        allocated_peak_bytes: Most live bytes of one rank in a step of such micro-batches.
        reserved_peak_bytes: The most that the caching allocator reserves in such steps; None on the CPU.
        step_seconds: Time of a step of such micro-batches on all ranks; None on the CPU.
    """

    length: Positive
    share: float
    allocated_peak_bytes: int
    reserved_peak_bytes: int | None
    step_seconds: float | None


@dataclass(frozen=True, slots=True)
class LengthsPlan:
    """Micro-batches of the lengths that a data set has.

    Attributes:
        padding: How micro-batches are padded; under ``length`` and ``packed`` all have one shape, and
            nothing else is planned.
        samples, shortest, longest: Of the data set, after truncation.
        padding_share: Share of a micro-batch's positions that hold padding, 0 to 1.
        tokens_per_second: Tokens of all ranks without padding; a step takes as long as the rank with the
            longest micro-batch. None on the CPU.
        traced: The planned lengths, the shortest first: of the median, the 95th percentile and the longest
            micro-batch, each once.
        worst_length: The longest micro-batch.
        worst_allocated_bytes: Most live bytes of one rank at that length.
    """

    padding: Padding
    samples: Positive
    shortest: Positive
    longest: Positive
    padding_share: float
    tokens_per_second: float | None
    traced: tuple[PlannedLength, ...]
    worst_length: int | None
    worst_allocated_bytes: int | None
