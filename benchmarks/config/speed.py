"""Measure the speed of ``validate`` as a ratio within one run.

    python benchmarks/config/speed.py [--repeat 3] [--files 1000] [-o RESULT.json]

Many files in one call are compared with check-jsonschema with the same schema on the same files. The figure
is the median CPU time over alternating runs.
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


def main() -> int:
    """Measure and print the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    tools = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        many = []
        for number in range(options.files):
            text = FILE.format(processes=2 + number % 15, name=f"Layer{number}")
            (folder / f"f{number}.yaml").write_text(text)
            many.append(f"f{number}.yaml")
        all_files = alternate(
            {
                "fsdptool": [str(tools / "fsdptool"), "validate", "--format", "concise", *many],
                "check-jsonschema": [str(tools / "check-jsonschema"), "--schemafile", str(SCHEMA), *many],
            },
            folder,
            options.repeat,
        )
    many_ratio = round(all_files["fsdptool"] / all_files["check-jsonschema"], 3)
    result = {
        "benchmark": "config-speed",
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "versions": {
            name: metadata.version(name) for name in ("typer", "PyYAML", "jsonschema", "check-jsonschema")
        },
        "instrument": "CPU seconds (user and system) of the child process, median, runs alternating",
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
    return 0 if many_ratio < 1.0 else 1


if __name__ == "__main__":
    sys.exit(main())
