"""The simulated allocator against recordings of real GPUs, and one that is written here by torch's rules."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdptool.runs.recordings.snapshots import read_recordings, recordings_in

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "recordings"))
from allocator import replay

MIB = 1 << 20
RECORDINGS = Path(os.environ.get("FSDPTOOL_RECORDINGS", "absent"))
INDEX = RECORDINGS / "index.jsonl"
FACTS = (
    {entry["file"]: entry for entry in map(json.loads, INDEX.read_text("utf-8").splitlines())}
    if INDEX.is_file()
    else {}
)

HELD = {
    "snapshot-kk-memory-ctx128-forward.pickle.gz": (0, 0),
    "snapshot-kk-memory-ctx128-fullstep.pickle.gz": (0, 0),
    "snapshot-kk-memory-ctx256-forward-mixed.pickle.gz": (124, 14_680_064),
    "snapshot-sm-mem-snapshot.pickle.gz": (0, 0),
    "snapshot-sm-memory-forward-fp32-128.pickle.gz": (0, 0),
}
"""Recordings, with how many requests may grow memory elsewhere, and by how many bytes on the way: torch takes
the lowest address among equals, the simulator the oldest. ``benchmarks/recordings`` has the others."""


@pytest.mark.slow
@pytest.mark.skipif(not FACTS, reason="FSDPTOOL_RECORDINGS names no folder of recordings")
@pytest.mark.parametrize("file", HELD)
def test_recordings_of_real_gpus(file: str) -> None:
    found, facts = replay(read_recordings(RECORDINGS / file)[0]), FACTS[file]["replay"]
    assert (found.requests - found.as_recorded, found.largest_difference) == HELD[file]
    assert found.requests == facts["allocs"]
    assert found.segments_simulated == found.segments_recorded == facts["segment_allocs_recorded"]
    assert found.peak_reserved_simulated == found.peak_reserved_recorded == facts["peak_reserved_recorded"]
    assert found.reserved_end_simulated == found.reserved_end_recorded == facts["reserved_end_recorded"]
    assert found.allocated_end_simulated == found.allocated_end_recorded


def _entry(action: str, address: int, size: int) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": []}


def _block(address: int, size: int, *, used: bool) -> dict[str, Any]:
    return {"address": address, "size": size, "state": "active_allocated" if used else "inactive"}


@pytest.mark.parametrize("third", [9 * MIB, 11 * MIB])
def test_recording_by_torchs_rules(third: int) -> None:
    """Of 20 MiB, 4 and 6 MiB are taken and given back and merge with what is left; 12 MiB remain in use."""
    segment = 1 << 40
    entries = [
        _entry("segment_alloc", segment, 20 * MIB),
        _entry("alloc", segment, 4 * MIB),
        _entry("alloc", segment + 4 * MIB, 6 * MIB),
        _entry("free_completed", segment, 4 * MIB),
        _entry("free_completed", segment + 4 * MIB, 6 * MIB),
        _entry("alloc", segment, 8 * MIB),
        *([_entry("segment_alloc", 2 * segment, 10 * MIB)] if third > 10 * MIB else []),
        _entry("alloc", segment + 8 * MIB, third),
    ]
    blocks = [
        _block(segment, 8 * MIB, used=True),
        _block(segment + 8 * MIB, third, used=True),
        _block(segment + 8 * MIB + third, 12 * MIB - third, used=False),
    ]
    kind = {"device": 0, "stream": 0, "segment_type": "large"}
    segments = [{**kind, "address": segment, "total_size": 20 * MIB, "blocks": blocks}]
    if third > 10 * MIB:
        spare = [_block(2 * segment, 10 * MIB, used=False)]
        segments.append({**kind, "address": 2 * segment, "total_size": 10 * MIB, "blocks": spare})
    (recording,) = recordings_in({"segments": segments, "device_traces": [entries]})
    assert (recording.start, recording.contradictions) == ({}, 0)
    found = replay(recording)
    # The needless segment of the second case is not what the rules give: the comparison notices it.
    wrong = third > 10 * MIB
    assert (found.requests - found.as_recorded, found.segments_simulated) == (int(wrong), 1)
    assert found.largest_difference == (10 * MIB if wrong else 0)
    assert found.peak_reserved_simulated == 20 * MIB
    assert found.allocated_end_simulated == 8 * MIB + (12 * MIB if wrong else third)
