"""Rows of the stage ``paired``: the same model and batch through fsdptool and through other programs.

Four programs in turn, A B C D and D C B A, each in a process of its own on one GPU: ``fsdptool train``, a
bare loop around ``fully_shard``, Hugging Face's Trainer with FSDP2, and an accelerate script with FSDP2. All
compute in bf16 with fp32 masters and reduction, have the same shapes, AdamW and clipping, and see unmasked
batches. ``session_report.py`` divides the medians. On a CPU the Trainer and accelerate do not shard
(``sharded`` says so), so a rehearsal's ratios mean nothing.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import run_rows

Write = Callable[[Mapping[str, Any]], None]
MODEL, LENGTH, SAMPLES, STEPS, WARM = "qwen3:1.7b", 2048, 2, 20, 5
PROGRAMS = ("fsdptool", "bare", "trainer", "accelerate")


def rows() -> dict[str, Callable[[Write, Path, bool], None]]:
    """Return the rows of two rounds by name, the second in reverse order."""
    order = [*((1, name) for name in PROGRAMS), *((2, name) for name in reversed(PROGRAMS))]
    return {f"{name} {turn}": partial(_run, program=name) for turn, name in order}


def _run(write: Write, folder: Path, small: bool, *, program: str) -> None:
    if program == "fsdptool":
        ours(write, folder, small)
        return
    _join_alone()
    {"bare": bare, "trainer": trainer, "accelerate": with_accelerate}[program](write, folder, small)


def ours(write: Write, folder: Path, small: bool) -> None:
    """Run ``fsdptool train``."""
    cpu = small or not run_rows._on_cuda()
    model, length, samples, steps, _ = _sizes(small)
    recipe, config = run_rows.write_run(
        folder / "in", model=model, length=length, steps=steps, cpu=cpu, micro_batch=samples
    )
    done = run_rows.call("train", recipe, "--config", config, "-o", folder / "run", "--no-predict")
    if done.returncode:
        write({"error": f"train ended with {done.returncode}", "log": run_rows._tail(done, folder / "run")})
        return
    import json

    text = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    _report(
        write,
        [line["step_seconds"] for line in lines],
        allocated=max((line["memory_allocated_peak_bytes"] or 0) for line in lines),
        reserved=max((line["memory_reserved_peak_bytes"] or 0) for line in lines),
        sharded=True,
        small=small,
    )


def bare(write: Write, folder: Path, small: bool) -> None:
    """Run a loop that calls torch alone: same units, fused AdamW, clipping."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    where = "cuda" if torch.cuda.is_available() and not small else "cpu"
    dist.init_process_group("nccl" if where == "cuda" else "gloo")
    model, tokens = _model(small).to(where), _tokens(small)
    mesh = init_device_mesh(where, (1,))
    # In fp32 on the CPU, like the other programs there.
    policy = (
        MixedPrecisionPolicy(torch.bfloat16, torch.float32) if where == "cuda" else MixedPrecisionPolicy()
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )

    def step(batch: Any) -> None:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    _time(write, step, [batch.to(where) for batch in tokens], model, small)
    dist.destroy_process_group()


def with_accelerate(write: Write, folder: Path, small: bool) -> None:
    """Run an accelerate script with its FSDP2 plugin."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    if small or not torch.cuda.is_available():
        accelerator = Accelerator(cpu=True)
    else:
        accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model: Any = _model(small)
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    model, optimizer = accelerator.prepare(model, optimizer)

    def step(batch: Any) -> None:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    _time(write, step, [batch.to(accelerator.device) for batch in _tokens(small)], model, small)


def trainer(write: Write, folder: Path, small: bool) -> None:
    """Run Hugging Face's Trainer with FSDP2."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Times the steps."""

        began = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            """Start the clock."""
            self.began = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            """Stop it once the device is done."""
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - self.began)

    on_gpu = torch.cuda.is_available() and not small
    options: dict[str, Any] = {"use_cpu": True}
    if on_gpu:
        options = {"bf16": True, "fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}}
    _, _, samples, steps, _ = _sizes(small)
    arguments = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=samples,
        optim="adamw_torch_fused",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    tokens = torch.cat(_tokens(small))
    run = Trainer(
        model=_model(small),
        args=arguments,
        callbacks=[Clock()],
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )
    run.train()
    _report(
        write,
        times,
        allocated=torch.cuda.max_memory_allocated() if on_gpu else None,
        reserved=torch.cuda.max_memory_reserved() if on_gpu else None,
        sharded=_is_sharded(run.model),
        small=small,
    )


def _sizes(small: bool) -> tuple[str, int, int, int, int]:
    """Return model, length, samples, steps and steps to leave out."""
    return ("qwen3:tiny", 64, 1, 4, 1) if small else (MODEL, LENGTH, SAMPLES, STEPS, WARM)


def _model(small: bool) -> Any:
    """Build the model with real tensors, as a script does."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from fsdptool.source import resolve

    config = dict(resolve(_sizes(small)[0]).config)
    kind = config.pop("model_type")
    torch.manual_seed(0)
    where = "cuda" if torch.cuda.is_available() and not small else "cpu"
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32)
    return model.train()


def _tokens(small: bool) -> list[Any]:
    import torch

    _, length, samples, steps, _ = _sizes(small)
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (samples, length), generator=generator) for _ in range(steps)]


def _time(write: Write, step: Callable[[Any], None], batches: list[Any], model: Any, small: bool) -> None:
    import torch

    on_gpu = torch.cuda.is_available() and not small
    times = []
    for batch in batches:
        began = time.perf_counter()
        step(batch)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    _report(
        write,
        times,
        allocated=torch.cuda.max_memory_allocated() if on_gpu else None,
        reserved=torch.cuda.max_memory_reserved() if on_gpu else None,
        sharded=_is_sharded(model),
        small=small,
    )


def _is_sharded(model: Any) -> bool:
    from torch.distributed.tensor import DTensor

    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


def _report(
    write: Write,
    times: list[float],
    *,
    allocated: int | None,
    reserved: int | None,
    sharded: bool,
    small: bool,
) -> None:
    middle = statistics.median(times[_sizes(small)[4] :])
    memory = {"allocated_peak_bytes": allocated, "reserved_peak_bytes": reserved}
    write({"median_seconds": middle, "seconds_of_steps": times, **memory, "sharded": sharded})
    write({"summary": f"step {middle:.3f} s{'' if sharded else ', not sharded'}"})


def _join_alone() -> None:
    """Set what torchrun would for one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
