"""The allocator's simulator against recordings of real GPUs: the same requests, the same segments?

    python benchmarks/recordings/allocator.py FOLDER    # of *.pickle.gz, with index.jsonl

The simulator starts from the blocks that the recording implies, in order of address, and is given only what
was allocated and freed, with size and stream. After every request it must have grown as the recording did.
Segments that the recording gives back one after another are one ``empty_cache``.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdptool.memory.simulation.allocator import CachingAllocator, Chunk, Pool
from fsdptool.runs.recordings.snapshots import Recording, read_recordings

RESULTS = Path(__file__).parents[1] / "results" / "recorded-allocator.json"
_SMALL = 1 << 20


@dataclass(frozen=True)
class Agreement:
    """What the simulator did and what was recorded; bytes, and numbers of requests and segments."""

    requests: int
    as_recorded: int
    segments_recorded: int
    segments_simulated: int
    peak_reserved_recorded: int
    peak_reserved_simulated: int
    reserved_end_recorded: int
    reserved_end_simulated: int
    allocated_end_recorded: int
    allocated_end_simulated: int
    largest_difference: int


def replay(recording: Recording) -> Agreement:
    """Return how far the simulator agrees with the recording of one GPU."""
    allocator = CachingAllocator()
    held = _begin(allocator, recording)
    reserved = recording.reserved_start
    peak, grown = reserved, 0
    allocator.reserved_peak = allocator.reserved
    requests = right = segments = simulated = largest = 0
    clearing = False
    for entry in recording.entries:
        if entry.action == "segment_alloc":
            grown += entry.size
            segments += 1
            reserved += entry.size
        elif entry.action == "alloc":
            requests += 1
            before = allocator.reserved
            held[entry.address] = allocator.allocate(entry.size, entry.stream)
            simulated += allocator.reserved > before
            right += allocator.reserved - before == grown
            grown = 0
            largest = max(largest, abs(allocator.reserved - reserved))
        elif entry.action == "free_completed" and entry.address in held:
            allocator.release(held.pop(entry.address))
        elif entry.action == "segment_free":
            reserved -= entry.size
            if not clearing:
                _empty_cache(allocator)
        clearing = entry.action == "segment_free"
        peak = max(peak, reserved)
    return Agreement(
        requests,
        right,
        segments,
        simulated,
        peak,
        allocator.reserved_peak,
        reserved,
        allocator.reserved,
        sum(block.size for block in recording.end.values()),
        allocator.allocated,
        largest,
    )


def _begin(allocator: CachingAllocator, recording: Recording) -> dict[int, Chunk]:
    """Put the blocks and gaps before the first entry into the allocator; return those in use by address."""
    held: dict[int, Chunk] = {}
    starts = sorted(recording.start)
    for address, size, stream, small in _segments(recording):
        pool = allocator._pools.setdefault((stream, small), Pool(small))
        cursor, before = address, None
        inside = [place for place in starts if address <= place < address + size]
        for place in (*inside, address + size):
            if place > cursor:
                before = _link(allocator, pool, place - cursor, before, free=True)
            if place == address + size:
                break
            length = recording.start[place].size
            following = min((other for other in inside if other > place), default=address + size)
            # The remainder of a large block that was not split off belongs to it.
            if not small and 0 < following - place - length < _SMALL:
                length = following - place
            held[place] = before = _link(allocator, pool, length, before, free=False)
            allocator.allocated += length
            cursor = place + length
        allocator.reserved += size
    return held


def _link(allocator: CachingAllocator, pool: Pool, size: int, before: Chunk | None, *, free: bool) -> Chunk:
    chunk = allocator._chunk(size, pool)
    chunk.before = before
    if before is not None:
        before.after = chunk
    if free:
        allocator.allocated += size
        # Without neighbours yet, so that nothing merges that was recorded apart.
        chunk.before = None
        allocator.release(chunk)
        chunk.before = before
    return chunk


def _segments(recording: Recording) -> list[tuple[int, int, int, bool]]:
    """Return address, size, stream and pool of the segments before the first entry."""
    found = {
        segment["address"]: (segment["total_size"], segment["stream"], segment["segment_type"] == "small")
        for segment in recording.segments
    }
    for entry in reversed(recording.entries):
        if entry.action == "segment_alloc":
            found.pop(entry.address, None)
        elif entry.action == "segment_free":
            found[entry.address] = (entry.size, entry.stream, entry.size == 2 * _SMALL)
    return [(address, *what) for address, what in sorted(found.items())]


def _empty_cache(allocator: CachingAllocator) -> None:
    for pool in allocator._pools.values():
        for place, chunk in list(pool.free.items()):
            if chunk.before is None and chunk.after is None:
                del pool.free[place]
                pool.places.remove(place)
                allocator.reserved -= chunk.size


def main(folder: Path) -> None:
    """Print a row for each recording, and keep the numbers."""
    rows = {}
    for path in sorted(folder.glob("snapshot-*.pickle.gz")):
        recording = read_recordings(path)[0]
        if any(entry.action == "alloc" for entry in recording.entries):
            row = rows[path.name.removesuffix(".pickle.gz")] = asdict(replay(recording))
            print(path.name, *row.values(), flush=True)
    total = {key: sum(row[key] for row in rows.values()) for key in ("requests", "as_recorded")}
    print(f"{total['as_recorded']:,} of {total['requests']:,} requests grew memory as recorded")
    RESULTS.write_text(json.dumps({"recordings": rows, "total": total}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
