"""Measure the time of traces and footprints, without imports, and their memory.

``python benchmarks/memory/speed.py`` writes ``benchmarks/results/memory_speed.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["FSDPTOOL_CACHE"] = tempfile.mkdtemp(prefix="fsdptool-speed-")

from fsdptool.inspection import inspect
from fsdptool.memory import footprint, trace
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.units import plan_units
from fsdptool.records.diagnostic import library_versions
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Batch, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.source import resolve

RESULTS = Path(__file__).parent.parent / "results" / "memory_speed.json"
MODELS = {"70B dense": ("llama3:70b", 64), "235B MoE": ("qwen3-moe:235b-a22b", 128)}
CANDIDATES = 500


def main() -> None:
    """Measure and write the result."""
    import fsdptool.memory.tracing.make_trace  # noqa: F401 - imports are excluded

    _warm("llama3:8b")
    rows = {name: _row(reference, ranks) for name, (reference, ranks) in MODELS.items()}
    document = {
        "hardware": {"machine": platform.machine(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
        "libraries": library_versions(),
        "rows": rows,
        "resident_peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1))


def _warm(reference: str) -> None:
    """Trace a small model once, so that lazily imported modules are loaded."""
    recipe = Recipe(ModelChoice(reference), batch=Batch(sequence_length=128))
    trace(resolve(reference), resolve_run(recipe, FsdpSettings(num_processes=8)), use_cache=False)
    moe = "qwen3-moe:30b-a3b"
    recipe = Recipe(ModelChoice(moe), batch=Batch(sequence_length=128))
    trace(resolve(moe), resolve_run(recipe, FsdpSettings(num_processes=8)), use_cache=False)


def _row(reference: str, ranks: int) -> dict[str, Any]:
    spec = resolve(reference)
    recipe = Recipe(ModelChoice(reference), batch=Batch(sequence_length=8192, accumulation=2))
    settings = FsdpSettings(num_processes=ranks, activation_checkpointing=True)
    row: dict[str, Any] = {"reference": reference}
    began, busy = time.perf_counter(), time.process_time()
    trace(spec, resolve_run(recipe, settings))
    row["trace_cold_seconds"] = round(time.perf_counter() - began, 3)
    row["trace_cold_cpu_seconds"] = round(time.process_time() - busy, 3)
    began = time.perf_counter()
    kept = trace(spec, resolve_run(recipe, settings))
    row["trace_cached_seconds"] = round(time.perf_counter() - began, 3)
    anatomy = inspect(spec)
    plans = [
        plan_units(
            anatomy, resolve_run(recipe, dataclasses.replace(settings, reshard_after_forward=kept_after))
        )
        for kept_after in (True, False)
    ]
    began, busy = time.perf_counter(), time.process_time()
    for index in range(CANDIDATES):
        replicate = 1 << (index % 4)
        mesh = ParallelDims(dp_replicate=replicate).resolve(ranks)
        footprint(kept, plans[index % 2], mesh, recipe, timeline=False)
    row[f"{CANDIDATES}_footprints_seconds"] = round(time.perf_counter() - began, 3)
    row[f"{CANDIDATES}_footprints_cpu_seconds"] = round(time.process_time() - busy, 3)
    began = time.perf_counter()
    footprint(kept, plans[0], ParallelDims().resolve(ranks), recipe, reserved=True)
    row["allocator_replay_seconds"] = round(time.perf_counter() - began, 3)
    return row


if __name__ == "__main__":
    main()
