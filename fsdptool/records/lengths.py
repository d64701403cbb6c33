"""Lengths of a data set's samples, and what micro-batches of such lengths do to memory and speed."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from fsdptool.records.annotations import Count, Keywords, Positive
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
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.counts[-1].length

    def tokens(self, limit: int) -> int:
        """Return the tokens of all samples, each truncated to ``limit``."""
        return sum(min(item.length, limit) * item.count for item in self.counts)

    def at(self, ranks: list[int]) -> list[int]:
        """Return the lengths of samples by their rank in order of length, 0 for the shortest."""
        ends = list(accumulate(item.count for item in self.counts))
        return [self.counts[bisect_right(ends, rank)].length for rank in ranks]


@dataclass(frozen=True, slots=True)
class TracedLength:
    """Micro-batches of one padded length, traced as they are.

    Attributes:
        length: Tokens of each of their samples, padding included.
        share: Of the drawn micro-batches, those that are planned at this length, 0 to 1.
        allocated_peak_bytes: Most live bytes of one rank in a step of such micro-batches.
        step_seconds: Time of a step of such micro-batches on all ranks; None on the CPU.
    """

    length: Positive
    share: float
    allocated_peak_bytes: int
    step_seconds: float | None


@dataclass(frozen=True, slots=True)
class AllocatorReplay:
    """What the caching allocator did over all drawn orders.

    Attributes:
        expandable: Whether its segments were expandable.
        orders: Orders that were replayed, each on one rank.
        limit_bytes: What the GPU leaves to the allocator.
        first_step_bytes, last_step_bytes: The most that an order had reserved after its first and its last
            step, on a device without a limit.
        fragmentation_bytes: Of the order that reserved the most: reserved bytes above its allocated peak.
        last_growth_step: The last step, counted from 1, in which any order reserved more than before.
        retried_orders: Orders in which the device was full, so that the allocator had to empty its cache
            and try again, which makes every rank wait.
        first_retry_step: The earliest such step; None if there is none.
        failed_orders: Orders that ran out of memory.
        first_failure_step: The earliest such step; None if there is none.
        failed_share_of_runs: Probability that any rank of a run runs out of memory, if ranks draw
            independently; 0 to 1.
    """

    expandable: bool
    orders: Count
    limit_bytes: int
    first_step_bytes: int
    last_step_bytes: int
    fragmentation_bytes: int
    last_growth_step: Positive
    retried_orders: Count
    first_retry_step: int | None
    failed_orders: Count
    first_failure_step: int | None
    failed_share_of_runs: float


@dataclass(frozen=True, slots=True)
class LengthsReplay:
    """Steps with micro-batches of the lengths that a data set has.

    Attributes:
        padding: How micro-batches are padded; under ``length`` and ``packed`` all have one shape, and
            nothing was replayed.
        samples, shortest, longest: Of the data set, after truncation.
        steps: Steps of each order that was drawn.
        rounded: Whether padded lengths were rounded up to the next traced one, so that memory figures are
            upper bounds of what is allocated.
        padding_share: Share of a micro-batch's positions that hold padding, 0 to 1.
        tokens_per_second: Tokens of all ranks without padding; a step takes as long as the rank with the
            longest micro-batch. None on the CPU.
        traced: The lengths that were traced, the shortest first.
        worst_length: The longest of them that was drawn.
        worst_allocated_bytes: Most live bytes of one rank at that length.
        replays: The allocator, without and with expandable segments; empty on the CPU.
    """

    padding: Padding
    samples: Positive
    shortest: Positive
    longest: Positive
    steps: Count
    rounded: bool
    padding_share: float
    tokens_per_second: float | None
    traced: tuple[TracedLength, ...]
    worst_length: int | None
    worst_allocated_bytes: int | None
    replays: tuple[AllocatorReplay, ...]
