"""The caching allocator on a device that is not large enough for every sequence of requests. Torch-free.

What torch 2.13 does when the driver has no more memory (``c10/cuda/CUDACachingAllocator.cpp``): ``malloc``
calls ``release_cached_blocks`` and tries once more. Segments of which nothing is in use are returned to the
driver; of expandable segments, every whole page that is free is unmapped (``unmap_block``). torch maps pages
anew at the lowest address at which a request fits, this model at the end of the range: that can differ by a
page per hole.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

from fsdptool.memory.simulation.allocator import (
    LARGE_SEGMENT,
    SERIAL_BITS,
    SMALL_SEGMENT,
    CachingAllocator,
    Chunk,
    Pool,
)


class OutOfMemory(Exception):
    """A request that could not be served even with an empty cache."""


@dataclass(slots=True)
class LimitedAllocator(CachingAllocator):
    """A caching allocator that may reserve no more than ``limit`` bytes.

    Attributes:
        limit: Bytes of the device that are left to the allocator.
        retries: How often the cache was emptied to serve a request (``num_alloc_retries``).
    """

    limit: int = 0
    retries: int = 0

    def _grow(self, pool: Pool, size: int) -> Chunk:
        if self.reserved + self.growth(pool, size) > self.limit:
            self.retries += 1
            self.empty_cache()
            if self.reserved + self.growth(pool, size) > self.limit:
                raise OutOfMemory
        return CachingAllocator._grow(self, pool, size)

    def empty_cache(self) -> None:
        """Return what is free to the driver: whole segments, or whole pages of expandable ones."""
        for pool in self._pools.values():
            if self.expandable:
                _unmap(self, pool)
                continue
            for place, chunk in list(pool.free.items()):
                if chunk.before is None and chunk.after is None:
                    del pool.free[place], pool.places[bisect_left(pool.places, place)]
                    self.reserved -= chunk.size


def _unmap(allocator: LimitedAllocator, pool: Pool) -> None:
    """Turn every free whole page of a range into a hole: a chunk that is never free again."""
    page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
    chunk = pool.tail
    while chunk is not None and chunk.before is not None:
        chunk = chunk.before
    start = 0
    while chunk is not None:
        end, after = start + chunk.size, chunk.after
        lead = -start % page
        length = (chunk.size - lead) // page * page
        if chunk.free and length > 0:
            place = chunk.size << SERIAL_BITS | chunk.serial
            del pool.free[place], pool.places[bisect_left(pool.places, place)]
            allocator.reserved -= length
            for size, hole in ((lead, False), (length, True), (end - start - lead - length, False)):
                if size:
                    chunk = _place(allocator, pool, chunk, size, free=not hole)
        start, chunk = end, after


def _place(allocator: LimitedAllocator, pool: Pool, chunk: Chunk, size: int, *, free: bool) -> Chunk:
    """Make the first ``size`` bytes of a chunk one of their own; returns the rest, or the chunk itself."""
    left = chunk.size - size
    chunk.size, chunk.free = size, free
    if free:
        place = size << SERIAL_BITS | chunk.serial
        insort(pool.places, place)
        pool.free[place] = chunk
    if not left:
        return chunk
    allocator._serial += 1
    rest = Chunk(left, pool, allocator._serial, False, chunk, chunk.after)
    if chunk.after is not None:
        chunk.after.before = rest
    if pool.tail is chunk:
        pool.tail = rest
    chunk.after = rest
    return rest
