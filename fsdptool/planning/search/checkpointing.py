"""The checkpointing policy that makes a step fastest within the memory there is.

What a block keeps is a knapsack: each operator of its forward has the bytes of its output and the seconds
that repeating it takes, and torch repeats exactly the operators whose output is not kept, so both add up.
Taken in the order of seconds per byte, the outputs give the convex hull of the knapsack's solutions for one
block; a block that is not checkpointed at all is a further point. Blocks then move along their hulls one at
a time, whatever saves the most time per byte first (the greedy solution of the fractional knapsack, Dantzig
1957).

That gives a ladder of policies, each a little faster and larger than the one below. Their sizes are only a
proposal: which rung is the highest that fits is decided by simulating the whole run under it, from a trace
of its own. Policies that people use without a search are evaluated as well, so that the result is never
slower than they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from fsdptool.errors import ConfigError
from fsdptool.memory.simulation.program import traced_path
from fsdptool.planning.time.operator_time import memory_rate, operation_seconds
from fsdptool.records.cluster import Cluster, Gpu, Machine
from fsdptool.records.plan import Candidate, SearchPoint
from fsdptool.records.trace import KINDS, Segment, Trace

if TYPE_CHECKING:
    from fsdptool.planning.candidate.estimator import Estimator

USUAL = ("none", "selective", "selective:every-2-matmuls", "every_2", "full")
"""Policies that are always compared with the proposals."""

_LEAST_SHARE = 0.01
"""Share of a block's recomputation that keeping an output must save to be considered."""

_EVALUATIONS = 6
"""Rungs that are simulated, each from a trace of its own."""


@dataclass(frozen=True, slots=True)
class BlockOption:
    """One way to checkpoint a block.

    Attributes:
        policy: As text.
        bytes: What it keeps for backward more than ``full`` does.
        seconds: What its recomputation takes in a micro-batch.
    """

    policy: str
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rung:
    """A policy for the whole model.

    Attributes:
        policy: As text.
        bytes: What it keeps more than ``full``, by the knapsack.
        seconds: What it recomputes in a micro-batch, by the knapsack.
    """

    policy: str
    bytes: int
    seconds: float


def block_options(full: Trace, none: Trace, path: str, gpu: Gpu, machine: Machine) -> list[BlockOption]:
    """Return the ways to checkpoint a block that no mixture of others beats, the smallest first.

    Args:
        full, none: Traces with every block checkpointed, and with none.
        path: The block in the real model.
        gpu, machine: What the operators run on.
    """
    rate = memory_rate(gpu, machine)
    seconds_of = [operation_seconds(operation, gpu, machine) for operation in full.operations]
    timed = [
        (call, call.bytes_moved / rate if call.operation is None else seconds_of[call.operation])
        for segment in _within(full, path)
        for call in segment.calls
    ]
    whole = sum(seconds for _, seconds in timed)
    worth = [item for item in timed if item[0].bytes and item[1] >= _LEAST_SHARE * whole]
    worth.sort(key=lambda item: -item[1] / item[0].bytes)
    options = [BlockOption("full", 0, whole)]
    selected: list[str] = []
    for call, seconds in worth:
        selected.append(call.selector)
        last = options[-1]
        policy = f"selective:{','.join(selected)}"
        options.append(BlockOption(policy, last.bytes + call.bytes, last.seconds - seconds))
    kept = _kept_bytes(none, path) - _kept_bytes(full, path)
    return _hull([*options, BlockOption("none", max(kept, 1), 0.0)])


def _within(trace: Trace, path: str) -> Iterator[Segment]:
    """Yield the segments of a block of the real model."""
    block = traced_path(path, trace.repeats)
    for segment in trace.segments:
        if segment.path == block or segment.path.startswith(f"{block}."):
            yield segment


def _kept_bytes(trace: Trace, path: str) -> int:
    """Return the bytes that a block's forward leaves for backward."""
    kind = KINDS.index("activation")
    total = 0
    for segment in _within(trace, path):
        outside = segment.marker == "leave" and segment.path == traced_path(path, trace.repeats)
        if segment.marker in ("enter", "leave") and not outside:
            made = [event - 1 for event in segment.events if event > 0]
            total += sum(trace.sizes[number] for number in made if trace.kinds[number] == kind)
    return total


