"""Measure the trainer's step time relative to a bare torch FSDP2 loop and to accelerate, with equal settings.

All of them run in the same processes on models of the same shape, step by step in turn (A B B A ...), so
that other load on the machine affects them equally. The figure is the median of the paired ratios, with
bootstrap bounds.

    python benchmarks/training/step_time.py --ranks 2 --pairs 40
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from paired import bounds, head, llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CONFIG = llama(256, 6, 2048)
LENGTH, SAMPLES = 128, 1
Step = Callable[[dict[str, torch.Tensor]], None]


def ours(folder: Path) -> tuple[Step, float]:
    """Return the trainer's step, through the loop that reports metrics."""
    from fsdptool.distributed.session import open_session
    from fsdptool.inspection import inspect
    from fsdptool.modeling.units import plan_units
    from fsdptool.records.recipe import Batch, ModelChoice, Optimizer, Recipe
    from fsdptool.records.sharding import FsdpSettings
    from fsdptool.runs.folder import RunInputs
    from fsdptool.source import resolve
    from fsdptool.training.trainer import assemble

    began = time.perf_counter()
    spec = resolve(str(folder))
    settings = FsdpSettings(wrap_classes=("LlamaDecoderLayer",), use_cpu=True, mixed_precision="no")
    recipe = Recipe(
        model=ModelChoice(str(folder), weights="random"),
        batch=Batch(micro_batch=SAMPLES, sequence_length=LENGTH),
        optimizer=Optimizer(learning_rate=1e-4, clip_grad_norm=1.0),
        steps=1,
    )
    units = plan_units(inspect(spec), recipe, settings)
    assembled = assemble(RunInputs(folder, recipe, settings, spec, units), open_session(settings))
    took = time.perf_counter() - began
    return lambda batch: void(assembled.stepper.run([batch], rate=1e-4)), took


def void(_: Any) -> None:
    """Discard a result."""


def model_for_bare() -> torch.nn.Module:
    """Build the model with real tensors, as a bare script does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {k: v for k, v in CONFIG.items() if k not in ("model_type", "architectures")}
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**settings)).train()
    return model


def bare() -> tuple[Step, float]:
    """Return the step of a script that calls torch alone: same units, fused AdamW, clipping."""
    began = time.perf_counter()
    torch.manual_seed(0)
    model: Any = model_for_bare()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model.embed_tokens, mesh=mesh)
    model.model.embed_tokens.set_unshard_in_backward(False)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(batch: dict[str, torch.Tensor]) -> None:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step, time.perf_counter() - began


def with_accelerate() -> tuple[Step, float]:
    """Return the step of an accelerate script whose FSDP2 shards on the CPU.

    accelerate 1.15 refuses FSDP there, so its plugin is attached to the state by hand. Model, optimizer and
    clipping then go through accelerate's own code.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    began = time.perf_counter()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True)
    for shared in (PartialState._shared_state, AcceleratorState._shared_state):
        shared["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin
    torch.manual_seed(0)
    model: Any = model_for_bare()
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    if not accelerator.is_fsdp2 or not any("DTensor" in type(p).__name__ for p in model.parameters()):
        raise RuntimeError("accelerate did not shard")

    def step(batch: dict[str, torch.Tensor]) -> None:
        loss = model(**batch, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step, time.perf_counter() - began


RIVALS = {"bare": bare, "accelerate": with_accelerate}


def rank_main(rank: int, world: int, folder: str, rivals: list[str], pairs: int, out: str) -> None:
    """Time all candidates in turn on one rank; rank 0 writes the result."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    store = dist.FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mine, start_up = ours(Path(folder, "model"))
    steps, starts = {"fsdptool": mine}, {"fsdptool": start_up}
    for name in rivals:
        steps[name], starts[name] = RIVALS[name]()
    generator = torch.Generator().manual_seed(rank)
    times: dict[str, list[float]] = {name: [] for name in steps}
    order = list(steps)
    for index in range(pairs + 4):
        tokens = torch.randint(0, CONFIG["vocab_size"], (SAMPLES, LENGTH), generator=generator)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        for name in order if index % 2 else order[::-1]:
            dist.barrier()
            began = time.perf_counter()
            steps[name](batch)
            dist.barrier()
            if index >= 4:
                times[name].append(time.perf_counter() - began)
    if rank == 0:
        Path(out).write_text(json.dumps({"times": times, "start_up": starts}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--rivals", default="bare,accelerate")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/training_step_time.json"))
    chosen = parser.parse_args()
    rivals = chosen.rivals.split(",")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        out = f"{folder}/out.json"
        multiprocessing.spawn(rank_main, (chosen.ranks, folder, rivals, chosen.pairs, out), chosen.ranks)
        result = json.loads(Path(out).read_text())
    times = result["times"]
    document = {
        **head(
            "training step time on CPU; a ratio below 1 is faster than the rival",
            ranks=chosen.ranks,
            pairs=chosen.pairs,
            tokens=LENGTH * SAMPLES,
            config=CONFIG,
        ),
        "median_step_seconds": {name: statistics.median(values) for name, values in times.items()},
        "ratios": {
            name: bounds([a / b for a, b in zip(times["fsdptool"], times[name], strict=True)])
            for name in rivals
        },
    }
    chosen.output.write_text(json.dumps(document, indent=2) + "\n")
    sys.stdout.write(json.dumps(document["ratios"], indent=2) + "\n")


if __name__ == "__main__":
    main()
