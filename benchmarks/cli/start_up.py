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
import sys
import tempfile
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from child_time import alternate

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
        taken = alternate(runs, folder, options.repeat)
    rows = {}
    for title in COMMANDS:
        own, minimal = (taken[title, side] for side in ("fsdptool", "minimal"))
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
