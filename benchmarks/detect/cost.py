"""Measure the cost of detection as ratios within one run.

- ``floor``: a bare script that imports what is needed and builds the model on meta.
- ``cold``: the whole ``fsdptool detect`` command with an empty cache.
- ``hit``: the same command when the cache has the answer.

Every figure is measured in a fresh process. CPU time is the minimum over the repetitions, which are
interleaved; on a shared machine it is more stable than wall time.

    python benchmarks/detect/cost.py -o benchmarks/results/detect_cost.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fsdptool.families.registry import load_registry
from fsdptool.records.diagnostic import library_versions

MIB = 2**20

FLOOR = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
{imports}
with torch.device("meta"):
    model = {build}
"""
LLAMA_FLOOR = FLOOR.format(
    imports="from transformers import LlamaConfig, LlamaForCausalLM",
    build="LlamaForCausalLM._from_config(LlamaConfig(**json.loads(sys.argv[1])))",
)
COMMANDS = ("llama3.1:405b", "flux.1:dev", "wan2.1:t2v-14b")


def flavour(reference: str) -> Any:
    """Return a flavour's data."""
    return load_registry().flavour(*reference.split(":"))


def floor_script(reference: str) -> list[str]:
    """Return the command line of the bare script for a model."""
    flavour_data = flavour(reference)
    if flavour_data.model_class == "LlamaForCausalLM":
        script = LLAMA_FLOOR
    else:
        script = FLOOR.format(
            imports=f"from diffusers import {flavour_data.model_class}",
            build=f"{flavour_data.model_class}.from_config(json.loads(sys.argv[1]))",
        )
    return [sys.executable, "-c", script, json.dumps(plain(flavour_data.config))]


def plain(config: Any) -> dict[str, Any]:
    """Return a configuration without the entries that the library adds."""
    marks = ("architectures", "model_type")
    return {key: value for key, value in config.items() if not key.startswith("_") and key not in marks}


def run(command: list[str], environment: dict[str, str]) -> tuple[dict[str, float], str]:
    """Run a command; return its CPU and wall seconds peak memory and output."""
    with tempfile.TemporaryFile() as stream:
        started = time.perf_counter()
        child = os.posix_spawn(
            command[0],
            command,
            # As installed: with compiled modules, which test machines often forbid Python to keep.
            {**os.environ, "PYTHONDONTWRITEBYTECODE": "", **environment},
            file_actions=[(os.POSIX_SPAWN_DUP2, stream.fileno(), 1)],
        )
        _, status, usage = os.wait4(child, 0)
        wall = time.perf_counter() - started
        stream.seek(0)
        shown = stream.read().decode()
    if status:
        raise SystemExit(f"{command[:3]} ended with {status}: {shown[-500:]}")
    return {"cpu": usage.ru_utime + usage.ru_stime, "wall": wall, "peak": usage.ru_maxrss * 1024}, shown


def best(samples: list[dict[str, float]]) -> dict[str, float]:
    """Return the minimum of each figure."""
    return {key: round(min(sample[key] for sample in samples), 4) for key in samples[0]}


def commands(repeat: int) -> list[dict[str, Any]]:
    """Measure floor, cold and hit."""
    detect = [sys.executable, "-m", "fsdptool", "detect"]
    samples: dict[tuple[str, str], list[dict[str, float]]] = {}
    for round_ in range(repeat):
        for reference in COMMANDS:
            with tempfile.TemporaryDirectory() as cache:
                environment = {"FSDPTOOL_CACHE": cache}
                for what, line in (
                    ("floor", floor_script(reference)),
                    ("cold", [*detect, reference]),
                    ("hit", [*detect, reference]),
                ):
                    result, shown = run(line, environment)
                    if what == "hit" and "(cached)" not in shown:
                        raise SystemExit("the second detect was no hit: the sources changed meanwhile")
                    samples.setdefault((reference, what), []).append(result)
        sys.stderr.write(f"commands: {round_ + 1}/{repeat}\n")
    rows = []
    for reference in COMMANDS:
        floor, cold, hit = (best(samples[reference, what]) for what in ("floor", "cold", "hit"))
        rows.append(
            {
                "reference": reference,
                "floor": floor,
                "cold": cold,
                "hit": hit,
                "cold_over_floor_cpu": round(cold["cpu"] / floor["cpu"], 3),
                "cold_peak_mib": round(cold["peak"] / MIB),
                "hit_over_cold_cpu": round(hit["cpu"] / cold["cpu"], 3),
                "hit_over_cold_wall": round(hit["wall"] / cold["wall"], 3),
            }
        )
    return rows


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    document = {
        "libraries": library_versions(),
        "python": platform.python_version(),
        "hardware": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "load_average": os.getloadavg(),
        "repeat": arguments.repeat,
        "commands": commands(arguments.repeat),
    }
    document["harness_peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    for row in document["commands"]:
        print(json.dumps({key: value for key, value in row.items() if not isinstance(value, dict)}))


if __name__ == "__main__":
    main()
