"""Measure the speed of ``validate`` as ratios within one run.

    python benchmarks/config/speed.py [--repeat 15] [--files 1000] [-o RESULT.json]

1. One file: ``fsdptool validate FILE`` compared with a minimal program that parses its arguments with typer,
   composes the YAML and runs jsonschema on it. The figure is the median CPU time over alternating runs.
2. Many files in one call, compared with check-jsonschema with the same schema on the same files.
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

ROOT = Path(__file__).parents[2]
SCHEMA = ROOT / "schemas" / "accelerate-fsdp2.schema.json"
FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: {processes}
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: {name}
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
  fsdp_reshard_after_forward: true
"""
MINIMAL = """\
import json
from pathlib import Path
from typing import Annotated

import jsonschema
import typer
import yaml


def main(files: Annotated[list[Path], typer.Argument()], schema: Annotated[Path, typer.Option()]) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(schema.read_text()))
    for file in files:
        text = file.read_text()
        yaml.compose(text, Loader=yaml.SafeLoader)
        for error in validator.iter_errors(yaml.safe_load(text)):
            print(file, error.message)


typer.run(main)
"""


def main() -> int:
    """Measure and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    tools = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "minimal.py").write_text(MINIMAL)
        many = []
        for number in range(options.files):
            text = FILE.format(processes=2 + number % 15, name=f"Layer{number}")
            (folder / f"f{number}.yaml").write_text(text)
            many.append(f"f{number}.yaml")
        one = alternate(
            {
                "fsdptool": [str(tools / "fsdptool"), "validate", "f0.yaml"],
                "minimal": [sys.executable, "minimal.py", "f0.yaml", "--schema", str(SCHEMA)],
            },
            folder,
            options.repeat,
        )
        all_files = alternate(
            {
                "fsdptool": [str(tools / "fsdptool"), "validate", "--format", "concise", *many],
                "check-jsonschema": [str(tools / "check-jsonschema"), "--schemafile", str(SCHEMA), *many],
            },
            folder,
            max(3, options.repeat // 5),
        )
    one_ratio = round(one["fsdptool"] / one["minimal"], 3)
    many_ratio = round(all_files["fsdptool"] / all_files["check-jsonschema"], 3)
    result = {
        "benchmark": "config-speed",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {
            name: metadata.version(name) for name in ("typer", "PyYAML", "jsonschema", "check-jsonschema")
        },
        "instrument": "CPU seconds (user and system) of the child process, median, runs alternating",
        "one_file": {
            **{k: round(v, 4) for k, v in one.items()},
            "ratio": one_ratio,
            "limit": 1.5,
            "repeat": options.repeat,
        },
        "many_files": {
            **{k: round(v, 3) for k, v in all_files.items()},
            "files": options.files,
            "ratio": many_ratio,
            "limit": 1.0,
        },
    }
    text = json.dumps(result, indent=2) + "\n"
    sys.stdout.write(text)
    if options.output:
        options.output.write_text(text)
    return 0 if one_ratio <= 1.5 and many_ratio < 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
