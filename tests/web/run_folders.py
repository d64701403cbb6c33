"""Run folders as training leaves them, and servers whose queue starts played runs."""

from __future__ import annotations

import json
import os
import struct
import time
import zlib
from pathlib import Path
from typing import Any

from fsdptool.launch.outcome import write_summary
from fsdptool.records.run import RunFailure, Start, Summary
from fsdptool.runs.events import event_path
from fsdptool.runs.folder import write_start

EVIL = "<script>alert(1)</script>"


def _picture(width: int = 160, height: int = 96) -> bytes:
    """Return a PNG: a gradient in grey."""
    rows = b"".join(b"\0" + bytes((x + y) % 256 for x in range(width)) for y in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


PICTURE = _picture()


def make_run(
    folder: Path, *, steps: int = 20, status: str | None = "stopped", message: str = "", model: str = EVIL
) -> Path:
    """Write the folder of a run with two ranks as ``fsdptool train`` does."""
    now = time.time()
    for name in ("events", "logs", "checkpoints", "samples/step-00000010"):
        (folder / name).mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps({"model": {"reference": model}, "steps": steps}))
    write_start(folder, Start(2, "cpu"), None)
    os.utime(folder / "run.json", (now - 100, now - 100))
    for rank in (0, 1):
        head = {"time": now - 90, "rank": rank, "attempt": 0, "pid": 1}
        moments = {"backward": (rank + 1) << 20}
        lines = [{"kind": "started", "node": "here", **head}, {"kind": "memory", "moments": moments, **head}]
        if rank == 0:
            lines.append({"kind": "evaluation", "step": 10, "loss": 4.5, **head})
            lines.append({"kind": "warning", "message": EVIL, **head})
        event_path(folder, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    with (folder / "metrics.jsonl").open("w") as stream:
        for step in range(1, steps + 1):
            rates = {"tokens": 256, "samples": 4, "step_seconds": 0.5, "data_seconds": 0.0}
            peak = {"memory_allocated_peak_bytes": 1 << 20}
            line = {"step": step, "time": now - 80 + step / steps, "loss": 6 - step / steps, **rates, **peak}
            stream.write(json.dumps(line) + "\n")
    (folder / "samples" / "step-00000010" / "0.txt").write_text(f"once upon a time {EVIL}\n\x1b[31m")
    (folder / "samples" / "step-00000010" / "1.png").write_bytes(PICTURE)
    if status is not None:
        failure = RunFailure(1, message, "ask for less", 4) if message else None
        base: dict[str, Any] = {
            **{"status": status, "exit_code": 4 if failure else 75, "resumable": True, "steps": steps},
            **{"world_size": 2, "mesh": {"dp_replicate": 1, "dp_shard": 2}, "units": 3, "sharding_proof": {}},
            **{"predicted_peak_bytes": 900, "measured_peak_bytes": (1, 2), "instrument": "none"},
            **{"error_percent": None, "throughput": {}, "last_checkpoint": None, "last_good_step": None},
            **{"export": None, "restarts": 0, "memory_report": None},
        }
        write_summary(folder, Summary(**base, failure=failure))
    return folder
