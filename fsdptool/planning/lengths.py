"""Steps whose micro-batches have the lengths of a data set: memory over hundreds of them, and speed.

Micro-batches are drawn as a run draws them (shuffled, without repetition within an epoch) and padded as the
recipe says. The padded lengths that occur are rounded up to a few that are traced; nothing is interpolated.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from fsdptool.inspection.micro_batch import batch_spec
from fsdptool.layout.group import default_loading
from fsdptool.memory.simulation.order_replay import UnlikeStepsError
from fsdptool.modeling.objective import objective_for
from fsdptool.planning.estimator import Estimator
from fsdptool.planning.hardware import workspaces
from fsdptool.planning.search_point import apply_search_point, resolve_dims
from fsdptool.records.cluster import Cluster, Machine
from fsdptool.records.lengths import AllocatorReplay, LengthsReplay, SampleLengths, TracedLength
from fsdptool.records.plan import Candidate, PlanInputs, SearchPoint
from fsdptool.records.recipe import PADDING_MULTIPLE
from fsdptool.records.trace import Component

if TYPE_CHECKING:
    from fsdptool.memory.simulation.step_tapes import StepTapes
    from fsdptool.records.anatomy import ModelSpec

STEPS = 300
"""Steps of each order that is replayed."""

ORDERS = 20
"""Orders that are drawn."""

TRACED = 10
"""Most lengths that are traced."""

_WORK = 8_000_000
"""Requests after which no further order is replayed: ten to twenty seconds."""

_FINEST = 128
"""Steps of the grid on which the lengths to trace are chosen."""

_EXACT_SAMPLES = 200_000
"""Samples up to which an epoch is drawn as a permutation; larger data sets are drawn with repetition."""

_TIMED_SAMPLES = 400_000
"""Samples drawn for the throughput of all ranks."""

Order = list[tuple[int, ...]]
"""The padded length of each micro-batch, step by step."""


def padded_length(length: int, limit: int) -> int:
    """Return the length that a micro-batch with a longest sample of ``length`` is padded to."""
    return min(-(-min(length, limit) // PADDING_MULTIPLE) * PADDING_MULTIPLE, limit)


def replay_lengths(
    estimator: Estimator,
    inputs: PlanInputs,
    candidate: Candidate,
    *,
    progress: Callable[[str], None] | None = None,
) -> LengthsReplay | None:
    """Return what the lengths of ``inputs`` do to a configuration; None where nothing varies or is known.

    What keeps it from an answer is added to the estimator's notes.

    Args:
        estimator: Evaluates the model at the recipe's sequence length.
        inputs: With lengths.
        candidate: The configuration.
        progress: Called with a line of progress from time to time.
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
        return _constant(lengths, inputs, candidate, limit)
    reason = _unsupported(estimator.spec, inputs, point)
    if reason is not None:
        estimator.notes[f"lengths were not replayed: {reason}"] = None
        return None
    orders = [_order(lengths, limit, point, inputs.recipe.seed, number) for number in range(ORDERS)]
    drawn = Counter(length for order in orders for step in order for length in step)
    grid = choose_grid(drawn, padded_length(lengths.longest, limit), TRACED)
    steps = list(_trace(estimator, inputs, point, grid, progress))
    if len(steps) < len(grid):
        estimator.notes["lengths were not replayed: the activations are unknown"] = None
        return None
    rounded = [[tuple(grid[bisect_left(grid, n)] for n in step) for step in order] for order in orders]
    shares = Counter(length for order in rounded for step in order for length in step)
    total = sum(shares.values())
    traced = tuple(
        TracedLength(
            step.length,
            shares[step.length] / total,
            step.candidate.allocated_peak_bytes or step.tapes.allocated_peak,
            step.candidate.step_seconds,
        )
        for step in steps
    )
    tapes = {step.length: step.tapes for step in steps}
    segments = (False, True) if inputs.profile == "cuda" else ()
    replays: tuple[AllocatorReplay, ...] = ()
    try:
        replays = tuple(
            _replay(tapes, rounded, candidate, point, expandable, progress) for expandable in segments
        )
    except UnlikeStepsError as error:
        estimator.notes[f"the allocator was not replayed over lengths: {error}"] = None
    padding, speed = _throughput(lengths, limit, inputs, point, traced)
    return LengthsReplay(
        padding="longest",
        samples=lengths.samples,
        shortest=min(lengths.counts[0].length, limit),
        longest=min(lengths.longest, limit),
        steps=STEPS,
        rounded=any(length not in tapes for length in drawn),
        padding_share=padding,
        tokens_per_second=speed,
        traced=traced,
        worst_length=traced[-1].length,
        worst_allocated_bytes=traced[-1].allocated_peak_bytes,
        replays=replays,
    )


