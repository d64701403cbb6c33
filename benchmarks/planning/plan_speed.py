"""Measure the processor time of a plan: nothing cached, everything cached, and without a search.

    python benchmarks/planning/plan_speed.py [--case NAME ...] [-o benchmarks/results/planning_speed.json]

Every figure is the user and system time of one process, imports included. Machines differ and are seldom
idle, so each figure is also a ratio to a bare import in the same run: a plan with an empty cache to
``import torch, transformers``, a cached plan to ``import fsdptool.planning.plan``. The imports of model
classes, which no plan with an empty cache does without, are measured, too: they load most of a library.

The caches are made in an empty folder. The package's bytecode is compiled first, as an installation does. A
plan without a search suggests changes that need traces of their own, so it runs twice, too.
"""

from __future__ import annotations

import argparse
import compileall
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))

from child_time import cpu_seconds
from results_file import write_results

import fsdptool

H100 = ["--gpu", "H100-80GB-SXM", "--gpus", "8"]
RTX = ["--gpu", "RTX-4090-24GB", "--gpus", "2"]
CASES: dict[str, list[str]] = {
    "llama3:70b, 32 H100": ["llama3:70b", *H100, "--nodes", "4", "--seq-len", "4096"],
    "qwen2.5:7b, LoRA on int8": [
        *("qwen2.5:7b", *RTX, "--seq-len", "2048", "--method", "lora", "--lora-base", "int8")
    ],
    "flux.1:dev, LoRA": [*("flux.1:dev", *RTX, "--height", "1024", "--width", "1024", "--method", "lora")],
    "qwen3-moe:235b-a22b, 512 H100": ["qwen3-moe:235b-a22b", *H100, "--nodes", "64", "--seq-len", "4096"],
}


def seconds(arguments: list[str], cache: str) -> float:
    """Return the processor seconds of one Python process."""
    environment = {**os.environ, "FSDPTOOL_CACHE": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # 1: the plan does not fit; 5: it is unknown. Both are answers.
    return cpu_seconds([sys.executable, *arguments], environment=environment, answers=(0, 1, 5))


def main() -> None:
    """Run the cases, print each and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--case", choices=list(CASES), action="append")
    arguments = parser.parse_args()
    results = []
    compileall.compile_dir(Path(fsdptool.__file__).parent, quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        light = seconds(["-c", "import fsdptool.planning.plan"], folder)
        heavy = seconds(["-c", "import torch, transformers"], folder)
        model = seconds(["-c", "import torch; from transformers import LlamaForCausalLM"], folder)
        image = seconds(["-c", "import torch, peft; from diffusers import FluxTransformer2DModel"], folder)
        imports = {
            "fsdptool.planning.plan": round(light, 2),
            "torch, transformers": round(heavy, 2),
            "torch, transformers.LlamaForCausalLM": round(model, 2),
            "torch, peft, diffusers.FluxTransformer2DModel": round(image, 2),
        }
        print(imports, flush=True)
        for name in arguments.case or CASES:
            plan = ["-m", "fsdptool", "plan", *CASES[name]]
            cold = seconds(plan, folder)
            cached = seconds(plan, folder)
            seconds([*plan, "--no-search"], folder)
            single = seconds([*plan, "--no-search"], folder)
            results.append(
                {
                    "case": name,
                    "cold_seconds": round(cold, 2),
                    "cached_seconds": round(cached, 2),
                    "cached_without_search_seconds": round(single, 2),
                    "cold_per_import_of_torch": round(cold / heavy, 2),
                    "cached_per_import": round(cached / light, 2),
                    "cached_without_search_per_import": round(single / light, 2),
                }
            )
            print(results[-1], flush=True)
            if arguments.output:
                write_results(arguments.output, "plan_speed", results, imports=imports)


if __name__ == "__main__":
    main()
