"""Count the functions and modules through which ``plan``, ``train`` and ``validate`` go, by profile hooks.

    python benchmarks/cli/spine.py [-o benchmarks/results/cli-spine.json]

A function counts once, however often it is called; bodies of modules and classes, lambdas and comprehensions
do not. ``train`` is the main job of the examples, two steps on one rank: its command and its worker apart.
``calls`` of a plan are how often the run is decided, the model is read, and a run becomes a search point and
a search point a run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CALLS = ("inspect", "resolve_run", "with_stored_dtypes", "point_of", "at_point")
PLAN = ["plan", "llama3:8b", "--gpu", "H100-80GB-SXM", "--gpus", "8", "--seq-len", "4096"]
TRAIN = ["train", "recipe.yaml", "--config", "one.yaml", "-o", "run"]
COMMANDS = {"plan, cold cache": PLAN, "plan": PLAN, "train": TRAIN, "validate": ["validate", "fsdp.yaml"]}
HOOK = """\
import atexit, json, os, sys, threading
calls = {}
def count(frame, event, _):
    if event == "call":
        calls[frame.f_code] = calls.get(frame.f_code, 0) + 1
def write():
    sys.setprofile(None)
    own = tuple(os.path.join(ROOT, name) + os.sep for name in ("fsdptool", "plugins"))
    # CO_OPTIMIZED (1): a function, not the body of a class.
    rows = [(c.co_filename, c.co_qualname, n) for c, n in calls.items()
            if c.co_flags & 1 and c.co_name[0] != "<" and c.co_filename.startswith(own)]
    kind = "worker" if "fsdptool.training.worker" in " ".join(sys.orig_argv) else "command"
    if rows:
        with open(os.path.join(os.environ["SPINE"], f"{kind}-{os.getpid()}.json"), "w") as file:
            json.dump(rows, file)
atexit.register(write)
threading.setprofile(count)
sys.setprofile(count)
"""
FSDP = """\
distributed_type: FSDP
mixed_precision: "no"
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
"""


def measure(arguments: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Return, for a command and its workers, how many functions and modules were called."""
    with tempfile.TemporaryDirectory() as name:
        path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", str(ROOT))])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "SPINE": name,
            "FSDPTOOL_CACHE": str(folder / "cache"),
        }
        subprocess.run(
            [sys.executable, "-m", "fsdptool", *arguments], cwd=folder, env=environment, check=True
        )
        rows: dict[str, dict[tuple[str, str], int]] = {}
        for file in sorted(Path(name).glob("*.json")):
            for module, function, number in json.loads(file.read_text(encoding="utf-8")):
                rows.setdefault(file.name.split("-")[0], {})[module, function] = number
    result: dict[str, dict[str, Any]] = {}
    for kind, found in rows.items():
        result[kind] = {"functions": len(found), "modules": len({module for module, _ in found})}
        if arguments == PLAN:
            result[kind]["calls"] = {
                name: sum(number for (_, function), number in found.items() if function == name)
                for name in CALLS
            }
    return result


def main() -> None:
    """Measure every command, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(f"ROOT = {str(ROOT)!r}\n{HOOK}")
        (folder / "fsdp.yaml").write_text(FSDP)
        (folder / "one.yaml").write_text(FSDP.replace("processes: 8", "processes: 1\nuse_cpu: true"))
        recipe = (ROOT / "examples" / "main_job" / "recipe.yaml").read_text(encoding="utf-8")
        (folder / "recipe.yaml").write_text(recipe.replace("steps: 60", "steps: 2").replace(": 30", ": 2"))
        rows: dict[str, Any] = {}
        for title, arguments in COMMANDS.items():
            rows[title] = measure(arguments, folder)
            print(title, rows[title], flush=True)
            text = json.dumps({"benchmark": "cli-spine", "plan": PLAN, "rows": rows}, indent=1) + "\n"
            if output:
                output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
