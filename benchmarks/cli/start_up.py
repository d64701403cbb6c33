"""Measure what quick commands cost beside the import of the libraries that they use.

    python benchmarks/cli/start_up.py [--repeat 15] [-o RESULT.json]

Each command is compared with a minimal program that parses one argument with typer, after importing the other
libraries that the command uses. The figure is the median CPU time, runs alternating.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

LIMIT = 1.5
FILE = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
"""
MINIMAL = """\
from typing import Annotated

import typer
{imports}

def main(name: Annotated[str, typer.Argument()] = "") -> None:
    print(name)


typer.run(main)
"""
COMMANDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "--help": (["--help"], ()),
    "families": (["families"], ()),
    "rule": (["rule"], ()),
    "rule CODE": (["rule", "FSD301"], ()),
    "schema NAME": (["schema", "recipe"], ()),
    "validate FILE": (["validate", "fsdp.yaml"], ("yaml",)),
}
"""Command to its arguments and the libraries that it imports besides typer (whose help uses rich)."""


def cpu_seconds(command: list[str], folder: Path) -> float:
    """Run a command and return the CPU seconds it took; it must succeed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0:
        raise SystemExit(f"{command} failed: {done.stdout[-500:]}{done.stderr[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    """Measure and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "fsdp.yaml").write_text(FILE)
        runs: dict[tuple[str, str], list[str]] = {}
        for title, (arguments, libraries) in COMMANDS.items():
            script = folder / f"minimal{len(libraries)}.py"
            script.write_text(MINIMAL.format(imports="".join(f"import {item}\n" for item in libraries)))
            help_only = arguments if arguments == ["--help"] else []
            runs[title, "fsdptool"] = [sys.executable, "-m", "fsdptool", *arguments]
            runs[title, "minimal"] = [sys.executable, str(script), *help_only]
        taken: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
        for turn in range(options.repeat + 1):
            for key in random.sample(list(runs), len(runs)):
                seconds = cpu_seconds(runs[key], folder)
                if turn:  # the first one fills the caches
                    taken[key].append(seconds)
    rows = {}
    for title in COMMANDS:
        own, minimal = (statistics.median(taken[title, side]) for side in ("fsdptool", "minimal"))
        rows[title] = {
            "fsdptool": round(own, 4),
            "minimal": round(minimal, 4),
            "ratio": round(own / minimal, 3),
        }
    result = {
        "benchmark": "cli-start-up",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {name: metadata.version(name) for name in ("typer", "rich", "PyYAML")},
        "instrument": "CPU seconds (user and system) of the child process, median, runs alternating",
        "repeat": options.repeat,
        "limit": LIMIT,
        "commands": rows,
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if options.output:
        options.output.write_text(text)
    return 0 if all(row["ratio"] <= LIMIT for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
