"""Compare fifty steps of every objective, method and way to shard with a plain loop in one process.

The plain loop shares no code with the engine (``tests/training/reference.py``). Targets are spread unevenly
over ranks throughout. Four groups of rows, each with its relative errors:

- ``objectives``: every objective under every method on two and on four ranks, fp32, AdamW: losses, and the
  norm of all weights' differences over the norm of the weights;
- ``tensors``: the same in fp64, with the worst single tensor (torch 2.13's grouped products do not support
  fp64, so a mixture of experts trains with SGD);
- ``ways``: one decoder under every accumulation, mesh, resharding, checkpointing, offload and optimizer
  kernel, with clipping;
- ``adapters``: LoRA kept whole on every rank, and on fused experts.

    python benchmarks/training/numerics.py
    python benchmarks/training/numerics.py --groups ways --names causal,moe
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "training"))

import reference
from cases import CASES, STEPS, deeper, prepare_case
from input_cases import with_dtype
from paired import head, parser
from pool import Pool
from ranks import train
from variants import CLIPPED, HYBRID, MOMENTUM, VARIANTS

from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Recipe

METHODS = ("full", "lora", "distillation")
BOUND = 1e-5
GROUPS = ("objectives", "tensors", "ways", "adapters")


@dataclasses.dataclass(frozen=True)
class Row:
    """One run and its name."""

    group: str
    case: str
    method: str
    ranks: int
    way: str = ""
    mesh: ParallelDims | None = None
    count: int = 4
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


def rows(names: list[str]) -> Iterator[Row]:
    """Yield every run; those with the same plain loop are consecutive."""
    for name in names:
        for method in METHODS:
            for ranks in (2, 4):
                yield Row("objectives", name, method, ranks)
    for name in names:
        way, changes = ("sgd", {"optimizer": MOMENTUM}) if name == "moe" else ("fp64", {})
        for method in METHODS:
            for ranks in (2, 4):
                yield Row("tensors", name, method, ranks, way, changes=changes)
    for way, (ranks, mesh, changes, settings) in VARIANTS.items():
        changes = {"optimizer": CLIPPED, **changes}
        # Twelve micro-batches divide by one, two, three and four ranks, and accumulate on each.
        yield Row("ways", "causal", "full", ranks, way, mesh, 12, changes, settings)
    for way, mesh in (("replicated", None), ("replicated, hybrid", HYBRID)):
        yield Row("adapters", "causal", "lora_replicated", 4, way, mesh, changes={"optimizer": CLIPPED})
    yield Row("adapters", "moe", "lora_parameters", 2, "fused experts")


class Plain:
    """Runs plain loops and keeps the last one, because the next row is often compared with it as well."""

    def __init__(self) -> None:
        self._known: tuple[Any, dict[str, Any]] | None = None

    def run(self, row: Row, recipe: Recipe, found: dict[str, Any]) -> dict[str, Any]:
        """Return the result of the plain loop, started from the ranks' initial weights."""
        optimizer = dataclasses.replace(recipe.optimizer, implementation="auto")
        key = (row.case, row.method, row.count, recipe.model.dtype, optimizer)
        if self._known is None or self._known[0] != key:
            config = deeper(CASES[row.case].config)
            expected = reference.run(
                row.case, recipe, found["before"], found["teacher"], config, count=row.count
            )
            self._known = (key, {**expected, "before": found["before"]})
        before = self._known[1]["before"]
        if not all(bool((before[name] == tensor).all()) for name, tensor in found["before"].items()):
            raise RuntimeError(f"{row} began with other weights")
        return self._known[1]


def measure(row: Row, pool: Pool, plain: Plain) -> dict[str, Any]:
    """Train one row and return its errors."""
    with tempfile.TemporaryDirectory() as folder:
        recipe, path = prepare_case(CASES[row.case], Path(folder), row.method, **row.changes)
        if row.way == "fp64":
            recipe = with_dtype(recipe, "float64", "float64")
        options = (row.mesh, STEPS, row.count, row.settings)
        results = pool.run(train, row.ranks, row.case, path, recipe, *options, timeout=900.0)
        expected = plain.run(row, recipe, results[0])
    losses, weights, worst = reference.compare(results[0], expected)
    kept = [losses, weights, *([worst] if row.group == "tensors" else [])]
    return {
        **{key: getattr(row, key) for key in ("group", "case", "method", "ranks", "way")},
        "loss_error": losses,
        "weights_error": weights,
        "worst_tensor_error": worst,
        "ranks_agree": len({result["hash"] for result in results}) == 1,
        "within": max(kept) <= BOUND and len({result["hash"] for result in results}) == 1,
    }


def main() -> int:
    """Run the rows and write the result; return 1 if one of them exceeds its bound."""
    options = parser(__doc__, "training_numerics")
    options.add_argument("--names", default=",".join(n for n, case in CASES.items() if not case.beside))
    options.add_argument("--groups", default=",".join(GROUPS))
    chosen = options.parse_args()
    results: list[dict[str, Any]] = []
    pool, plain = Pool(), Plain()
    for row in rows(chosen.names.split(",")):
        if row.group in chosen.groups.split(","):
            results.append(measure(row, pool, plain))
            sys.stdout.write(json.dumps(results[-1]) + "\n")
            sys.stdout.flush()
    pool.close()
    outside = [row for row in results if not row["within"]]
    document = {
        **head("relative errors against a plain loop", steps=STEPS, bound=BOUND),
        "rows_outside": len(outside),
        "rows": results,
    }
    chosen.output.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if outside else 0


if __name__ == "__main__":
    sys.exit(main())
