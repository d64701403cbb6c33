"""Many steps of varying lengths through the caching allocator, without emptying it in between. Torch-free.

Pools of the allocator (one per stream and size class) do not influence one another, and only a step that
finds a pool in a state it was never in before must be played: everything else is looked up. A state is all
that a pool's future depends on: its segments, what is in use of each until when, and the order in which free
memory of one size is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fsdptool.memory.simulation.allocator import SERIAL_BITS, CachingAllocator, Chunk, Pool
from fsdptool.memory.simulation.limited_allocator import LimitedAllocator, OutOfMemory
from fsdptool.memory.simulation.step_tapes import (
    Request,
    StepTapes,
    Tape,
    is_small,
    part_names,
    rounded_request,
)

PoolKey = tuple[int, bool]
"""Stream, and whether it serves small requests."""

_FREE, _PERMANENT = 0, 1
_OWNERS = 2


class UnlikeStepsError(ValueError):
    """A part of one length's step cannot follow a part of another's."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step did to the allocator.

    Attributes:
        reserved: Bytes of segments after it.
        retries: How often the cache was emptied in it.
        failed: Whether a request could not be served; the order ends there.
    """

    reserved: int
    retries: int = 0
    failed: bool = False


@dataclass(frozen=True, slots=True)
class _State:
    """A pool between two parts of a run, as plain numbers.

    Attributes:
        segments: Every segment of which something is free or will be released: size and owner of its
            chunks. Owners are free, permanent, or the number of what a later part releases.
        order: Segment and chunk of every free chunk, in the order of the pool's list.
        reserved: Bytes of all segments, those that are in use for good included.
    """

    segments: tuple[tuple[tuple[int, int], ...], ...]
    order: tuple[tuple[int, int], ...]
    reserved: int


@dataclass(slots=True)
class _Live:
    """A pool in use: its allocator, what was taken over, and a step's inputs."""

    allocator: CachingAllocator
    carried: list[Chunk] = field(default_factory=list)
    inputs: list[Chunk] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Move:
    """One thing that happens to a pool: the inputs of a step arrive, a tape is played, the inputs leave.

    ``key`` is equal for equal moves.
    """

    key: tuple[object, ...]
    tapes: tuple[Tape, ...]
    inputs: tuple[int, ...] = ()
    ends: bool = False


