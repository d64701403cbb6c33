"""Count the functions and modules through which ``plan``, ``train`` and ``validate`` go, by profile hooks.

    python benchmarks/cli/spine.py [-o benchmarks/results/cli-spine.json]

A function counts once, however often it is called; bodies of modules and classes, lambdas and comprehensions
do not. ``train`` is the main job of the examples, two steps on one rank: its command and its worker apart.
``calls`` of a plan are how often the run is decided, the model is read, and a run becomes a search point and
a search point a run.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CALLS = ("inspect", "resolve_run", "with_stored_dtypes", "point_of", "at_point")
PLAN = ["plan", "llama3:8b", "--gpu", "H100-80GB-SXM", "--gpus", "8", "--seq-len", "4096"]
HOOK = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import spine; spine.watch()\n"
FSDP = """\
distributed_type: FSDP
mixed_precision: "no"
num_processes: 1
use_cpu: true
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: Qwen3DecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
"""


def watch() -> None:
    """Count the calls of this process, and write them into a folder when it ends."""
    import atexit
    import threading

    calls: Counter[Any] = Counter()

    def count(frame: Any, event: str, _: object) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    def write() -> None:
        sys.setprofile(None)
        rows = [
            (code.co_filename, code.co_qualname, number)
            for code, number in calls.items()
            if code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
            if Path(code.co_filename).is_relative_to(ROOT / "fsdptool")
            or Path(code.co_filename).is_relative_to(ROOT / "plugins")
        ]
        kind = "worker" if "fsdptool.training.worker" in " ".join(sys.orig_argv) else "command"
        if rows:
            (Path(os.environ["SPINE"]) / f"{kind}-{os.getpid()}.json").write_text(json.dumps(rows))

    atexit.register(write)
    threading.setprofile(count)
    sys.setprofile(count)


def measure(arguments: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Return, for the command and its workers, the functions and the modules that were called."""
    with tempfile.TemporaryDirectory() as name:
        path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "SPINE": name,
            "FSDPTOOL_CACHE": str(folder / "cache"),
        }
        command = [sys.executable, "-m", "fsdptool", *arguments]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{command} failed: {done.stdout[-500:]}{done.stderr[-2000:]}")
        rows: dict[str, dict[tuple[str, str], int]] = {}
        for file in sorted(Path(name).glob("*.json")):
            for module, function, number in json.loads(file.read_text()):
                rows.setdefault(file.name.split("-")[0], {})[module, function] = number
    return {
        kind: {"functions": len(found), "modules": len({module for module, _ in found})}
        | (
            {"calls": {n: sum(c for (_, f), c in found.items() if f == n) for n in CALLS}}
            if arguments == PLAN
            else {}
        )
        for kind, found in rows.items()
    }


def main() -> None:
    """Measure every command, print the figures and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        (folder / "fsdp.yaml").write_text(FSDP)
        recipe = (ROOT / "examples" / "main_job" / "recipe.yaml").read_text()
        (folder / "recipe.yaml").write_text(
            recipe.replace("steps: 60", "steps: 2").replace("every_steps: 30", "every_steps: 2")
        )
        train = ["train", "recipe.yaml", "--config", "fsdp.yaml", "-o", "run"]
        rows = {
            "plan, cold cache": measure(PLAN, folder),
            "plan, warm cache": measure(PLAN, folder),
            "train": measure(train, folder),
            "validate": measure(["validate", "fsdp.yaml"], folder),
        }
    text = json.dumps({"benchmark": "cli-spine", "plan": PLAN, "rows": rows}, indent=1) + "\n"
    sys.stdout.write(text)
    if output:
        output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
