"""Plan and train every model class of transformers that reads text, images or sound, cut small.

    python benchmarks/breadth/sweep.py [--stage plain|plan|step|scratch] [--only NAME,NAME]
        [--group GROUP] [--again]

One subprocess works through the classes of a stage and prints a row after each. If it prints nothing within
the time limit, or dies, the class it was busy with gets a failed row, and a new subprocess continues behind
it. Rows already in the result file are skipped (``--again`` repeats those that are not good), so the sweep
can be stopped at any time. Writes ``benchmarks/results/breadth.json``; ``write_table.py`` writes the table of
``docs/explanation/breadth.md`` from it.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "breadth.json"
STAGES = ("plain", "plan", "step", "scratch")
NOTABLE = 0.002
"""Relative error of a plan from which the step is measured again without oneDNN."""
LIMIT = 480
"""Seconds of wall-clock time for one class, the start of a process included."""


def work(stage: str, names: list[str], result: Path) -> None:
    """Run a stage on some classes, in this process, and print one JSON line per class."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import warnings

    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(HERE))
    import stages
    from classes import subjects

    known = {subject.name: subject for subject in subjects()}
    # The first row of a new file is not written yet.
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"] if result.exists() else {}
    pool: Any = None
    if stage in ("step", "scratch"):
        import pool as pools

        pools.SIZE = stages.RANKS
        pools.PRELOAD += ["measure", "stages"]  # the ranks start with everything that a row needs
        pool = pools.Pool()
    for item in names:
        name, _, precision = item.partition(":")
        tensors = rows.get(name, {}).get("plain", {}).get("inputs")
        if stage == "plain":
            row = stages.row_of(stages.plain, known[name])
        elif pool is None:
            row = stages.row_of(stages.plan, known[name], tensors)
        else:
            row = stages.row_of(stages.step, known[name], pool.run, precision, stage == "step", tensors)
        print(json.dumps({"name": name, **row}), flush=True)
    if pool is not None:
        pool.close()


def launch(stage: str, precisions: dict[str, str], record: Any, result: Path) -> None:
    """Run the classes that ``precisions`` names in subprocesses; hand each row to ``record`` at once."""
    left = list(precisions)
    while left:
        items = ",".join(f"{name}:{precisions[name]}" for name in left)
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", stage, items]
        command += ["--output", str(result)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            selector = selectors.DefaultSelector()
            selector.register(process.stdout, selectors.EVENT_READ)
            while left:
                if not selector.select(timeout=LIMIT):
                    record(left.pop(0), {"good": False, "error": f"no answer within {LIMIT} s"})
                    process.kill()
                    break
                line = process.stdout.readline()
                if not line:
                    record(left.pop(0), {"good": False, "error": "the process died"})
                    break
                row = json.loads(line)
                left.remove(row["name"])
                record(row.pop("name"), row)


def one_row_a_line(result: dict[str, Any]) -> str:
    """Return the result as JSON with one line for each class."""
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in result["rows"].items())
    libraries = json.dumps(result["libraries"])
    return f'{{\n "libraries": {libraries},\n "rows": {{\n{rows}\n }}\n}}\n'


def _notable(row: dict[str, Any]) -> bool:
    plan, step = row.get("plan", {}), row.get("step", {})
    if not plan.get("good") or not step.get("good"):
        return False
    return bool(abs(plan["predicted_bytes"] / step["measured_bytes"][0] - 1) > NOTABLE)


def main() -> None:
    """Run the missing rows and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--stage", choices=STAGES)
    parser.add_argument("--only", default="")
    parser.add_argument("--group", default="", help="one group of classes")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args()
    if options.worker:
        work(options.worker[0], options.worker[1].split(","), options.output)
        return
    sys.path.insert(0, str(HERE))
    from classes import subjects

    from fsdptool.records.diagnostic import library_versions

    result = json.loads(options.output.read_text()) if options.output.exists() else {"rows": {}}
    result["libraries"] = library_versions()
    rows = result["rows"]
    wanted = set(options.only.split(",")) if options.only else None
    for subject in subjects():
        rows.setdefault(subject.name, {"group": subject.group, "model_type": subject.model_type})
    for stage in (options.stage,) if options.stage else STAGES:

        def record(name: str, row: dict[str, Any], stage: str = stage) -> None:
            rows[name][stage] = row
            options.output.write_text(one_row_a_line(result), encoding="utf-8")
            print(stage, name, json.dumps(row)[:300], flush=True)

        earlier = () if stage == "plain" else ("plain",)
        missing = {
            name: row.get("plan", {}).get("precision", "bf16")
            for name, row in rows.items()
            if (wanted is None or name in wanted)
            and options.group in ("", row["group"])
            and (stage not in row or wanted or (options.again and not row[stage]["good"]))
            and all(row.get(before, {}).get("good") for before in earlier)
            and (stage != "scratch" or _notable(row))
        }
        launch(stage, missing, record, options.output)


if __name__ == "__main__":
    main()
