"""Measure on a CUDA machine: one process acts as rank 0 of N over ``fake``, with real kernels.

``python benchmarks/memory/gpu.py OUT_JSON [--only TEXT]``

Per setting: ``max_memory_allocated``, ``max_memory_reserved`` and the driver's own figure for this
process's device, in step 2, next to the prediction. One process cannot show NCCL, context parallelism or
HSDP across GPUs. This script has not been run yet, because no GPU was available.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from measure import Undaunted
from settings import Setting, inputs_of

from fsdptool.distributed.session import open_session
from fsdptool.families.registry import family_of
from fsdptool.families.synthetic import synthesise
from fsdptool.memory import footprint, trace
from fsdptool.modeling.objective import Task, objective_for
from fsdptool.records.codec import to_json
from fsdptool.records.diagnostic import library_versions
from fsdptool.training.optimizers.sharded import build_optimizer
from fsdptool.training.trainer import build_sharded

TEXT = {"sequence_length": 2048, "micro_batch": 1}
SETTINGS = [
    Setting("qwen3 0.6b full n1", "qwen3", "qwen3:0.6b", ranks=1, batch=TEXT),
    Setting("qwen3 0.6b full n8", "qwen3", "qwen3:0.6b", ranks=8, batch=TEXT),
    Setting("qwen3 1.7b full n8 ac", "qwen3", "qwen3:1.7b", ranks=8, batch=TEXT, checkpointing="full"),
    Setting("llama3 8b full n8", "llama", "llama3:8b", ranks=8, batch=TEXT),
    Setting("llama3 8b full n64 ac", "llama", "llama3:8b", ranks=64, batch=TEXT, checkpointing="full"),
    Setting("llama3 8b full n8 bf16 reduce", "llama", "llama3:8b", ranks=8, batch=TEXT, precision="bf16r"),
    Setting("llama3 8b full n8 kept", "llama", "llama3:8b", ranks=8, batch=TEXT, reshard=False),
    Setting("qwen3 14b lora n8 ac", "qwen3", "qwen3:14b", batch=TEXT, method="lora", checkpointing="full"),
    Setting("gpt2 xl full n8 fp32", "gpt2", "gpt2:xl", batch={"sequence_length": 1024}, precision="fp32"),
]


def main() -> None:
    """Measure every setting and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("gpu.py: torch sees no CUDA device; run it on a machine with one")
    rows = []
    for setting in SETTINGS:
        if options.only in setting.name:
            rows.append({"setting": to_json(setting), **_measured(setting)})
            print(json.dumps(rows[-1]), flush=True)
    document = {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "libraries": library_versions(),
        "rows": rows,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _measured(setting: Setting) -> dict[str, Any]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    inputs = inputs_of(setting)
    settings = dataclasses.replace(inputs.settings, use_cpu=False)
    predicted = footprint(
        trace(inputs.spec, inputs.recipe, settings),
        inputs.units,
        settings.mesh.resolve(setting.ranks),
        inputs.recipe,
        workspaces=(torch.backends.cuda.cublas_workspace_size(),) * 2,
    )
    free, total = torch.cuda.mem_get_info()
    context = total - free - torch.cuda.memory_reserved()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=setting.ranks)
    try:
        steps_done = _steps(inputs, settings)
    except torch.cuda.OutOfMemoryError as error:
        steps_done = {"error": str(error)[:300]}
    finally:
        dist.destroy_process_group()
        gc.collect()
        torch.cuda.empty_cache()
    return {
        **steps_done,
        "outside_allocator_bytes": context,
        "predicted_allocated_bytes": predicted.allocated_peak_bytes,
        "predicted_reserved_bytes": predicted.reserved_peak_bytes,
    }


def _steps(made: Any, settings: Any) -> dict[str, Any]:
    session = open_session(settings)
    recipe, spec = made.recipe, made.spec
    model = build_sharded(spec, recipe.model, made.units, settings, session, recipe=recipe, seed=0)[0]
    named = list(model.named_parameters())
    optimizer = build_optimizer(recipe.optimizer, named, rate=1e-4)
    stepper = Undaunted(model, Task(objective_for(recipe, spec)), optimizer, session, clip=1.0)
    specs = family_of(spec).batch_spec(spec.config, recipe)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        batches = [synthesise(specs, generator) for _ in range(recipe.batch.accumulation)]
        stepper.run(batches, rate=1e-4)
        torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "driver_used_bytes": total - free,
    }


if __name__ == "__main__":
    main()
