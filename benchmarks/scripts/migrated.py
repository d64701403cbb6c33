"""Train scripts of FSDP1 on two gloo ranks, before and after ``fsdptool migrate``, and compare their losses.

    python benchmarks/scripts/migrated.py [NAME ...]

Each script of ``fsdp1/`` has another shape. The result is ``results/migrated.json``;
with names, only theirs are new.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fsdptool.files.text import SourceText
from fsdptool.scripts.migrate import migrate_script

HERE = Path(__file__).parent
VERSIONS = {"torch": "2.13.0"}
LIMIT = 1e-6

INSTEAD = {
    "weights_from_rank_zero": (
        "    model = FSDP(\n",
        "    for tensor in (*model.parameters(), *model.buffers()):\n"
        "        dist.broadcast(tensor.detach(), src=0)\n"
        "    model = FSDP(\n",
        "        sync_module_states=True,\n",
    )
}
"""FSDP1 refuses sync_module_states on the CPU: the original that is run broadcasts by hand. What is migrated
has the argument. By script: a text, what it becomes, and a text that is left out."""


def train(script: Path, losses: Path) -> tuple[list[float], str]:
    """Run a script on two ranks; return the losses of both, and what was written to standard error."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOSSES": str(losses)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = "".join(process.communicate(timeout=300)[1] for process in processes)
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{script.name}: {errors[-2000:]}")
    return [
        float(line)
        for rank in range(2)
        for line in Path(f"{losses}.{rank}").read_text(encoding="utf-8").split()
    ], errors


def compare(script: Path, folder: Path) -> dict[str, Any]:
    """Return how far the losses of a migrated script are from those of the original."""
    text = script.read_text(encoding="utf-8")
    migrated = migrate_script(SourceText(text), VERSIONS)
    assert migrated.text is not None, migrated.blocked
    after = folder / script.name
    after.write_text(migrated.text, encoding="utf-8")
    if script.stem in INSTEAD:
        old, new, gone = INSTEAD[script.stem]
        script = folder / f"by_hand_{script.name}"
        script.write_text(text.replace(old, new).replace(gone, ""), encoding="utf-8")
    before, _ = train(script, folder / f"{script.stem}.before")
    now, _ = train(after, folder / f"{script.stem}.after")
    assert len(before) == len(now) > 0
    furthest = max(abs(one - two) for one, two in zip(before, now, strict=True))
    assert len({round(loss, 4) for loss in before}) > 3, "nothing is trained"
    return {
        "values": len(before),
        "first": before[0],
        "largest_difference": furthest,
        "equal": furthest <= LIMIT,
        "notes": list(migrated.notes),
    }


if __name__ == "__main__":
    chosen = [
        path
        for path in sorted((HERE / "fsdp1").glob("*.py"))
        if path.stem in sys.argv[1:] or len(sys.argv) == 1
    ]
    file = HERE / "results" / "migrated.json"
    results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["scripts"] if file.exists() else {}
    with tempfile.TemporaryDirectory() as place:
        for path in chosen:
            results[path.stem] = compare(path, Path(place))
            print(path.stem, json.dumps(results[path.stem]), flush=True)
            equal = sum(item["equal"] for item in results.values())
            report = {"limit": LIMIT, "equal": equal, "scripts": dict(sorted(results.items()))}
            file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