def _hull(options: Sequence[BlockOption]) -> list[BlockOption]:
    """Return the lower convex hull of seconds over bytes, from the smallest to the fastest."""
    hull: list[BlockOption] = []
    for option in sorted(options, key=lambda option: (option.bytes, option.seconds)):
        if hull and option.seconds >= hull[-1].seconds:
            continue
        while len(hull) > 1 and _rate(hull[-2], hull[-1]) <= _rate(hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _rate(smaller: BlockOption, larger: BlockOption) -> float:
    """Return the seconds saved per byte."""
    return (smaller.seconds - larger.seconds) / (larger.bytes - smaller.bytes)


def make_ladder(blocks: Sequence[Sequence[BlockOption]]) -> list[Rung]:
    """Return policies for the whole model, from ``full`` to the fastest, one block changed at a time.

    Of blocks that are alike the last change first: backward frees what they keep before it needs memory to
    recompute the blocks in front of them.

    Args:
        blocks: The options of each block, in order.
    """
    kinds: dict[tuple[BlockOption, ...], list[int]] = {}
    for index, options in enumerate(blocks):
        kinds.setdefault(tuple(options), []).append(index)
    edges = [(kind, step) for kind in kinds for step in range(len(kind) - 1)]
    edges.sort(key=lambda edge: -_rate(edge[0][edge[1]], edge[0][edge[1] + 1]))
    state = [options[0] for options in blocks]
    rungs = [_rung(state)]
    for kind, step in edges:
        for index in reversed(kinds[kind]):
            state[index] = kind[step + 1]
            rungs.append(_rung(state))
    return rungs


def _rung(state: Sequence[BlockOption]) -> Rung:
    runs = [(policy, len(list(run))) for policy, run in groupby(option.policy for option in state)]
    text = runs[0][0] if len(runs) == 1 else "+".join(f"{count}*{policy}" for policy, count in runs)
    return Rung(text, sum(option.bytes for option in state), sum(option.seconds for option in state))


def optimal_candidates(
    estimator: Estimator,
    point: SearchPoint,
    cluster: Cluster,
    machine: Machine,
    *,
    room: Callable[[Candidate], int | None],
    known: Sequence[Candidate] = (),
) -> list[Candidate]:
    """Return the policies that were evaluated at a point and fit, the fastest first.

    Args:
        estimator: Evaluates one configuration.
        point: Everything but the policy.
        cluster, machine: The hardware, with a GPU: without step times no policy is the best.
        room: Bytes that a candidate leaves of the budget; negative where it does not fit, None where its
            memory is unknown.
        known: Candidates that were evaluated before.
    """
    assert cluster.gpu is not None
    evaluated = {candidate.settings: candidate for candidate in known}

    def evaluate(policy: str) -> Candidate:
        changed = replace(point, checkpointing=policy)
        if changed not in evaluated:
            evaluated[changed] = estimator.candidate(
                policy, changed, cluster, machine, detail=False, replay=False
            )
        return evaluated[changed]

    def fits(candidate: Candidate) -> bool:
        left = room(candidate)
        return left is not None and left >= 0

    full = evaluate("full")
    tried = [full]
    if not fits(full):
        return []
    tried += [evaluate(policy) for policy in USUAL if policy != "full"]
    if not fits(evaluate("none")):
        tried += _climb(_ladder(estimator, point, cluster, cluster.gpu, machine), full, evaluate, room)
    fitting = {candidate.settings: candidate for candidate in tried if fits(candidate)}
    return sorted(
        fitting.values(), key=lambda c: (c.step_seconds or float("inf"), c.allocated_peak_bytes or 0)
    )


def _ladder(
    estimator: Estimator, point: SearchPoint, cluster: Cluster, gpu: Gpu, machine: Machine
) -> list[Rung]:
    checkpointed = replace(point, checkpointing="full")
    full = estimator.trace_of(checkpointed, cluster)
    none = estimator.trace_of(replace(point, checkpointing="none"), cluster)
    units = estimator.units_of(checkpointed, cluster).units
    paths = [unit.modules[0] for unit in units if unit.checkpointed]
    if not paths or not (full.known and none.known):
        return []
    return make_ladder([block_options(full, none, path, gpu, machine) for path in paths])


def _climb(
    ladder: Sequence[Rung],
    full: Candidate,
    evaluate: Callable[[str], Candidate],
    room: Callable[[Candidate], int | None],
) -> list[Candidate]:
    """Evaluate the rungs around the highest one that fits, found by interpolation."""
    low, high = 0, len(ladder)
    spare = room(full) or 0
    per_byte = 1.0
    tried: list[Candidate] = []
    for _ in range(_EVALUATIONS):
        if high - low <= 1:
            break
        target = ladder[low].bytes + max(spare, 0) / per_byte
        guess = sum(rung.bytes <= target for rung in ladder) - 1
        guess = min(max(guess, low + 1), high - 1)
        try:
            candidate = evaluate(ladder[guess].policy)
        except ConfigError:
            high = guess
            continue
        left = room(candidate)
        tried.append(candidate)
        if left is None or left < 0:
            high = guess
        if left is not None and guess > low:
            more = spare - left
            per_byte = max(more / (ladder[guess].bytes - ladder[low].bytes or 1), 0.05)
        if left is not None and left >= 0:
            low, spare = guess, left
    return tried
