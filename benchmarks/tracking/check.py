"""Train with Weights & Biases (offline) and trackio as trackers, and read back what each of them wrote.

    python benchmarks/tracking/check.py --output benchmarks/results/tracking.json

Both are too large to be test dependencies, so run this script by hand when a tracker's interface may have
changed. Every step's loss must be in the tracker's own files (read with wandb's own message types and from
trackio's SQLite file) and equal ``metrics.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fsdptool.records.diagnostic import library_versions, tool_version
from fsdptool.runs.events import read_lines

STEPS = 6

RECIPE = f"""\
model: {{reference: "llama3:tiny", weights: random, overrides: {{num_hidden_layers: 2}}}}
data: {{source: synthetic}}
batch: {{micro_batch: 2, sequence_length: 32}}
steps: {STEPS}
tracking: {{backends: [BACKEND], log_every: 1}}
"""

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = (EXAMPLES / "configs" / "two_cpu_processes.yaml").read_text(encoding="utf-8")


def train(folder: Path, backend: str) -> Path:
    """Run ``fsdptool train`` with one tracker and return the run folder."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE.replace("BACKEND", backend))
    (folder / "accelerate.yaml").write_text(CONFIG)
    run = folder / "run"
    subprocess.run(
        [
            *(sys.executable, "-m", "fsdptool", "train", "recipe.yaml", "--config", "accelerate.yaml"),
            *("--no-predict", "-o", str(run)),
        ],
        cwd=folder,
        env={**os.environ, "WANDB_MODE": "offline", "TRACKIO_DIR": str(folder / "trackio")},
        check=True,
        timeout=200,
    )
    return run


def wandb_records(file: Path) -> Iterator[bytes]:
    """Yield the records of an offline run: LevelDB's log format after a header of seven bytes.

    Blocks of 32 KiB hold chunks of checksum (4 bytes), length (2), kind (1: whole, 2: first, 3: middle,
    4: last) and data; the end of a block that is too short for a chunk's head is padding.
    """
    data, at, block = file.read_bytes(), 7, 32 * 1024
    parts: list[bytes] = []
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            return
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def from_wandb(run: Path) -> dict[int, float]:
    """Return the losses of an offline run by step, through wandb's own message types."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = run.rglob("*.wandb")
    results: dict[int, float] = {}
    for data in wandb_records(file):
        record: Any = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            results[int(row["_step"])] = json.loads(row["loss"])
    return results


def from_trackio(folder: Path) -> dict[int, float]:
    """Return the losses by step from trackio's database."""
    (file,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    return {int(step): json.loads(text)["loss"] for step, text in rows}


def check(backend: str) -> dict[str, Any]:
    """Train with a tracker and compare the losses."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, backend)
        run = train(folder, backend)
        wanted = {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl")}
        result = from_wandb(run) if backend == "wandb" else from_trackio(folder)
    return {"version": version(backend), "steps": len(result), "equal": result == wanted}


def main() -> int:
    """Check the requested trackers; return 1 if one lost a value."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", nargs="+", default=["wandb", "trackio"])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "fsdptool": tool_version(),
        "libraries": library_versions(),
        "python": sys.version.split()[0],
        "wanted_steps": STEPS,
        "trackers": {backend: check(backend) for backend in arguments.backends},
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if arguments.output is not None:
        arguments.output.write_text(text)
    good = all(item["equal"] and item["steps"] == STEPS for item in result["trackers"].values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
