"""Plan large models on few and many H100, and keep what each search chose and how long it took.

    python benchmarks/planning/large_models.py [--case "Mixtral-8x22B, 64"] [-o benchmarks/results/...]

Full training in bf16 on sequences of 4,096 tokens, one sample for each GPU and step; the search decides the
rest. Each case runs in a process of its own and joins the results that are there. CPU seconds are those of
the whole plan. Traces that the cache has, from earlier cases of the same model, are not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from results_file import write_results

from fsdptool.records.codec import from_json
from fsdptool.records.plan import SearchPoint
from fsdptool.report.plan_words import mesh

MODELS = {
    "Mixtral-8x22B": "mixtral:8x22b",
    "gpt-oss-120b": "gpt-oss:120b",
    "Qwen3-235B-A22B": "qwen3-moe:235b-a22b",
    "Llama-3-405B": "llama3.1:405b",
    "DeepSeek-V3": "deepseek-v3:671b",
}
GPUS = (8, 64, 512)
CASES = {f"{name}, {gpus}": (reference, gpus) for name, reference in MODELS.items() for gpus in GPUS}
RESULTS = Path("benchmarks/results/planning_large_models.json")


def measure(name: str) -> dict[str, Any]:
    """Plan one case in this process."""
    from fsdptool.planning import Options, make_plan, read_request
    from fsdptool.report.plan_words import brief, mesh_lines

    reference, gpus = CASES[name]
    options = {"reference": reference, "gpu": "H100-80GB-SXM", "gpus": 8, "nodes": gpus // 8}
    begin = time.process_time()
    plan = make_plan(read_request(cast("Options", {**options, "sequence_length": 4096})))
    seconds = time.process_time() - begin
    shown = next((c for c in plan.candidates if c.id == plan.chosen), plan.candidates[0])
    return {
        "case": name,
        "gpus": gpus,
        "verdict": plan.verdict,
        "candidates": len(plan.candidates),
        "configuration": brief(shown.settings),
        "settings": dataclasses.asdict(shown.settings),
        "device_gib": round(shown.device_total_bytes / 2**30, 1) if shown.device_total_bytes else None,
        "step_seconds": shown.step_seconds,
        "tokens_per_second_per_gpu": shown.tokens_per_second / gpus if shown.tokens_per_second else None,
        "mfu": shown.mfu,
        "why": list(mesh_lines(plan)),
        "shortfall": plan.shortfall.kind if plan.shortfall is not None else None,
        "cpu_seconds": round(seconds, 1),
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as the table of docs/explanation/verdict-and-choice.md."""
    lines = [
        "| model, GPUs | mesh | micro-batch | of 79.1 GiB | tokens/s per GPU | MFU |",
        "|---|---|---|---|---|---|",
    ]
    for item in results:
        settings = item["settings"]
        parts = [mesh(from_json(SearchPoint, settings))]
        parts += ["sequence parallel"] if settings["sequence_parallel"] else []
        parts += ["CPU offload"] if settings["cpu_offload"] else []
        speed, used = item["tokens_per_second_per_gpu"], item["mfu"]
        figures = f"{item['device_gib']:.0f} GiB | {speed:,.0f} | {used:.1%}"
        lines.append(f"| {item['case']} | {', '.join(parts)} | {settings['micro_batch']} | {figures} |")
    return "\n".join(lines)


def main() -> None:
    """Run the cases that are named, or all, and save them among the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--table", action="store_true", help="print the results that are there as Markdown")
    parser.add_argument("--measure", choices=list(CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure)))
        return
    if arguments.table:
        print(table(json.loads(arguments.output.read_text())["results"]))
        return
    kept = json.loads(arguments.output.read_text())["results"] if arguments.output.exists() else []
    results = {item["case"]: item for item in kept}
    for name in arguments.case or CASES:
        command = [sys.executable, __file__, "--measure", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        results[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, results[name]["configuration"], results[name]["cpu_seconds"], flush=True)
        ordered = [results[case] for case in CASES if case in results]
        write_results(arguments.output, "large_models", ordered)


if __name__ == "__main__":
    main()
