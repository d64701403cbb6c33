"""The caching allocator's rules, one by one."""

from __future__ import annotations

import pytest

from fsdptool.memory.simulation.allocator import MIB, CachingAllocator, ReplayLedger
from fsdptool.memory.simulation.ledger import UNSHARDED_GRADIENTS, Block
from fsdptool.memory.simulation.program import program
from fsdptool.records.trace import KINDS, Segment, Trace


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB + 1, 12 * MIB),
    ],
)
def test_the_first_request_reserves_its_segment(size: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(size)
    assert allocator.reserved == segment


def test_sizes_are_rounded_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.allocate(513)
    assert allocator.allocated == 1024


def test_small_remainders_of_large_segments_stay_with_the_block() -> None:
    allocator = CachingAllocator()
    allocator.allocate(11 * MIB + 512)
    assert allocator.allocated == 12 * MIB


def test_freed_memory_is_taken_again_on_its_stream_only() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(32 * MIB, stream=0))
    allocator.allocate(32 * MIB, stream=1)
    assert allocator.reserved == 64 * MIB
    allocator.allocate(32 * MIB, stream=0)
    assert allocator.reserved == 64 * MIB


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.release(large)
    allocator.release(small)
    allocator.allocate(31 * MIB + 512)
    allocator.allocate(64 * MIB)
    assert allocator.reserved == 96 * MIB


def test_neighbours_merge() -> None:
    allocator = CachingAllocator()
    pieces = [allocator.allocate(4 * MIB) for _ in range(5)]
    for piece in (pieces[1], pieces[3], pieces[2], pieces[0], pieces[4]):
        allocator.release(piece)
    assert allocator.allocated == 0
    allocator.allocate(9 * MIB)
    allocator.allocate(9 * MIB)
    assert allocator.reserved == 20 * MIB


def test_the_growing_end_of_expandable_segments_is_taken_last() -> None:
    """Of 8 MiB free and an end of 6 MiB, torch puts 5 MiB into the 8; 10 more then grow from the 6."""
    allocator = CachingAllocator(expandable=True)
    hole = allocator.allocate(8 * MIB)
    allocator.allocate(6 * MIB)
    allocator.release(hole)
    assert allocator.reserved == 20 * MIB
    assert allocator.allocate(5 * MIB) is hole
    allocator.allocate(10 * MIB)
    assert allocator.reserved == 40 * MIB


def test_expandable_segments_do_not_fragment() -> None:
    """Two freed halves serve a larger request only where the range can grow behind them."""
    plain, growing = CachingAllocator(), CachingAllocator(expandable=True)
    for allocator in (plain, growing):
        blocks = [allocator.allocate(40 * MIB), allocator.allocate(40 * MIB)]
        for block in blocks:
            allocator.release(block)
        allocator.allocate(100 * MIB)
    assert plain.reserved == 180 * MIB
    assert growing.reserved == 100 * MIB


def test_peaks_are_kept() -> None:
    allocator = CachingAllocator()
    allocator.release(allocator.allocate(64 * MIB))
    assert (allocator.allocated, allocator.allocated_peak) == (0, 64 * MIB)
    assert allocator.reserved_peak == 64 * MIB


def test_a_reduction_frees_the_gradients_that_backward_made() -> None:
    """Backward allocates them as tensors of the trace; what a reduction frees is known by its sizes alone."""
    sizes = (4096, 8192)
    made = Trace(
        profile="cuda",
        compute_dtype="bfloat16",
        segments=(Segment("end", "", (1, 2)),),
        sizes=sizes,
        kinds=(KINDS.index("gradient"),) * 2,
        names=(0, 0),
        vocabulary=("weight",),
    )
    ledger = ReplayLedger(source=made)
    for piece in program(made, frozenset({""}), 1):
        ledger.run(piece.body)
    assert ledger.allocator.allocated == sum(sizes)
    ledger.drop(Block(UNSHARDED_GRADIENTS, sum(sizes), sizes))
    assert ledger.allocator.allocated == 0