class OrderReplay:
    """Replays orders of lengths on one rank.

    Args:
        tapes: Requests of a step by length.
        accumulation: Micro-batches of a step.
        expandable: Whether segments are expandable.

    Attributes:
        played: Requests and releases that were played, not looked up: what the replay costs.
    """

    def __init__(self, tapes: Mapping[int, StepTapes], accumulation: int, *, expandable: bool) -> None:
        self._tapes = tapes
        self._accumulation = accumulation
        self._expandable = expandable
        some = next(iter(tapes.values()))
        _check_alike(list(tapes.values()))
        self._pools = sorted({_pool_of(r) for t in tapes.values() for r in _requests(t)})
        self._states: dict[PoolKey, list[_State]] = {pool: [] for pool in self._pools}
        self._numbers: dict[PoolKey, dict[_State, int]] = {pool: {} for pool in self._pools}
        self._known: dict[PoolKey, dict[tuple[int, tuple[object, ...]], int]] = {p: {} for p in self._pools}
        self._parts: dict[tuple[int, PoolKey], Tape] = {}
        self._start: dict[PoolKey, int] = {}
        self.played = 0
        for pool in self._pools:
            live = _Live(CachingAllocator(expandable=expandable))
            _play(live, self._part(some.load, pool))
            self._start[pool] = self._number(pool, live)

    def run(self, order: Sequence[Sequence[int]], *, limit: int | None = None) -> list[StepOutcome]:
        """Replay one order from the start of a run.

        Args:
            order: The lengths of each step's micro-batches.
            limit: Bytes that the device leaves to the allocator; None is unlimited.

        Returns:
            Every step that was made; the last one is the one that failed, if one did.
        """
        states = dict(self._start)
        outcomes: list[StepOutcome] = []
        for number, lengths in enumerate(order):
            before = dict(states)
            moves = self._moves(lengths, first=number == 0)
            for pool in self._pools:
                states[pool] = self._advance(pool, states[pool], moves)
            reserved = sum(self._states[pool][states[pool]].reserved for pool in self._pools)
            if limit is not None and reserved > limit:
                return outcomes + self._squeezed(before, order[number:], limit, first=number == 0)
            outcomes.append(StepOutcome(reserved))
        return outcomes

    def _moves(self, lengths: Sequence[int], *, first: bool) -> list[_Move]:
        """Return what happens in a step: one move, or with accumulation one per micro-batch and two more."""
        if len(lengths) != self._accumulation:
            raise ValueError(f"{len(lengths)} micro-batches are not {self._accumulation}")
        steps = [self._tapes[n].first if first else self._tapes[n].later for n in lengths]
        end = steps[-1]["end"]
        if self._accumulation == 1:
            tapes = (steps[0]["only"], end)
            return [_Move(("step", first, lengths[0]), tapes, self._tapes[lengths[0]].inputs, ends=True)]
        # All micro-batches of a step are there from its start. Those of several are counted as the longest:
        # they are small, and their mixtures would make a state of their own of every step.
        inputs = self._tapes[max(self._tapes)].inputs * self._accumulation if first else ()
        moves = [_Move(("inputs", first), (), inputs)]
        for part, length, step in zip(part_names(self._accumulation), lengths, steps, strict=True):
            moves.append(_Move((part, first, length), (step[part],)))
        return [*moves, _Move(("end", first, lengths[-1]), (end,))]

    def _advance(self, pool: PoolKey, state: int, moves: Sequence[_Move]) -> int:
        known = self._known[pool]
        live: _Live | None = None
        for move in moves:
            after = known.get((state, move.key))
            if after is None:
                if live is None:
                    allocator = CachingAllocator(expandable=self._expandable)
                    live = _restore(self._states[pool][state], pool, allocator)
                self._make(live, move, pool)
                after = known[state, move.key] = self._number(pool, live)
            else:
                live = None
            state = after
        return state

    def _make(self, live: _Live, move: _Move, pool: PoolKey | None) -> None:
        for size in move.inputs:
            request = rounded_request(size)
            if pool is None or _pool_of(request) == pool:
                live.inputs.append(live.allocator.allocate(*request))
        for tape in move.tapes:
            part = tape if pool is None else self._part(tape, pool)
            self.played += len(part.operations)
            _play(live, part)
        if move.ends:
            for chunk in live.inputs:
                live.allocator.release(chunk)
            live.inputs = []

    def _part(self, tape: Tape, pool: PoolKey) -> Tape:
        """Return what a tape asks of one pool."""
        key = (id(tape), pool)
        if key not in self._parts:
            self._parts[key] = _filtered(tape, pool)
        return self._parts[key]

    def _number(self, pool: PoolKey, live: _Live) -> int:
        """Return the number of the state a pool is in."""
        state = _capture(live, pool)
        numbers = self._numbers[pool]
        if state not in numbers:
            numbers[state] = len(numbers)
            self._states[pool].append(state)
        return numbers[state]

    def _squeezed(
        self, states: Mapping[PoolKey, int], order: Sequence[Sequence[int]], limit: int, *, first: bool
    ) -> list[StepOutcome]:
        """Continue once the device is full: from now on, pools empty each other's cache."""
        allocator = LimitedAllocator(expandable=self._expandable, limit=limit)
        parts = {}
        for pool in self._pools:
            parts[pool] = _restore(self._states[pool][states[pool]], pool, allocator)
        live = _Live(allocator)
        tapes = next(iter(self._tapes.values()))
        begin = tapes.first if first else tapes.later
        taken = {pool: iter(part.carried) for pool, part in parts.items()}
        takes = begin["only" if self._accumulation == 1 else "first"].takes
        live.carried = [next(taken[_pool_of(request)]) for request in takes]
        outcomes = []
        for number, lengths in enumerate(order):
            retries = allocator.retries
            try:
                for move in self._moves(lengths, first=first and number == 0):
                    self._make(live, move, None)
            except OutOfMemory:
                outcomes.append(StepOutcome(allocator.reserved, allocator.retries - retries, failed=True))
                break
            outcomes.append(StepOutcome(allocator.reserved, allocator.retries - retries))
        return outcomes


def _pool_of(request: Request) -> PoolKey:
    size, stream = request
    return stream, is_small(size)


def _requests(tapes: StepTapes) -> list[Request]:
    parts = [tapes.load, *tapes.first.values(), *tapes.later.values()]
    return [request for tape in parts for request in dict.fromkeys(tape.requests)] + [
        rounded_request(size) for size in tapes.inputs
    ]


def _check_alike(steps: Sequence[StepTapes]) -> None:
    """Make sure that each part takes over what any part before it leaves, of whatever length that is."""
    some = steps[0]
    middle = some.later.get("middle")
    alike = middle is None or middle.takes == middle.gives
    for step in steps:
        before = some.load
        for kind in ("first", "later"):
            for name, tape in getattr(step, kind).items():
                other = getattr(some, kind)[name]
                alike &= tape.takes == before.gives == other.takes and tape.gives == other.gives
                before = tape
    if not alike or some.later["end"].gives != some.first["end"].gives:
        raise UnlikeStepsError("steps of different lengths keep different memory from part to part")


