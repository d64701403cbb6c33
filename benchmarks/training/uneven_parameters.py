"""Train models of which each rank uses other parameters, thirty steps, and compare with one rank.

The same global batches on one rank and on two or four. Rows, each with its relative errors:

- experts that are modules, called only for the rows that chose them, inside their block's unit and as units
  of their own, and a tower that some samples run once, twice or not at all: every way to shard;
- Switch Transformers, LLaVA and Qwen2-VL (tiny, transformers' classes; most batches are text alone):
  accumulation, clipping, LoRA, HSDP and a resume.

``untouched_agree``: the parameters that no step has touched are the same ones as on one rank. ``messages`` of
the last step: those by which ranks agreed on their collectives. ``cost``: the step time of a decoder without
such parameters, with and without the order that is kept, run in turns.

    python benchmarks/training/uneven_parameters.py
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "training"))

import reference
import torch
from cases import CASES, inputs_for, prepare_case
from paired import head, parser
from pool import Pool
from ranks import share
from uneven_cases import UNEVEN, WAYS, Way, on_one_rank, on_ranks, recipe

from fsdptool.distributed.session import open_session
from fsdptool.records.recipe import Recipe
from fsdptool.training.trainer import assemble

STEPS = 30
BOUND = 1e-6
MAIN = (
    "two ranks", "accumulation", "unsharded accumulation", "clipping", "LoRA", "hybrid",
    "hybrid, accumulation", "resume", "hybrid, resume",
)  # fmt: skip


def rows(names: list[str]) -> list[tuple[str, str]]:
    """Return models and ways, those with the same run on one rank behind one another."""
    chosen = [(name, way) for name in names for way in (WAYS if not UNEVEN[name][0].config else MAIN)]
    return sorted(chosen, key=lambda row: (names.index(row[0]), str(_alone(WAYS[row[1]]))))


def _alone(way: Way) -> tuple[Any, ...]:
    return way.count, way.method, way.optimizer


def measure(pool: Pool, name: str, way: str, known: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    """Train one row and return its errors."""
    chosen, key = WAYS[way], (name, _alone(WAYS[way]))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        made = recipe(name, chosen, folder)
        results = on_ranks(pool, name, chosen, folder, made, STEPS)
        if key not in known:
            known.clear()
            known[key] = on_one_rank(pool, name, chosen, folder, made, STEPS)
    losses, weights, worst = reference.compare(results[0], known[key])
    agree = len({result["hash"] for result in results}) == 1
    untouched = results[0]["unused"] == known[key]["unused"]
    return {
        "model": name,
        "way": way,
        "ranks": chosen.ranks,
        "loss_error": losses,
        "weights_error": weights,
        "worst_tensor_error": worst,
        "ranks_agree": agree,
        "untouched": len(known[key]["unused"]),
        "untouched_agree": untouched,
        "messages": results[0]["messages"][-1],
        "within": max(losses, weights) <= BOUND and agree and untouched,
    }


def timed(folder: Path, chosen: Recipe, rounds: int) -> list[tuple[float, float]]:
    """Return seconds of ten steps with the order kept and without, in turns."""
    inputs = inputs_for(CASES["causal"], folder, chosen)
    session = open_session(inputs.settings)
    assembled = assemble(inputs, session)
    stepper: Any = assembled.stepper
    units = stepper.order._units
    used, kept_order = stepper._used, stepper.order.micro_batch

    def nothing(*kind: Any) -> Any:
        return nullcontext()

    kept = [(unit.group.unshard, unit.group.post_backward) for unit in units]
    batches = share(session, 0, "causal", 4, torch.float32)

    def ten() -> float:
        began = time.perf_counter()
        for _ in range(10):
            stepper.run(batches, rate=1e-4)
        return time.perf_counter() - began

    ten()
    pairs = []
    for _ in range(rounds):
        with_order = ten()
        for unit in units:
            unit.group.unshard, unit.group.post_backward = unit.gather, unit.reduce
        stepper.order.micro_batch, stepper._used = nothing, list
        without = ten()
        stepper.order.micro_batch, stepper._used = kept_order, used
        for unit, (unshard, post_backward) in zip(units, kept, strict=True):
            unit.group.unshard, unit.group.post_backward = unshard, post_backward
        pairs.append((with_order, without))
    return pairs


def cost(pool: Pool, rounds: int) -> dict[str, Any]:
    """Return the median ratio of step times and its quartiles, two ranks."""
    with tempfile.TemporaryDirectory() as place:
        chosen, folder = prepare_case(CASES["causal"], Path(place), "full")
        pairs = pool.run(timed, 2, folder, chosen, rounds, timeout=900.0)[0]
    ratios = [kept / without for kept, without in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"model": "causal", "rounds": rounds, "ratio": middle, "quartiles": [low, high]}


def main() -> int:
    """Run the rows and write the result; return 1 if one of them exceeds its bound."""
    options = parser(__doc__, "training_uneven")
    options.add_argument("--names", default=",".join(UNEVEN))
    options.add_argument("--rounds", type=int, default=31)
    chosen = options.parse_args()
    results: list[dict[str, Any]] = []
    pool = Pool()
    known: dict[Any, dict[str, Any]] = {}
    for name, way in rows(chosen.names.split(",")):
        results.append(measure(pool, name, way, known))
        sys.stdout.write(json.dumps(results[-1]) + "\n")
        sys.stdout.flush()
    document = {
        **head("relative errors against one rank", steps=STEPS, bound=BOUND),
        "rows_outside": sum(not row["within"] for row in results),
        "cost": cost(pool, chosen.rounds),
        "rows": results,
    }
    pool.close()
    chosen.output.write_text(json.dumps(document, indent=2) + "\n")
    return 1 if document["rows_outside"] else 0


if __name__ == "__main__":
    sys.exit(main())
