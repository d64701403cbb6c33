"""Checkpointing policies: measured memory beside the plan, on small models.

``python benchmarks/memory/policies.py [--only TEXT]`` measures and predicts each setting below and writes
``benchmarks/results/memory_policies.json``. The instrument is that of ``measure.py``; ``fake`` rows are one
process that acts as rank 0, ``gloo`` rows are two real ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import _base
from report import predict
from run import measured
from settings import Setting

from fsdptool.records.diagnostic import library_versions

RESULTS = Path(__file__).parent.parent / "results" / "memory_policies.json"


def rows() -> Iterator[Setting]:
    """Yield every setting."""
    for family, change in (
        ("llama", {"checkpointing": "selective:every-2-matmuls"}),
        ("llama", {"checkpointing": "selective:every-2-matmuls", "backend": "gloo", "ranks": 2}),
        ("gpt2", {"checkpointing": "selective:every-2-matmuls", "ranks": 4}),
        ("qwen3", {"checkpointing": "selective:attention,aten.silu.default", "backend": "gloo", "ranks": 2}),
        ("qwen3-moe", {"checkpointing": "selective:attention,matmul#1,matmul#4", "accumulation": 2}),
        ("llama", {"checkpointing": "every_3", "precision": "fp32"}),
        ("llama", {"checkpointing": "2*full+3*selective:attention,matmul#5+1*none"}),
        ("qwen3", {"checkpointing": "3*selective:matmul#2+3*none", "backend": "gloo", "ranks": 2}),
    ):
        row = replace(_base(family), **change)
        yield replace(row, name=f"{row.backend} {family} {row.checkpointing} n{row.ranks} {row.precision}")


def main() -> None:
    """Measure and predict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="text the setting's name must contain")
    options = parser.parse_args()
    import measure  # noqa: F401 - warms this process up before the first fork

    document: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    kept = {row["name"]: row for row in document.get("rows", [])}
    for setting in rows():
        if options.only not in setting.name:
            continue
        result = measured(setting)
        row: dict[str, Any] = {"name": setting.name}
        if "error" in result:
            kept[setting.name] = row | {"error": result["error"]}
            print(kept[setting.name], flush=True)
            continue
        predicted = predict(setting).allocated_peak_bytes
        assert predicted is not None
        error = round(100 * (predicted / result["peak_bytes"] - 1), 3)
        row |= {
            "measured_bytes": result["peak_bytes"],
            "predicted_bytes": predicted,
            "error_percent": error,
        }
        kept[setting.name] = row
        print(row, flush=True)
        document = {
            "instrument": "torch CPU allocator events (profile_memory): running sum, peak in step 2",
            "libraries": library_versions(),
            "rows": list(kept.values()),
        }
        RESULTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
