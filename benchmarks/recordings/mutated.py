"""Damaged memory snapshots: every one is described or refused in one line, none ends in an exception.

python benchmarks/recordings/mutated.py SNAPSHOT.pickle.gz [NUMBER]
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from fsdptool.errors import StorageError
from fsdptool.records.diagnostic import answer
from fsdptool.report.page.snapshot import snapshot_page
from fsdptool.runs.recordings.snapshots import describe_snapshot

RESULTS = Path(__file__).parents[1] / "results" / "mutated-recordings.json"


def mutated(data: bytes, generator: random.Random) -> bytes:
    """Return a copy with a few bytes changed, a piece doubled or left out, or the end cut off."""
    changed = bytearray(data)
    for _ in range(generator.choice((1, 2, 5, 50))):
        changed[generator.randrange(len(changed))] = generator.randrange(256)
    begin = generator.randrange(len(changed))
    end = min(begin + generator.randrange(1, 200), len(changed))
    match generator.randrange(6):
        case 0:
            del changed[begin:end]
        case 1:
            changed[begin:begin] = changed[begin:end]
        case 2:
            del changed[begin:]
    return bytes(changed)


def main(path: Path, number: int) -> None:
    """Describe damaged copies of a snapshot, and count what became of them."""
    data = gzip.decompress(path.read_bytes())
    generator = random.Random(38)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        damaged = Path(folder, "snapshot.pickle")
        for _ in range(number):
            damaged.write_bytes(mutated(data, generator))
            try:
                snapshot_page(answer("memory-snapshot", "", describe_snapshot(damaged)))
                found["described"] += 1
            except StorageError as error:
                found["refused by name" if "imports" in error.message else "refused"] += 1
    print(dict(found))
    RESULTS.write_text(json.dumps({"snapshots": number, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 3000)
