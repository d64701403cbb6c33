"""What one optimizer step asks of the allocator, written down once per length of its micro-batches.

The requests of a step do not depend on where the allocator puts them. They are recorded from the simulated
schedule, cut at the borders of micro-batches, and can then be replayed in any sequence of lengths without
playing the schedule again. Torch-free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from fsdptool.memory.simulation.allocator import MIB, CachingAllocator, Chunk, Pool, ReplayLedger
from fsdptool.memory.simulation.ledger import INPUTS, Block, Ledger
from fsdptool.memory.simulation.simulate import Prepared, simulate
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import OWN_LOOP, TrainingLoop
from fsdptool.records.recipe import Recipe
from fsdptool.records.run import STEP_PHASES, RunPhase
from fsdptool.records.trace import Trace

Part = Literal["only", "first", "second", "middle", "last"]
"""A micro-batch's place in its step: ``only`` is that of a step without accumulation, ``middle`` the third
and any further one before the last."""

Request = tuple[int, int]
"""Bytes, rounded to 512, and the stream."""

_GRAIN = 512


@dataclass(frozen=True, slots=True)
class Tape:
    """The requests of a part of a run.

    Slots number the memory that the part works on: first what it takes over, then its own allocations in
    order.

    Attributes:
        requests: Its allocations.
        operations: ``n`` makes allocation ``n``; ``~n`` releases slot ``n``.
        takes: What it takes over from the part before: memory that a later part releases.
        leaves: Slots that it hands to the part after it, in the order of ``gives``.
        gives: What those slots hold.
    """

    requests: tuple[Request, ...]
    operations: tuple[int, ...]
    takes: tuple[Request, ...]
    leaves: tuple[int, ...]
    gives: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class StepTapes:
    """One length's requests.

    Attributes:
        load: Everything before the first step.
        first: The parts of step 1, in which the optimizer makes its states.
        later: The parts of every further step.
        inputs: Bytes of each tensor of a micro-batch. The tapes leave them out: a step allocates those of
            all its micro-batches before the first and releases them at its end.
        allocated_peak: Most live bytes in a step whose micro-batches all have this length.
    """

    load: Tape
    first: dict[Part | Literal["end"], Tape]
    later: dict[Part | Literal["end"], Tape]
    inputs: tuple[int, ...]
    allocated_peak: int


def rounded_request(size: int, stream: int = 0) -> Request:
    """Return a request as the allocator sees it."""
    return -(-size // _GRAIN) * _GRAIN or _GRAIN, stream


def is_small(size: int) -> bool:
    """Return whether a request is served by the pool of small blocks."""
    return size <= MIB


@dataclass(slots=True)
class _Recorder(CachingAllocator):
    """An allocator that only writes down what it is asked for."""

    requests: list[Request] = field(default_factory=list)
    operations: list[int] = field(default_factory=list)
    nowhere: Pool = field(default_factory=lambda: Pool(small=True))

    def allocate(self, size: int, stream: int = 0) -> Chunk:
        number = len(self.requests)
        self.requests.append(rounded_request(size, stream))
        self.operations.append(number)
        return Chunk(size, self.nowhere, number)

    def release(self, chunk: Chunk) -> None:
        self.operations.append(~chunk.serial)


@dataclass(slots=True)
class _TapeLedger(ReplayLedger):
    """Notes where the phases of the run begin; inputs are left to the replay."""

    recorder: _Recorder = field(default_factory=_Recorder)
    borders: list[tuple[RunPhase | None, int]] = field(default_factory=list)

    def begin(self, phase: RunPhase | None) -> None:
        self.borders.append((phase, len(self.recorder.operations)))
        ReplayLedger.begin(self, phase)

    def add(self, block: Block) -> None:
        if block.kind == INPUTS:
            Ledger.add(self, block)
        else:
            ReplayLedger.add(self, block)

    def drop(self, block: Block) -> None:
        if block.kind == INPUTS:
            Ledger.drop(self, block)
        else:
            ReplayLedger.drop(self, block)


def record_step(
    trace: Trace,
    rank: Prepared,
    mesh: ParallelDims,
    recipe: Recipe,
    *,
    workspaces: tuple[int, ...] = (),
    loop: TrainingLoop = OWN_LOOP,
) -> StepTapes:
    """Return the requests of steps whose micro-batches are all as traced.

    Args:
        trace: One micro-batch; its activations are known.
        rank, mesh, recipe, workspaces, loop: As ``simulate`` of ``simulate.py`` takes them.

    Raises:
        ValueError: The activations are unknown.
    """
    recorder = _Recorder()
    ledger = _TapeLedger(allocator=recorder, recorder=recorder)
    simulated = simulate(
        trace,
        rank,
        mesh,
        recipe,
        ledger=ledger,
        warm=True,
        workspaces=workspaces,
        loop=loop,
        middle=True,
    )
    if not simulated.complete:
        raise ValueError("the activations are unknown")
    peak = max(ledger.tops[phase].total for phase in STEP_PHASES if phase in ledger.tops)
    return _cut(recorder, ledger.borders, recipe.batch.accumulation, trace.input_bytes, peak)


def _cut(
    recorder: _Recorder,
    borders: Sequence[tuple[RunPhase | None, int]],
    accumulation: int,
    inputs: tuple[int, ...],
    peak: int,
) -> StepTapes:
    """Cut a recording of loading and two steps into its parts."""
    parts: list[list[int]] = []
    ends: list[int] = []
    for phase, position in borders:
        if phase is RunPhase.FORWARD:
            # A step begins twice: once for its inputs, and once with its first micro-batch.
            if not parts or len(parts[-1]) == 0 or len(ends) == len(parts):
                parts.append([])
            parts[-1].append(position)
        elif phase is RunPhase.OPTIMIZER:
            parts[-1].append(position)
        elif phase is None and parts and len(ends) < len(parts):
            ends.append(position)
    (first, second), stop = parts, ends[1]
    names = tuple(dict.fromkeys(part_names(accumulation)))
    lives = _Lives(recorder, stop, second[0])
    load = lives.tape(0, first[0])

    def step(starts: Sequence[int], end: int) -> dict[Part | Literal["end"], Tape]:
        cuts = [*starts[1:], end]
        tapes = [lives.tape(a, b) for a, b in pairwise(cuts[:-1])]
        tapes.append(lives.tape(cuts[-2], end, final=end == stop))
        return dict(zip((*names, "end"), tapes, strict=True))

    return StepTapes(load, step(first, ends[0]), step(second, stop), inputs, peak)


def part_names(accumulation: int) -> tuple[Part, ...]:
    """Return the place of each micro-batch of a step."""
    if accumulation == 1:
        return ("only",)
    middle: Part = "middle"
    earlier: list[Part] = ["first", "second", *[middle] * (accumulation - 3)]
    return (*earlier[: accumulation - 1], "last")


class _Lives:
    """How long each allocation of a recording lives.

    What step 2 releases of step 1 is replaced by the same from step 2. What nothing releases by then is
    permanent, unless step 2 made it without a counterpart from step 1: such memory is freed with its step.
    """

    def __init__(self, recorder: _Recorder, stop: int, second: int) -> None:
        self._requests = recorder.requests
        self._operations = recorder.operations[:stop]
        self._stop = stop
        self._made: dict[int, int] = {}
        self._freed: dict[int, int] = {}
        for place, operation in enumerate(self._operations):
            if operation >= 0:
                self._made[operation] = place
            else:
                self._freed[~operation] = place
        replaced = Counter(
            self._requests[number]
            for number, place in self._freed.items()
            if place >= second and self._made[number] < second
        )
        self._surplus: list[int] = []
        for number, place in self._made.items():
            if place < second or number in self._freed:
                continue
            if replaced[self._requests[number]]:
                replaced[self._requests[number]] -= 1
                self._freed[number] = stop
            else:
                self._surplus.append(number)
                self._freed[number] = stop

    def _carried(self, place: int) -> list[int]:
        """Return what is alive before ``place`` and released later, in an order that all lengths share."""
        alive = [n for n, made in self._made.items() if made < place <= self._freed.get(n, -1)]
        return sorted(alive, key=lambda number: (self._requests[number], number))

    def tape(self, start: int, end: int, *, final: bool = False) -> Tape:
        """Return the operations from ``start`` to ``end``; ``final``: to the end of the recording."""
        takes, leaves = self._carried(start), self._carried(end)
        slots = {number: slot for slot, number in enumerate(takes)}
        requests: list[Request] = []
        operations: list[int] = []
        for operation in self._operations[start:end]:
            if operation >= 0:
                slots[operation] = len(slots)
                operations.append(len(requests))
                requests.append(self._requests[operation])
            else:
                operations.append(~slots[~operation])
        if final:
            operations += [~slots[number] for number in self._surplus if number in slots]
            leaves = [number for number in leaves if number not in self._surplus]
        return Tape(
            tuple(requests),
            tuple(operations),
            tuple(self._requests[number] for number in takes),
            tuple(slots[number] for number in leaves),
            tuple(self._requests[number] for number in leaves),
        )