def _filtered(tape: Tape, pool: PoolKey) -> Tape:
    slots: dict[int, int] = {}
    place = 0
    for slot, request in enumerate(tape.takes):
        if _pool_of(request) == pool:
            slots[slot] = place
            place += 1
    requests: list[Request] = []
    operations: list[int] = []
    for operation in tape.operations:
        if operation < 0:
            if ~operation in slots:
                operations.append(~slots[~operation])
        elif _pool_of(tape.requests[operation]) == pool:
            slots[len(tape.takes) + operation] = place
            place += 1
            operations.append(len(requests))
            requests.append(tape.requests[operation])
    leaves = [(slot, r) for slot, r in zip(tape.leaves, tape.gives, strict=True) if _pool_of(r) == pool]
    return Tape(
        tuple(requests),
        tuple(operations),
        tuple(request for request in tape.takes if _pool_of(request) == pool),
        tuple(slots[slot] for slot, _ in leaves),
        tuple(request for _, request in leaves),
    )


def _play(live: _Live, tape: Tape) -> None:
    slots = live.carried
    allocate, release, requests = live.allocator.allocate, live.allocator.release, tape.requests
    for operation in tape.operations:
        if operation >= 0:
            slots.append(allocate(*requests[operation]))
        else:
            release(slots[~operation])
    live.carried = [slots[slot] for slot in tape.leaves]


def _capture(live: _Live, key: PoolKey) -> _State:
    """Return the state of a pool; equal segments are interchangeable."""
    pool = live.allocator._pools.get(key)
    free = [pool.free[place] for place in pool.places] if pool is not None else []
    owners = {id(chunk): _OWNERS + 2 * n for n, chunk in enumerate(live.carried)}
    owners |= {id(chunk): _OWNERS + 2 * n + 1 for n, chunk in enumerate(live.inputs)}
    heads: list[Chunk] = []
    seen: set[int] = set()
    for chunk in (*free, *live.carried, *live.inputs, *([pool.tail] if pool and pool.tail else ())):
        while id(chunk) not in seen:
            seen.add(id(chunk))
            if chunk.before is None:
                heads.append(chunk)
            else:
                chunk = chunk.before
    places = {id(chunk): place for place, chunk in enumerate(free)}
    described = sorted((_describe(head, owners, places) for head in heads), key=lambda d: d[:2])
    order = [(0, 0)] * len(free)
    for number, (_, _, positions) in enumerate(described):
        for place, position in positions:
            order[place] = (number, position)
    return _State(tuple(chunks for chunks, _, _ in described), tuple(order), live.allocator.reserved)


def _describe(
    head: Chunk, owners: Mapping[int, int], places: Mapping[int, int]
) -> tuple[tuple[tuple[int, int], ...], tuple[int, ...], list[tuple[int, int]]]:
    """Return a segment's chunks, the places of its free ones, and those with their positions."""
    chunks: list[tuple[int, int]] = []
    positions: list[tuple[int, int]] = []
    chunk: Chunk | None = head
    while chunk is not None:
        if chunk.free:
            positions.append((places[id(chunk)], len(chunks)))
        owner = _FREE if chunk.free else owners.get(id(chunk), _PERMANENT)
        if owner == _PERMANENT and chunks and chunks[-1][1] == _PERMANENT:
            chunks[-1] = (chunks[-1][0] + chunk.size, _PERMANENT)
        else:
            chunks.append((chunk.size, owner))
        chunk = chunk.after
    return tuple(chunks), tuple(place for place, _ in positions), positions


def _restore(state: _State, key: PoolKey, allocator: CachingAllocator) -> _Live:
    """Put a pool in a state into an allocator."""
    pool = allocator._pools[key] = Pool(key[1])
    allocator.reserved += state.reserved
    carried: dict[int, Chunk] = {}
    segments: list[list[Chunk]] = []
    for segment in state.segments:
        chunks: list[Chunk] = []
        for size, owner in segment:
            allocator._serial += 1
            chunk = Chunk(size, pool, allocator._serial, owner == _FREE, chunks[-1] if chunks else None)
            if chunks:
                chunks[-1].after = chunk
            chunks.append(chunk)
            if owner >= _OWNERS:
                carried[owner] = chunk
        segments.append(chunks)
    for number, position in state.order:
        allocator._serial += 1
        chunk = segments[number][position]
        chunk.serial = allocator._serial
        place = chunk.size << SERIAL_BITS | chunk.serial
        pool.places.append(place)
        pool.free[place] = chunk
    if allocator.expandable and segments:
        pool.tail = segments[0][-1]
    evens = [carried[owner] for owner in sorted(carried) if owner % 2 == _OWNERS % 2]
    odds = [carried[owner] for owner in sorted(carried) if owner % 2 != _OWNERS % 2]
    return _Live(allocator, evens, odds)
