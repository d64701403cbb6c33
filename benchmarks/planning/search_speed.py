"""Measure the time of a search with warm traces, and its memory.

    python benchmarks/planning/search_speed.py [-o benchmarks/results/planning_search.json]

Each case runs in a separate process. The first plan traces what the cache lacks; then the same search runs
again in the same process, with warm imports and traces. Seconds are those of the second run, in CPU time
(what two idle cores would need) and wall time. Resident memory is the peak of the process, including the
first run.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

from results_file import write_results

CASES: dict[str, dict[str, Any]] = {
    "llama3:8b, 2 x 8 H100": {
        "reference": "llama3:8b",
        "gpu": "H100-80GB-SXM",
        "gpus": 8,
        "nodes": 2,
        "sequence_length": 4096,
        "global_batch": 128,
    },
    "llama3:70b, 8 x 8 H100": {
        "reference": "llama3:70b",
        "gpu": "H100-80GB-SXM",
        "gpus": 8,
        "nodes": 8,
        "sequence_length": 4096,
        "global_batch": 512,
    },
    "mixtral:8x22b, 8 H100": {
        "reference": "mixtral:8x22b",
        "gpu": "H100-80GB-SXM",
        "gpus": 8,
        "sequence_length": 4096,
    },
}
LIMITS = {"candidates": 500, "seconds": 10.0, "resident_mib": 800.0}


def measure(name: str) -> dict[str, object]:
    """Run one case in this process."""
    from fsdptool.planning import Options, make_plan, read_request

    options = cast("Options", {**CASES[name], "search": True})
    make_plan(read_request(options))
    wall, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(read_request(options))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    count = len(plan.candidates)
    return {
        "case": name,
        "candidates": count,
        "chosen": plan.chosen,
        "verdict": plan.verdict,
        "cpu_seconds": round(cpu, 2),
        "wall_seconds": round(wall, 2),
        "cpu_seconds_per_500": round(cpu * 500 / count, 2),
        "resident_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def main() -> None:
    """Run every case and print (and save) the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--case", choices=list(CASES))
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(arguments.case)))
        return
    results = []
    for name in CASES:
        command = [sys.executable, __file__, "--case", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results.append(json.loads(done.stdout.splitlines()[-1]))
        print(results[-1])
    if arguments.output:
        write_results(arguments.output, "search_speed", results, limits=LIMITS)


if __name__ == "__main__":
    main()
