"""Check that plans are equal on different builds of torch, environments and numbers of cores.

    python benchmarks/memory/any_machine.py --python /path/to/another/environment/bin/python

Every reference is planned in a separate process with a separate cache: by this interpreter, by the same
interpreter under another locale, time zone, number of threads and allocator setting, and by every interpreter
given with ``--python`` (for example one with a CUDA build of torch). The documents must be equal except for
the versions that they record.
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

RESULT = Path(__file__).parents[1] / "results" / "memory_any_machine.json"
GPUS = ("--gpu", "H100-80GB-SXM", "--gpus", "8", "--no-search")
PLANS: dict[str, tuple[str, ...]] = {
    "decoder": ("llama3:8b", *GPUS, "--seq-len", "4096"),
    "decoder, adapters, checkpointing": (
        *("qwen3:8b", *GPUS, "--seq-len", "2048"),
        *("--method", "lora", "--lora-rank", "16", "--checkpointing", "full"),
    ),
    "experts": ("qwen3-moe:30b-a3b", *GPUS, "--seq-len", "1024"),
    "two stacks": ("flan-t5:base", *GPUS, "--seq-len", "512"),
    "denoiser": ("flux.1:dev", *GPUS),
    "U-Net": ("sdxl:unet", *GPUS),
    "search": ("llama3.2:1b", "--gpu", "L40S", "--gpus", "4", "--seq-len", "2048", "--search"),
}
ELSEWHERE = {
    "LC_ALL": "C",
    "TZ": "Asia/Kathmandu",
    "OMP_NUM_THREADS": "3",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTHONHASHSEED": "7",
    "COLUMNS": "40",
}
VERSIONS = ("libraries", "versions", "tool", "tool_version", "fsdptool")


def plan(python: str, arguments: tuple[str, ...], environment: dict[str, str]) -> dict[str, Any]:
    """Return the document of one plan, computed with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [python, "-m", "fsdptool", "plan", *arguments, "--format", "json"],
            env={**os.environ, "XDG_CACHE_HOME": cache, "HF_HUB_OFFLINE": "1", **environment},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"plan {' '.join(arguments)} ended with {done.returncode}: {done.stderr}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def differences(a: Any, b: Any, place: str = "") -> list[str]:
    """Return where two documents differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted({*a, *b} - set(VERSIONS))
        return [line for key in keys for line in differences(a.get(key), b.get(key), f"{place}.{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return [line for index, (x, y) in pairs for line in differences(x, y, f"{place}[{index}]")]
    return [] if a == b else [f"{place}: {a!r} != {b!r}"]


def build(python: str) -> dict[str, str]:
    """Return the torch build of an interpreter."""
    code = (
        "import torch, json; print(json.dumps({'torch': torch.__version__, 'cuda': str(torch.version.cuda)}))"
    )
    answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    document: dict[str, str] = json.loads(answer.stdout)
    return document


def main() -> int:
    """Compare every plan; returns 1 if a document differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", action="append", default=[], help="another interpreter; repeatable")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    builds = [build(python) for python in (sys.executable, *options.python)]
    rows: dict[str, dict[str, Any]] = {}
    for name, arguments in PLANS.items():
        here = plan(sys.executable, arguments, {})
        others = {"this build, elsewhere": plan(sys.executable, arguments, ELSEWHERE)}
        for python, torch_build in zip(options.python, builds[1:], strict=True):
            others[f"torch {torch_build['torch']}"] = plan(python, arguments, {})
        rows[name] = {where: differences(here, other) for where, other in others.items()}
        sys.stdout.write(f"{name}: {rows[name]}\n")
        sys.stdout.flush()
    equal = all(not differing for row in rows.values() for differing in row.values())
    result = {"benchmark": "memory/any_machine", "builds": builds, "elsewhere": ELSEWHERE, "equal": equal}
    options.output.write_text(json.dumps({**result, "differences": rows}, indent=1) + "\n", encoding="utf-8")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
