"""Every objective under every method on two and on four ranks, fifty steps, against a plain loop.

The tests run each pair on one number of ranks; this runs both and writes the errors down.

    python benchmarks/training/numerics.py --names causal,moe
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "training"))

import reference
from cases import CASES, deeper, prepare_case
from pool import Pool
from ranks import train

from fsdptool.records.document import library_versions

METHODS = ("full", "lora", "distillation")


def main() -> None:
    """Run the matrix and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default=",".join(n for n, case in CASES.items() if not case.beside))
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/training_numerics.json"))
    chosen = parser.parse_args()
    rows: list[dict[str, Any]] = []
    pool = Pool()
    for name in chosen.names.split(","):
        for method in METHODS:
            with tempfile.TemporaryDirectory() as folder:
                recipe, path = prepare_case(CASES[name], Path(folder), method)
                expected: dict[str, Any] | None = None
                for world in (2, 4):
                    found = pool.run(train, world, name, path, recipe, timeout=600.0)[0]
                    if expected is None:
                        taught, config = found["teacher"], deeper(CASES[name].config)
                        expected = reference.run(name, recipe, found["before"], taught, config)
                    losses, weights, worst = reference.compare(found, expected)
                    row = {"case": name, "method": method, "ranks": world, "loss_error": losses}
                    rows.append({**row, "weights_error": weights, "worst_tensor_error": worst})
                    sys.stdout.write(json.dumps(rows[-1]) + "\n")
                    sys.stdout.flush()
    pool.close()
    document = {
        "benchmark": "fifty steps against a plain loop, relative errors",
        "versions": library_versions(),
    }
    chosen.output.write_text(json.dumps({**document, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
