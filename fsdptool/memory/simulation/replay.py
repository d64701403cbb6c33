"""Plays a step's allocations, one by one and stream by stream, through an allocator."""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdptool.memory.simulation.allocator import CachingAllocator, Chunk
from fsdptool.memory.simulation.ledger import GATHER, REDUCE, TEACHER, UNSHARDED_GRADIENTS, Block, Ledger
from fsdptool.memory.simulation.program import Body
from fsdptool.records.trace import KINDS, Trace

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
