"""A model of the CUDA caching allocator, and a ledger that plays a run through it.

The rules are those of torch 2.13 (``c10/cuda/CUDACachingAllocator.cpp``). Sizes are rounded to 512
bytes. Requests up to 1 MiB come from 2 MiB segments; up to 10 MiB from 20 MiB segments; above that
each gets a segment rounded to 2 MiB. Free blocks belong to the stream they were made on, are taken
best fit, split when enough is left, and merge with free neighbours. With expandable segments a pool
of one stream is one growing range of 2 or 20 MiB pages.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from fsdptool.memory.simulation.ledger import (
    GATHER,
    REDUCE,
    TEACHER,
    UNSHARDED_GRADIENTS,
    Block,
    Body,
    Ledger,
)
from fsdptool.records.trace import KINDS, Trace

MIB = 1 << 20
_SMALL = MIB
SMALL_SEGMENT = 2 * MIB
_MIDDLE = 10 * MIB
LARGE_SEGMENT = 20 * MIB
_ROUND_LARGE = 2 * MIB
_MINIMUM = 512
_SERIAL_BITS = 32


@dataclass(slots=True, eq=False)
class Pool:
    """The free chunks of one stream and size class.

    A free chunk's place is an integer, its size above its serial number, so that a sorted list of integers
    gives the best fit: the smallest size, and of equal sizes the oldest chunk.

    Attributes:
        small: Whether it serves requests of up to 1 MiB.
        places: Places of the free chunks, sorted.
        free: The free chunks by place.
        tail: The last chunk of the growing range, where segments are expandable.
    """

    small: bool
    places: list[int] = field(default_factory=list)
    free: dict[int, Chunk] = field(default_factory=dict)
    tail: Chunk | None = None


@dataclass(slots=True, eq=False)
class Chunk:
    """A piece of a segment; neighbours are linked."""

    size: int
    pool: Pool
    serial: int
    free: bool = False
    before: Chunk | None = None
    after: Chunk | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Segments, free lists and the two counters that ``torch.cuda.memory_stats`` reports.

    A search replays some hundred thousand requests: what each of them does is written out in
    :meth:`allocate` and :meth:`release` rather than split into further methods.

    Args:
        expandable: ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
    """

    expandable: bool = False
    reserved: int = 0
    allocated: int = 0
    reserved_peak: int = 0
    allocated_peak: int = 0
    _pools: dict[tuple[int, bool], Pool] = field(default_factory=dict)
    _serial: int = 0

    def allocate(self, size: int, stream: int = 0) -> Chunk:
        """Return a chunk of at least ``size`` bytes."""
        rounded_size = -(-size // _MINIMUM) * _MINIMUM or _MINIMUM
        small = rounded_size <= _SMALL
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(small)
        places = pool.places
        index = bisect_left(places, rounded_size << _SERIAL_BITS)
        if self.expandable and index + 1 < len(places) and pool.free[places[index]] is pool.tail:
            # The last chunk counts as large as its range can grow: any other large enough comes first.
            index += 1
        chunk = pool.free.pop(places.pop(index)) if index < len(places) else self._grow(pool, rounded_size)
        left = chunk.size - rounded_size
        if left >= _MINIMUM if small or self.expandable else left > _SMALL:
            self._serial = serial = self._serial + 1
            after = chunk.after
            rest = Chunk(left, pool, serial, True, chunk, after)
            chunk.size = rounded_size
            chunk.after = rest
            if after is not None:
                after.before = rest
            if pool.tail is chunk:
                pool.tail = rest
            place = left << _SERIAL_BITS | serial
            insort(places, place)
            pool.free[place] = rest
        chunk.free = False
        self.allocated += chunk.size
        if self.allocated > self.allocated_peak:
            self.allocated_peak = self.allocated
        return chunk

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back to its stream's free list, merged with its free neighbours."""
        pool, before, after = chunk.pool, chunk.before, chunk.after
        places = pool.places
        size = chunk.size
        self.allocated -= size
        if before is not None and before.free:
            place = before.size << _SERIAL_BITS | before.serial
            del pool.free[place], places[bisect_left(places, place)]
            size += before.size
            chunk.before = before = before.before
            if before is not None:
                before.after = chunk
        if after is not None and after.free:
            place = after.size << _SERIAL_BITS | after.serial
            del pool.free[place], places[bisect_left(places, place)]
            size += after.size
            if pool.tail is after:
                pool.tail = chunk
            chunk.after = after = after.after
            if after is not None:
                after.before = chunk
        chunk.size = size
        chunk.free = True
        place = size << _SERIAL_BITS | chunk.serial
        insort(places, place)
        pool.free[place] = chunk

    def _grow(self, pool: Pool, size: int) -> Chunk:
        grown = self._growth(pool, size)
        self._reserve(grown)
        return self._extend(pool, grown) if self.expandable else self._chunk(grown, pool)

    def _growth(self, pool: Pool, size: int) -> int:
        """Return the bytes that the driver gives for a request which no free chunk of its pool serves."""
        if self.expandable:
            page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
            usable = pool.tail.size if pool.tail is not None and pool.tail.free else 0
            return -(-(size - usable) // page) * page
        if pool.small:
            return SMALL_SEGMENT
        return LARGE_SEGMENT if size < _MIDDLE else -(-size // _ROUND_LARGE) * _ROUND_LARGE

    def _extend(self, pool: Pool, mapped: int) -> Chunk:
        """Put ``mapped`` bytes of pages behind the pool's last chunk, using what is free of it."""
        last = pool.tail
        usable = 0
        if last is not None and last.free:
            usable = last.size
            place = usable << _SERIAL_BITS | last.serial
            del pool.free[place], pool.places[bisect_left(pool.places, place)]
        if last is not None and usable:
            last.size += mapped
            return last
        chunk = self._chunk(mapped, pool)
        chunk.before = last
        if last is not None:
            last.after = chunk
        pool.tail = chunk
        return chunk

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _chunk(self, size: int, pool: Pool) -> Chunk:
        self._serial += 1
        return Chunk(size, pool, self._serial)


_FIRST_OUT = (GATHER, REDUCE)
"""Buffers in flight leave in the order they came; everything else in the reverse."""

_GRADIENT = KINDS.index("gradient")
_TEACHER = KINDS.index("teacher")


@dataclass(frozen=True, slots=True)
class _Holders:
    """Where the chunks of a trace's tensors are kept, by the tensor's number.

    Attributes:
        sizes: Bytes of each tensor.
        stacks: Its live chunks, the youngest last. All gradients of a size share a stack.
        alike: For each live chunk of any tensor of the same size, kind and maker the stack that holds it, in
            order of allocation; None for tensors that nothing else stands for.
    """

    sizes: tuple[int, ...]
    stacks: list[list[Chunk]]
    alike: list[list[list[Chunk]] | None]


@dataclass(slots=True)
class ReplayLedger(Ledger):
    """A ledger that also allocates.

    A block that was not traced frees what its like allocated: found by number, else by size and
    maker, the youngest first.
    """

    allocator: CachingAllocator = field(default_factory=CachingAllocator)
    _held: dict[tuple[int, ...], list[Chunk]] = field(default_factory=dict)
    _holders: dict[int, _Holders] = field(default_factory=dict)
    _alike: dict[tuple[int, int, int], list[list[Chunk]]] = field(default_factory=dict)
    _gradients: dict[int, list[Chunk]] = field(default_factory=dict)
    _answers: list[Chunk] = field(default_factory=list)

    def add(self, block: Block) -> None:
        """Allocate every part of ``block`` on its stream."""
        Ledger.add(self, block)
        for size in block.sizes:
            key = (block.kind, size, block.stream)
            self._held.setdefault(key, []).append(self.allocator.allocate(size, block.stream))

    def drop(self, block: Block) -> None:
        """Free every part of ``block``."""
        Ledger.drop(self, block)
        if block.kind == TEACHER and self._answers and (block.kind, *block.sizes[:1], 0) not in self._held:
            for chunk in self._answers:
                self.allocator.release(chunk)
            self._answers.clear()
            return
        for size in block.sizes:
            chunks = self._held.get((block.kind, size, block.stream))
            if not chunks and block.kind == UNSHARDED_GRADIENTS:
                chunks = self._gradients.get(size)
            if chunks:
                self.allocator.release(chunks.pop(0 if block.kind in _FIRST_OUT else -1))

    def run(self, body: Body, copy: int = 0) -> None:
        """Allocate and free what the trace's segments do."""
        Ledger.run(self, body, copy)
        trace = self.source
        assert trace is not None
        holders = self._holders.get(id(trace)) or self._hold(trace)
        sizes, stacks, alike_of = holders.sizes, holders.stacks, holders.alike
        allocate, release = self.allocator.allocate, self.allocator.release
        for event in body.events:
            if event > 0:
                number = event - 1
                stack = stacks[number]
                stack.append(allocate(sizes[number]))
                alike = alike_of[number]
                if alike is not None:
                    alike.append(stack)
                continue
            number = -event - 1
            stack, alike = stacks[number], alike_of[number]
            if not stack and alike:
                stack = alike[-1]
            if stack:
                release(stack.pop())
                if alike is not None:
                    _forget(alike, stack)

    def _hold(self, trace: Trace) -> _Holders:
        """Prepare for the tensors of a trace that is played for the first time."""
        ends = {-event - 1 for segment in trace.segments for event in segment.events if event < 0}
        stacks: list[list[Chunk]] = []
        alike: list[list[list[Chunk]] | None] = []
        for number, (size, kind, name) in enumerate(zip(trace.sizes, trace.kinds, trace.names, strict=True)):
            if kind == _GRADIENT:
                stacks.append(self._gradients.setdefault(-(-size // _MINIMUM) * _MINIMUM, []))
                alike.append(None)
            elif kind == _TEACHER and trace.teacher is None and number not in ends:
                # A teacher's prediction, which the loss takes over.
                stacks.append(self._answers)
                alike.append(None)
            else:
                stacks.append([])
                alike.append(self._alike.setdefault((size, kind, name), []))
        holders = self._holders[id(trace)] = _Holders(trace.sizes, stacks, alike)
        return holders


def _forget(alike: list[list[Chunk]], stack: list[Chunk]) -> None:
    """Remove the last entry of ``stack``."""
    if alike[-1] is stack:
        alike.pop()
        return
    for index in range(len(alike) - 2, -1, -1):
        if alike[index] is stack:
            del alike[index]
            return