def _constant(lengths: SampleLengths, inputs: PlanInputs, candidate: Candidate, limit: int) -> LengthsReplay:
    """Return the answer for steps of one shape: nothing but the share of padding."""
    padding = 0.0
    if inputs.recipe.data.padded == "length":
        padding = 1 - lengths.tokens(limit) / (lengths.samples * limit)
    speed = candidate.tokens_per_second
    return LengthsReplay(
        padding=inputs.recipe.data.padded,
        samples=lengths.samples,
        shortest=min(lengths.counts[0].length, limit),
        longest=min(lengths.longest, limit),
        steps=0,
        rounded=False,
        padding_share=padding,
        tokens_per_second=speed * (1 - padding) if speed is not None else None,
        traced=(),
        worst_length=limit,
        worst_allocated_bytes=candidate.allocated_peak_bytes,
        replays=(),
    )


def _unsupported(spec: ModelSpec, inputs: PlanInputs, point: SearchPoint) -> str | None:
    if "input_ids" not in {item.name for item in batch_spec(spec, inputs.recipe)}:
        return "the model does not train on text"
    if not objective_for(inputs.recipe, spec).single_length:
        return "the texts of a sample have lengths of their own"
    if point.cp > 1:
        return "ranks that share a sequence need one length for all"
    if inputs.recipe.method.name == "distillation":
        return "a teacher's steps are not recorded"
    return None


def _order(lengths: SampleLengths, limit: int, point: SearchPoint, seed: int, number: int) -> Order:
    """Return the padded lengths of one rank's micro-batches in a shuffled order of the samples."""
    count = STEPS * point.accumulation
    longest = _longest(lengths, count, point.micro_batch, Random(f"{seed}/{number}"))
    padded = [padded_length(length, limit) for length in longest]
    return [tuple(padded[i : i + point.accumulation]) for i in range(0, count, point.accumulation)]


def _longest(lengths: SampleLengths, batches: int, size: int, random: Random) -> list[int]:
    """Draw micro-batches of ``size`` samples and return the longest sample of each."""
    return [max(sample) for sample in _batches(lengths, batches, size, random)]


def _batches(lengths: SampleLengths, batches: int, size: int, random: Random) -> Iterator[list[int]]:
    drawn = lengths.at(_ranks(lengths.samples, batches * size, random))
    for start in range(0, batches * size, size):
        yield drawn[start : start + size]


def _ranks(samples: int, count: int, random: Random) -> list[int]:
    """Return ``count`` numbers below ``samples``, shuffled; only ``random()`` is equal on every Python."""
    if samples > _EXACT_SAMPLES:
        return [int(random.random() * samples) for _ in range(count)]
    ranks: list[int] = []
    while len(ranks) < count:
        keys = [random.random() for _ in range(samples)]
        ranks += sorted(range(samples), key=keys.__getitem__)
    return ranks[:count]


