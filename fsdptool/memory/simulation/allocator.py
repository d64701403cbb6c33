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

from fsdptool.memory.simulation.ledger import GATHER, REDUCE, TEACHER, UNSHARDED_GRADIENTS, Block, Ledger
from fsdptool.memory.simulation.program import Body
from fsdptool.records.trace import KINDS, Trace

MIB = 1 << 20
_SMALL = MIB
_SMALL_SEGMENT = 2 * MIB
_MIDDLE = 10 * MIB
_LARGE_SEGMENT = 20 * MIB
_ROUND_LARGE = 2 * MIB
_MINIMUM = 512


@dataclass(slots=True, eq=False)
class Chunk:
    """A piece of a segment; neighbours are linked."""

    size: int
    pool: tuple[int, bool]
    serial: int
    free: bool = False
    before: Chunk | None = None
    after: Chunk | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Segments, free lists and the two counters that ``torch.cuda.memory_stats`` reports.

    Args:
        expandable: ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
    """

    expandable: bool = False
    reserved: int = 0
    allocated: int = 0
    reserved_peak: int = 0
    allocated_peak: int = 0
    _free: dict[tuple[int, bool], list[tuple[int, int, Chunk]]] = field(default_factory=dict)
    _tail: dict[tuple[int, bool], Chunk] = field(default_factory=dict)
    _serial: int = 0

    def allocate(self, size: int, stream: int = 0) -> Chunk:
        """Return a chunk of at least ``size`` bytes."""
        rounded_size = max(-(-size // _MINIMUM) * _MINIMUM, _MINIMUM)
        pool = (stream, rounded_size <= _SMALL)
        chunk = self._best_fit(pool, rounded_size) or self._grow(pool, rounded_size)
        left = chunk.size - rounded_size
        if left >= _MINIMUM if pool[1] or self.expandable else left > _SMALL:
            self._split(chunk, rounded_size)
        chunk.free = False
        self.allocated += chunk.size
        self.allocated_peak = max(self.allocated_peak, self.allocated)
        return chunk

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back to its stream's free list."""
        self.allocated -= chunk.size
        for neighbour in (chunk.before, chunk.after):
            if neighbour is not None and neighbour.free:
                self._unlist(neighbour)
                self._merge(chunk, neighbour)
        chunk.free = True
        self._list(chunk)

    def _best_fit(self, pool: tuple[int, bool], size: int) -> Chunk | None:
        chunks = self._free.get(pool)
        if not chunks:
            return None
        index = bisect_left(chunks, size, key=lambda entry: entry[0])
        if index == len(chunks):
            return None
        return chunks.pop(index)[2]

    def _grow(self, pool: tuple[int, bool], size: int) -> Chunk:
        if self.expandable:
            return self._extend(pool, size)
        if pool[1]:
            segment = _SMALL_SEGMENT
        elif size < _MIDDLE:
            segment = _LARGE_SEGMENT
        else:
            segment = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        self._reserve(segment)
        return self._chunk(segment, pool)

    def _extend(self, pool: tuple[int, bool], size: int) -> Chunk:
        """Map pages behind the pool's last chunk, using what is free of it."""
        page = _SMALL_SEGMENT if pool[1] else _LARGE_SEGMENT
        last = self._tail.get(pool)
        usable = 0
        if last is not None and last.free:
            self._unlist(last)
            usable = last.size
        mapped = -(-(size - usable) // page) * page
        self._reserve(mapped)
        if last is not None and usable:
            last.size += mapped
            return last
        chunk = self._chunk(mapped, pool)
        chunk.before = last
        if last is not None:
            last.after = chunk
        self._tail[pool] = chunk
        return chunk

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.reserved_peak = max(self.reserved_peak, self.reserved)

    def _chunk(self, size: int, pool: tuple[int, bool]) -> Chunk:
        self._serial += 1
        return Chunk(size, pool, self._serial)

    def _split(self, chunk: Chunk, size: int) -> None:
        rest = self._chunk(chunk.size - size, chunk.pool)
        chunk.size = size
        rest.before, rest.after = chunk, chunk.after
        if chunk.after is not None:
            chunk.after.before = rest
        chunk.after = rest
        if self._tail.get(chunk.pool) is chunk:
            self._tail[chunk.pool] = rest
        rest.free = True
        self._list(rest)

    def _merge(self, chunk: Chunk, neighbour: Chunk) -> None:
        chunk.size += neighbour.size
        if neighbour is chunk.before:
            chunk.before = neighbour.before
            if chunk.before is not None:
                chunk.before.after = chunk
        else:
            chunk.after = neighbour.after
            if chunk.after is not None:
                chunk.after.before = chunk
            if self._tail.get(chunk.pool) is neighbour:
                self._tail[chunk.pool] = chunk

    def _list(self, chunk: Chunk) -> None:
        insort(
            self._free.setdefault(chunk.pool, []),
            (chunk.size, chunk.serial, chunk),
            key=lambda entry: (entry[0], entry[1]),
        )

    def _unlist(self, chunk: Chunk) -> None:
        chunks = self._free[chunk.pool]
        index = bisect_left(chunks, (chunk.size, chunk.serial), key=lambda entry: (entry[0], entry[1]))
        del chunks[index]


_FIRST_OUT = (GATHER, REDUCE)
"""Buffers in flight leave in the order they came; everything else in the reverse."""

_GRADIENT = KINDS.index("gradient")
_TEACHER = KINDS.index("teacher")
_OFFLOADED = KINDS.index("offloaded")


@dataclass(slots=True)
class ReplayLedger(Ledger):
    """A ledger that also allocates.

    A block that was not traced frees what its like allocated: found by number, else by size and
    maker, the youngest first.
    """

    allocator: CachingAllocator = field(default_factory=CachingAllocator)
    _held: dict[tuple[int, ...], list[Chunk]] = field(default_factory=dict)
    _numbered: dict[tuple[int, int], list[Chunk]] = field(default_factory=dict)
    _alike: dict[tuple[int, int, int], list[tuple[int, int]]] = field(default_factory=dict)
    _gradients: dict[int, list[Chunk]] = field(default_factory=dict)
    _answers: list[Chunk] = field(default_factory=list)
    _lasting: dict[int, frozenset[int]] = field(default_factory=dict)

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
        for segment in trace.segments[body.first : body.last]:
            for event in segment.events:
                if trace.kinds[abs(event) - 1] == _OFFLOADED:
                    continue
                if event > 0:
                    self._allocate(trace, event - 1)
                else:
                    self._release(trace, -event - 1)

    def _allocate(self, trace: Trace, number: int) -> None:
        size, kind = trace.sizes[number], trace.kinds[number]
        chunk = self.allocator.allocate(size)
        if kind == _GRADIENT:
            self._gradients.setdefault(-(-size // 512) * 512, []).append(chunk)
            return
        if kind == _TEACHER and trace.teacher is None and number in self._kept(trace):
            self._answers.append(chunk)
            return
        key = (id(trace), number)
        self._numbered.setdefault(key, []).append(chunk)
        self._alike.setdefault((size, kind, trace.names[number]), []).append(key)

    def _release(self, trace: Trace, number: int) -> None:
        size, kind = trace.sizes[number], trace.kinds[number]
        if kind == _GRADIENT:
            chunks = self._gradients.get(-(-size // 512) * 512)
            if chunks:
                self.allocator.release(chunks.pop())
            return
        key = (id(trace), number)
        alike = self._alike.get((size, kind, trace.names[number]), [])
        chunks = self._numbered.get(key)
        if not chunks and alike:
            key = alike[-1]
            chunks = self._numbered[key]
        if chunks:
            self.allocator.release(chunks.pop())
            for index in range(len(alike) - 1, -1, -1):
                if alike[index] == key:
                    del alike[index]
                    break

    def _kept(self, trace: Trace) -> frozenset[int]:
        """Return what a trace never frees: a teacher's prediction. Worked out once for each trace."""
        if id(trace) not in self._lasting:
            ends = {-event - 1 for segment in trace.segments for event in segment.events if event < 0}
            self._lasting[id(trace)] = frozenset(range(len(trace.sizes))) - ends
        return self._lasting[id(trace)]
