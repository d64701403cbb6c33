"""The peaks of programs that run on this machine, beside the plans of what starts them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = Callable[[Path], tuple[dict[str, Any], dict[str, Any], list[int]]]
"""In an empty folder: what is told of a row, the document of its plan, and the peak of each rank in bytes."""


def parser(description: str | None, result: Path) -> argparse.ArgumentParser:
    """Return the options that every such benchmark has."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--only", default="", help="text that the row's name must contain")
    made.add_argument("-o", "--output", type=Path, default=result)
    return made


def plan_document(words: list[str], folder: Path) -> dict[str, Any]:
    """Return the document of a plan on CPU processes; ``words`` name its model or files and its ranks."""
    command = [sys.executable, "-m", "fsdptool", "plan", "--profile", "cpu-gloo", "--format", "json", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 5):
        raise RuntimeError(f"{words}: {done.stderr}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def measured_peaks(
    arguments: list[str], folder: Path, processes: int, *, python: str = sys.executable, **variables: str
) -> list[int]:
    """Run a program that writes ``peak-RANK.json`` of each rank, and return these peaks in bytes.

    ``variables`` are further ones of the environment.
    """
    launch = [python]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    # Weights that are cast while they load are otherwise made in threads, whose allocations are not seen.
    environment |= {"HF_DEACTIVATE_ASYNC_LOAD": "1", **variables}
    command = [*launch, *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout[-2000:]}{done.stderr[-6000:]}")
    return [json.loads((folder / f"peak-{rank}.json").read_text()) for rank in range(processes)]


def compare(benchmark: str, rows: Mapping[str, Row], options: argparse.Namespace, **versions: str) -> int:
    """Measure and plan the rows that ``--only`` names, and write them; returns 1 if one is over 2 % apart."""
    from fsdptool.records.diagnostic import library_versions

    found: dict[str, Any] = {}
    if options.only and options.output.exists():
        found = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
    for name, row in rows.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as made:
            told, plan, peaks = row(Path(made))
        chosen = next(item for item in plan["candidates"] if item["id"] == plan["chosen"])
        memory = chosen["allocated_peak_bytes"]
        found[name] = {
            **told,
            "planned_bytes": memory,
            "measured_bytes": peaks,
            "difference": memory / max(peaks) - 1,
            "limits": plan["inputs"].get("limits"),
        }
        sys.stdout.write(f"{name}: planned {memory:,}, measured {peaks}, {found[name]['difference']:+.2%}\n")
        sys.stdout.flush()
        document = {"benchmark": benchmark, "libraries": {**library_versions(), **versions}, "rows": found}
        options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(abs(row["difference"]) > 0.02 for row in found.values()))