def choose_grid(drawn: Counter[int], longest: int, most: int) -> list[int]:
    """Return at most ``most`` lengths to round up to, with the least padding added; the last is ``longest``.

    Args:
        drawn: Micro-batches by padded length.
        longest: The longest that may occur.
        most: Lengths to choose.
    """
    quantum = max(longest // _FINEST, 1)
    counts: Counter[int] = Counter()
    for length, count in drawn.items():
        coarse = min(-(-length // quantum) * quantum, longest) if len(drawn) > _FINEST else length
        counts[-(-coarse // PADDING_MULTIPLE) * PADDING_MULTIPLE if coarse < longest else longest] += count
    counts[longest] += 0
    values = sorted(counts)
    if len(values) <= most:
        return values
    weights, sums = [0], [0]
    for value in values:
        weights.append(weights[-1] + counts[value])
        sums.append(sums[-1] + counts[value] * value)

    def cost(start: int, end: int) -> int:
        """Return the padding that rounding ``values[start:end]`` up to the last of them adds."""
        return values[end - 1] * (weights[end] - weights[start]) - (sums[end] - sums[start])

    # best[k][i]: the least padding of the first i values with k lengths, and where the last of them starts.
    best: list[list[tuple[int, int]]] = [[(cost(0, i) if i else 0, 0) for i in range(len(values) + 1)]]
    for _ in range(1, most):
        previous = best[-1]
        best.append(
            [
                min((previous[j][0] + cost(j, i) if i > j else previous[j][0], j) for j in range(i + 1))
                for i in range(len(values) + 1)
            ]
        )
    grid, end = [], len(values)
    for row in reversed(best):
        if end:
            grid.append(values[end - 1])
            end = row[end][1]
    return sorted(set(grid))


@dataclass(frozen=True, slots=True)
class _TracedStep:
    length: int
    candidate: Candidate
    tapes: StepTapes


def _trace(
    estimator: Estimator,
    inputs: PlanInputs,
    point: SearchPoint,
    grid: Sequence[int],
    progress: Callable[[str], None] | None,
) -> Iterator[_TracedStep]:
    """Evaluate the configuration at every length; ends early where activations are unknown."""
    from fsdptool.memory.footprint import prepared
    from fsdptool.memory.simulation.step_tapes import record_step

    cluster, machine = _hardware(inputs, point)
    begin = time.monotonic()
    for done, length in enumerate(grid):
        if progress is not None:
            left = (time.monotonic() - begin) / done * (len(grid) - done) if done else None
            about = f", about {left:.0f} s left" if left is not None else ""
            progress(f"tracing length {length:,} ({done + 1} of {len(grid)}{about})")
        batch = replace(estimator.recipe.batch, sequence_length=length)
        at_length = replace(estimator, recipe=replace(estimator.recipe, batch=batch))
        candidate = at_length.candidate("length", point, cluster, machine, detail=False, replay=False)
        trace = at_length.trace_of(point, cluster)
        if not trace.known:
            return
        recipe, settings = apply_search_point(point, at_length.recipe, at_length.settings, cluster)
        mesh = resolve_dims(settings.mesh, cluster.world_size, point.ep)
        units = at_length.units_of(point, cluster)
        rank = prepared(units, mesh, recipe, profile=inputs.profile, trace=trace)
        loading = inputs.loop.loading or default_loading(recipe.sharding.layout, settings)
        loop = replace(inputs.loop, loading=loading)
        tapes = record_step(trace, rank, mesh, recipe, workspaces=workspaces(cluster), loop=loop)
        yield _TracedStep(length, candidate, tapes)


def _hardware(inputs: PlanInputs, point: SearchPoint) -> tuple[Cluster, Machine]:
    return inputs.clusters[point.cluster], inputs.machines[point.cluster]


def _replay(
    tapes: dict[int, StepTapes],
    orders: Sequence[Order],
    candidate: Candidate,
    point: SearchPoint,
    expandable: bool,
    progress: Callable[[str], None] | None,
) -> AllocatorReplay:
    """Replay orders until all are done or enough work is spent."""
    from fsdptool.memory.simulation.order_replay import OrderReplay

    outside = (Component.CONTEXT, Component.COMMUNICATORS)
    outside_bytes = sum(item.bytes or 0 for item in candidate.components if item.name in outside)
    limit = (candidate.usable_bytes or 0) - outside_bytes
    replay = OrderReplay(tapes, point.accumulation, expandable=expandable)
    first = last = fragmentation = 0
    growth, done = 1, 0
    retries: list[int] = []
    failures: list[int] = []
    for order in orders:
        if done and replay.played > _WORK:
            break
        if progress is not None and done % 5 == 0:
            kind = "expandable segments" if expandable else "segments of fixed size"
            progress(f"replaying order {done + 1} of {len(orders)} ({kind})")
        done += 1
        reserved = [outcome.reserved for outcome in replay.run(order)]
        growth = max(
            growth, 1 + max((i for i in range(1, STEPS) if reserved[i] > reserved[i - 1]), default=0)
        )
        first = max(first, reserved[0])
        if reserved[-1] > last:
            last = reserved[-1]
            fragmentation = last - max(tapes[n].allocated_peak for step in order for n in step)
        if reserved[-1] <= limit:
            continue
        outcomes = replay.run(order, limit=limit)
        if outcomes[-1].failed:
            failures.append(len(outcomes))
        retries += [next(i for i, o in enumerate(outcomes, 1) if o.retries)]
    ranks = point.data_parallel
    return AllocatorReplay(
        expandable=expandable,
        orders=done,
        limit_bytes=limit,
        first_step_bytes=first,
        last_step_bytes=last,
        fragmentation_bytes=fragmentation,
        last_growth_step=growth,
        retried_orders=len(retries),
        first_retry_step=min(retries, default=None),
        failed_orders=len(failures),
        first_failure_step=min(failures, default=None),
        failed_share_of_runs=1 - (1 - len(failures) / done) ** ranks,
    )


def _throughput(
    lengths: SampleLengths,
    limit: int,
    inputs: PlanInputs,
    point: SearchPoint,
    traced: Sequence[TracedLength],
) -> tuple[float, float | None]:
    """Return the share of padding, and the tokens per second of all ranks without it.

    Every micro-batch takes as long as the longest of any rank, because ranks wait for one another in every
    collective.
    """
    random, ranks = Random(f"{inputs.recipe.seed}/speed"), point.data_parallel
    turns = max(min(STEPS * point.accumulation, _TIMED_SAMPLES // (ranks * point.micro_batch)), 1)
    grid = [item.length for item in traced]
    seconds: float | None = 0.0
    tokens = positions = 0
    batches = _batches(lengths, turns * ranks, point.micro_batch, random)
    for _ in range(turns):
        longest = 0
        for _ in range(ranks):
            samples = [min(length, limit) for length in next(batches)]
            padded = padded_length(max(samples), limit)
            longest = max(longest, padded)
            tokens += sum(samples)
            positions += padded * len(samples)
        step = traced[bisect_left(grid, longest)].step_seconds
        seconds = None if step is None or seconds is None else seconds + step / point.accumulation
    return 1 - tokens / positions, tokens / seconds if seconds else None
