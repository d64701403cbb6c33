"""Plan real training files of other programs twice, and time the plan that comes from the cache.

    export FSDPTOOL_TRAINING_CORPUS=DIR
    python benchmarks/planning/training_files.py            # the files without a row
    python benchmarks/planning/training_files.py --again    # every file
    python benchmarks/planning/training_files.py NAME ...   # files whose names contain this

The corpus is not part of the repository: its files belong to others, and only their names are kept. Each file
is planned by the command, as it is, on H100-80GB-SXM: on as many as it was written for where it says so, else
on 8. Results go to ``benchmarks/results/training-files.json`` after every file. CPU seconds are those of the
whole command with its imports.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from child_time import cpu_seconds
from results_file import write_results

from fsdptool.config.described import describe_path
from fsdptool.errors import FsdptoolError

RESULTS = Path(__file__).parents[1] / "results" / "training-files.json"
GPU, NODE = "H100-80GB-SXM", 8
SECONDS = 600
GIB = 2**30


def main() -> None:
    """Plan, time and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--again", action="store_true", help="plan every file afresh")
    parser.add_argument("names", nargs="*", help="parts of the names of files to plan; none: all")
    arguments = parser.parse_args()
    corpus = Path(os.environ["FSDPTOOL_TRAINING_CORPUS"])
    rows: dict[str, Any] = {}
    if RESULTS.exists() and not arguments.again:
        rows = {row["file"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["results"]}
    for name in files(corpus):
        wanted = any(part in name for part in arguments.names)
        if wanted if arguments.names else name not in rows:
            rows[name] = {"file": name, **planned(corpus / name)}
            print(name, json.dumps(rows[name]), flush=True)
            write(rows)
    write(rows)


def files(corpus: Path) -> Iterator[str]:
    """Yield the files of the indices, by their paths in the corpus."""
    for index in sorted(corpus.glob("index_*.jsonl")):
        for line in index.read_text(encoding="utf-8").splitlines():
            name = json.loads(line)["file"]
            if name is not None:
                yield name


def planned(path: Path) -> dict[str, Any]:
    """Return the verdict on a file, its peak and what is not planned, or why it has no plan."""
    ranks = NODE
    try:
        run = describe_path(path)
        ranks = (run.processes if run is not None else None) or NODE
    except FsdptoolError:
        pass  # the command says what is wrong
    nodes = ranks // NODE if ranks % NODE == 0 else 1
    gpus = NODE if ranks % NODE == 0 else ranks
    command = [sys.executable, "-m", "fsdptool", "plan", str(path), "--gpu", GPU]
    command += ["--gpus", str(gpus), "--nodes", str(nodes), "--format", "json"]
    hardware = f"{nodes} x {gpus}" if nodes > 1 else str(gpus)
    row: dict[str, Any] = {"gpus": hardware}
    for _ in ("first", "from the cache"):
        try:
            seconds, done = cpu_seconds(command, answers=None, limit=SECONDS)
        except subprocess.TimeoutExpired:
            return {**row, "status": "timeout", "reason": f"no plan within {SECONDS} s"}
        row["cpu_seconds"] = round(seconds, 2)
    if done.returncode not in (0, 1, 5) or not done.stdout:
        said = done.stderr.strip().splitlines()
        errors = (line for line in said if line.startswith(("error: ", "internal error: ")))
        reason = next(errors, said[-1] if said else "").replace(f"{path.parent}/", "")
        return {**row, "status": done.returncode, "reason": re.sub(r"(?<!\S)[~/]\S*/", "", reason)}
    plan = json.loads(done.stdout)
    chosen = plan["chosen"] or plan["candidates"][0]["id"]
    candidate = next(item for item in plan["candidates"] if item["id"] == chosen)
    total = candidate["device_total_bytes"]
    return {
        **row,
        "status": done.returncode,
        "program": plan["inputs"]["run"]["program"] if plan["inputs"]["run"] else "fsdptool",
        "model": plan["inputs"]["model"]["reference"],
        "verdict": plan["verdict"],
        "gib": round(total / GIB, 2) if total is not None else None,
        "limits": [[item["what"], item["side"]] for item in plan["inputs"]["limits"]],
        "unknowns": plan["unknowns"],
    }


def write(rows: dict[str, Any]) -> None:
    """Write the results and their sum."""
    times = sorted(row["cpu_seconds"] for row in rows.values() if "cpu_seconds" in row)
    summary = {"median": times[len(times) // 2], "most": times[-1]} if times else {}
    verdicts = dict(Counter(row.get("verdict", "no plan") for row in rows.values()))
    write_results(
        RESULTS,
        "training_files",
        list(rows.values()),
        gpu=GPU,
        verdicts=verdicts,
        cpu_seconds_from_the_cache=summary,
    )


if __name__ == "__main__":
    main()
