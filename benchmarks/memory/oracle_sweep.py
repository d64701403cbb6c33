"""Compare the simulation with torch's own ``fully_shard`` on fake tensors, over families and settings.

``python benchmarks/memory/oracle_sweep.py [--only TEXT] [--ranks 2 8 64 512]``

Every family of the matrix is combined with every setting at every number of ranks. The comparison covers
the peak of allocated bytes in step 2 without the optimizer's states (its step is slow on fake tensors and
is compared with measurement elsewhere), with CUDA's attention kernels. Results are saved row by row in
``benchmarks/results/memory_oracle.json``, so that an interrupted sweep continues.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "memory"))
sys.path.insert(0, str(Path(__file__).parent))

from fsdp_oracle import observe
from kept_rows import write_document
from matrix import FAMILIES
from settings import Setting, inputs_of

from fsdptool.families.registry import family_of
from fsdptool.memory.simulation.collective_bytes import DEVICES
from fsdptool.memory.simulation.ledger import OPTIMIZER
from fsdptool.memory.simulation.simulate import prepare, simulate
from fsdptool.memory.tracing import make_trace as building
from fsdptool.modeling.objective import objective_for
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.diagnostic import library_versions
from fsdptool.records.trace import Trace

RESULTS = Path(__file__).parent.parent / "results" / "memory_oracle.json"
TOLERANCE = 0.5
"""Per cent."""

CHANGES: dict[str, dict[str, Any]] = {
    "bf16, fp32 reduction": {},
    "fp32": {"precision": "fp32"},
    "bf16 reduction": {"precision": "bf16r"},
    "full checkpointing": {"checkpointing": "full"},
    "selective checkpointing": {"checkpointing": "selective"},
    "every second block": {"checkpointing": "every_n"},
    "kept gathered": {"reshard": False},
    "resharded to two": {"reshard": 2},
    "two ahead": {"prefetch": 2},
    "accumulation": {"accumulation": 2},
    "accumulation, unsharded": {"accumulation": 2, "held": "unsharded"},
    "HSDP": {"replicate": 2},
    "accelerate's layout": {"layout": "accelerate"},
    "LoRA": {"method": "lora"},
    "LoRA, replicated adapters": {"method": "lora-replicated"},
}
"""One setting at a time, starting from bf16 with resharding after forward."""


def rows(ranks: list[int]) -> Iterator[tuple[str, Setting]]:
    """Yield every row with its name; a smaller group than the ranks must exist."""
    for family, (_, reference, overrides, batch) in FAMILIES.items():
        for label, change in CHANGES.items():
            for count in ranks:
                if count <= max(int(change.get("reshard", 1)), change.get("replicate", 1)):
                    continue
                name = f"{family}: {label}, {count} ranks"
                row = Setting(name, family, reference, overrides, ranks=count, batch=batch)
                yield name, replace(row, **change)


_traces: dict[Any, Trace] = {}


def compare(setting: Setting) -> dict[str, Any]:
    """Return both peaks; ranks and resharding share a trace, as they do in a search."""
    inputs = inputs_of(setting)
    run = resolve_run(inputs.recipe, inputs.settings)
    key = (setting.family, setting.precision, setting.checkpointing, setting.method, setting.layout)
    if key not in _traces:
        _traces.clear()
        _traces[key] = building.make_trace(inputs.spec, run, "cuda")
    trace = _traces[key]
    if not trace.known:
        return {"error": "; ".join(trace.unknowns)}
    mesh = inputs.settings.mesh.resolve(setting.ranks)
    rank = prepare(inputs.units, mesh, inputs.recipe, device=replace(DEVICES["cuda"], grain=1))
    played = simulate(trace, rank, mesh, inputs.recipe)
    simulated = played.ledger.best - played.ledger.at_best[OPTIMIZER]
    seen = observe(
        lambda: building.trained_model(
            inputs.spec, resolve_run(inputs.recipe, inputs.settings), inputs.units
        ),
        inputs.units,
        objective_for(inputs.recipe, inputs.spec),
        family_of(inputs.spec).batch_spec(inputs.spec.config, inputs.recipe),
        inputs.recipe,
        inputs.settings,
        world_size=setting.ranks,
        step=False,
    )
    error = 100 * (simulated / seen.peak - 1)
    return {"simulated_bytes": simulated, "oracle_bytes": seen.peak, "error_percent": round(error, 4)}


def main() -> None:
    """Compare the missing rows, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="text the row's name must contain")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 512])
    parser.add_argument("--again", action="store_true", help="compare every row again")
    options = parser.parse_args()
    kept: dict[str, Any] = {"rows": {}}
    if RESULTS.exists() and not options.again:
        kept = json.loads(RESULTS.read_text(encoding="utf-8"))
    kept |= {
        "benchmark": "memory/oracle_sweep",
        "libraries": library_versions(),
        "tolerance_percent": TOLERANCE,
    }
    for name, setting in rows(options.ranks):
        if options.only not in name or name in kept["rows"]:
            continue
        began = time.time()
        try:
            kept["rows"][name] = compare(setting)
        except Exception as error:  # one row that fails is a result, too
            kept["rows"][name] = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(f"{name}: {kept['rows'][name]} ({time.time() - began:.1f} s)", flush=True)
        kept["summary"] = summary(kept["rows"])
        write_document(RESULTS, kept)
    print(json.dumps(summary(kept["rows"]), indent=1))


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the number of rows that agree, and the largest difference."""
    errors = {name: abs(row["error_percent"]) for name, row in rows.items() if "error_percent" in row}
    return {
        "rows": len(rows),
        "within_tolerance": sum(error <= TOLERANCE for error in errors.values()),
        "median_percent": round(statistics.median(errors.values()), 4) if errors else None,
        "worst": sorted(((error, name) for name, error in errors.items()), reverse=True)[:8],
        "not_compared": {name: row["error"] for name, row in rows.items() if "error" in row},
    }


if __name__ == "__main__":
    main()
