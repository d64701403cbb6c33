"""Rows of the stage ``train``: whole runs of the command line, one process on one GPU, beside their plans."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

Write = Callable[[Mapping[str, Any]], None]

YAML = """\
# fsdptool: consumer=fsdptool
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: '{precision}'
num_machines: 1
machine_rank: 0
num_processes: 1
use_cpu: {cpu}
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_offload_params: false
  fsdp_activation_checkpointing: {checkpointing}
  fsdp_cpu_ram_efficient_loading: false
"""

RECIPE = """\
model:
  reference: {model}
  weights: random
method: {method}
data:
  source: synthetic
  document_mask: {mask}
batch:
  micro_batch: {micro_batch}
  sequence_length: {length}
optimizer:
  name: {optimizer}
  learning_rate: 1.0e-4
checkpoints: {checkpoints}
steps: {steps}
"""

LORA = "{name: lora, lora: {rank: 16}}"


def write_run(
    folder: Path,
    *,
    model: str,
    length: int,
    steps: int,
    cpu: bool,
    micro_batch: int = 1,
    checkpointing: bool = False,
    method: str = "{name: full}",
    optimizer: str = "adamw",
    mask: bool = False,
    checkpoints: str = "{at_end: false}",
) -> tuple[Path, Path]:
    """Write a recipe and a YAML into ``folder``; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe, config = folder / "recipe.yaml", folder / "fsdp.yaml"
    recipe.write_text(
        RECIPE.format(
            model=model,
            method=method,
            mask=str(mask).lower(),
            micro_batch=micro_batch,
            length=length,
            optimizer=optimizer,
            checkpoints=checkpoints,
            steps=steps,
        ),
        encoding="utf-8",
    )
    config.write_text(
        YAML.format(
            precision="no" if cpu else "bf16", cpu=str(cpu).lower(), checkpointing=str(checkpointing).lower()
        ),
        encoding="utf-8",
    )
    return recipe, config


def tool(*arguments: object) -> list[str]:
    """Return the command line of fsdptool."""
    return [sys.executable, "-m", "fsdptool", *map(str, arguments)]


def call(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run fsdptool to its end."""
    return subprocess.run(tool(*arguments), capture_output=True, text=True, check=False)


def result_of(run: Path) -> dict[str, Any]:
    """Return what a run folder says of memory, time and the comparison with its plan."""
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    keys = ("status", "steps", "predicted_peak_bytes", "measured_peak_bytes", "error_percent", "instrument")
    row = {key: summary[key] for key in keys}
    row["measured_moments"] = summary.get("measured_moments")
    # The first steps open caches and choose algorithms.
    warm = lines[2:] or lines
    row["median_step_seconds"] = statistics.median(line["step_seconds"] for line in warm)
    row["data_seconds"] = statistics.median(line["data_seconds"] for line in warm)
    shares = [line["mfu"] for line in warm if line.get("mfu") is not None]
    row["mfu"] = statistics.median(shares) if shares else None
    row["reserved_peak_bytes"] = max((line.get("memory_reserved_peak_bytes") or 0) for line in lines)
    # While a save is under way its copies count.
    row["allocated_by_step"] = [line.get("memory_allocated_peak_bytes") for line in lines]
    row["losses"] = [lines[0]["loss"], lines[-1]["loss"]]
    tokens = [line["tokens"] / line["step_seconds"] for line in warm if line.get("tokens")]
    row["tokens_per_second"] = statistics.median(tokens) if tokens else None
    prediction = run / "prediction.json"
    if prediction.exists():
        planned = json.loads(prediction.read_text(encoding="utf-8"))
        wanted = ("allocated_peak_bytes", "reserved_peak_bytes", "step_seconds", "seconds", "mfu")
        row["plan"] = {key: planned.get(key) for key in wanted}
    return row


def train(write: Write, folder: Path, small: bool, *, model: str, steps: int = 12, **options: Any) -> None:
    """Train with a prediction, then calibrate the machine table on the run and plan again."""
    cpu = small or not _on_cuda()
    if small:
        model, steps = f"{model.split(':')[0]}:tiny", 4
        options |= {"length": 64, "micro_batch": 1}
    recipe, config = write_run(folder / "in", model=model, steps=steps, cpu=cpu, **options)
    run = folder / "run"
    done = call("train", recipe, "--config", config, "-o", run)
    if done.returncode:
        write({"error": f"train ended with {done.returncode}", "log": _tail(done, run)})
        return
    row = result_of(run)
    write(row)
    if not cpu:
        import torch

        table = folder / "machine.json"
        gpu = torch.cuda.get_device_name()
        calibrated = call("calibrate", "--gpu", gpu, run, "-o", table)
        again = call(
            *("plan", "--recipe", recipe, "--gpu", gpu, "--gpus", "1", "--machine", table),
            *("--no-search", "--format", "json"),
        )
        if calibrated.returncode == 0 and again.returncode in (0, 1):
            document = json.loads(again.stdout)
            by_id = {candidate["id"]: candidate for candidate in document["candidates"]}
            chosen = by_id.get(document["chosen"], document["candidates"][0])
            write({"calibrated": {key: chosen[key] for key in ("step_seconds", "device_total_bytes")}})
        else:
            write({"calibrated": {"error": _tail(calibrated, None) + _tail(again, None)}})
    text = f"step {row['median_step_seconds']:.3f} s, memory {row['error_percent'] or 0:+.2f} %"
    write({"summary": text + (f", MFU {row['mfu']:.1%}" if row["mfu"] else "")})


def stop_and_resume(write: Write, folder: Path, small: bool, *, from_cpu: bool) -> None:
    """Stop a run in the middle by a signal and resume it; ``from_cpu``: its first half runs on the CPU."""
    cpu = small or not _on_cuda()
    model = "qwen3:tiny" if small or from_cpu else "qwen3:0.6b"
    options: dict[str, Any] = {
        "length": 64 if small or from_cpu else 1024,
        "steps": 6 if small else 12,
        "model": model,
    }
    options["checkpoints"] = "{every_steps: 4}"
    recipe, config = write_run(folder / "in", cpu=cpu, **options)
    first = folder / "first"
    _, start = write_run(folder / "start", cpu=cpu or from_cpu, **options)
    process = subprocess.Popen(
        tool("train", recipe, "--config", start, "-o", first),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    metrics = first / "metrics.jsonl"
    while process.poll() is None:
        if metrics.exists() and metrics.read_text(encoding="utf-8").count("\n") >= 2:
            process.send_signal(signal.SIGTERM)
            break
        time.sleep(0.02)
    write({"stopped": process.wait()})
    if process.returncode != 75:
        write({"error": f"the first half ended with {process.returncode}, not 75", "log": _log(first)})
        return
    if from_cpu and not cpu:
        # Another device is another run: it begins with the checkpoint of the first.
        run = folder / "second"
        newest = sorted((first / "checkpoints").glob("step-*"))[-1]
        done = call("train", recipe, "--config", config, "-o", run, "--resume", newest)
    else:
        run = first
        done = call("train", recipe, "--config", config, "-o", run, "--resume", "auto")
    write({"resumed": done.returncode})
    if done.returncode:
        write({"error": f"the second half ended with {done.returncode}", "log": _tail(done, run)})
        return
    row = result_of(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line["step"] for line in lines]
    write({"status": row["status"], "steps": steps, "losses": [line["loss"] for line in lines]})
    write({"summary": f"stopped, resumed, {row['status']} after step {steps[-1]}"})


def out_of_memory(write: Write, folder: Path, small: bool) -> None:
    """Run out of memory on purpose, and keep the report."""
    cpu = small or not _on_cuda()
    # On a GPU activations of 131,072 tokens; on the CPU one mask of 2^36 bytes, which no host grants.
    model, length = ("qwen3:tiny", 1 << 18) if cpu else ("qwen3:0.6b", 1 << 17)
    recipe, config = write_run(folder / "in", model=model, length=length, steps=2, cpu=cpu, mask=cpu)
    run = folder / "run"
    done = call("train", recipe, "--config", config, "-o", run, *(["--no-predict"] if cpu else []))
    path = run / "logs" / "out-of-memory.json"
    row: dict[str, Any] = {"exit_status": done.returncode, "message": done.stderr.strip().splitlines()[-6:]}
    if path.exists():
        report = json.loads(path.read_text(encoding="utf-8"))
        row["report"] = report
        seen = report["seen"]
        listed = sum(item["bytes"] for item in seen["live"])
        row["summary"] = f"{seen['moment']}; {listed} of {seen['allocated_bytes']} bytes listed"
    else:
        row["error"] = "no report was written"
        row["log"] = _tail(done, run)
    write(row)


def _on_cuda() -> bool:
    """Look for a GPU without opening a context, which the runs would find occupied."""
    from fsdptool.distributed.devices import count_gpus

    return os.environ.get("CUDA_VISIBLE_DEVICES") != "" and count_gpus() > 0


def _tail(done: subprocess.CompletedProcess[str], run: Path | None) -> list[str]:
    lines = done.stderr.strip().splitlines()[-12:]
    return [*lines, *(_log(run) if run is not None else [])]


def _log(run: Path) -> list[str]:
    paths = sorted((run / "logs").glob("rank-0*"))
    return paths[-1].read_text(encoding="utf-8", errors="replace").splitlines()[-12:] if paths else []


ROWS: dict[str, tuple[float, Callable[[Write, Path, bool], None]]] = {
    "qwen3 0.6b": (90.0, partial(train, model="qwen3:0.6b", length=2048, micro_batch=4)),
    "qwen3 0.6b stop and resume": (120.0, partial(stop_and_resume, from_cpu=False)),
    "tiny model resumed from a CPU checkpoint": (120.0, partial(stop_and_resume, from_cpu=True)),
    "out of memory": (120.0, out_of_memory),
    "qwen3 0.6b saved while it trains": (
        120.0,
        partial(train, model="qwen3:0.6b", length=2048, micro_batch=4, checkpoints="{every_steps: 4}"),
    ),
    "qwen3 1.7b": (120.0, partial(train, model="qwen3:1.7b", length=4096, micro_batch=2)),
    "qwen3 1.7b masked": (120.0, partial(train, model="qwen3:1.7b", length=4096, micro_batch=2, mask=True)),
    "qwen3 4b ac-full": (150.0, partial(train, model="qwen3:4b", length=4096, checkpointing=True)),
    "llama3 8b lora ac-full": (
        150.0,
        partial(train, model="llama3:8b", length=4096, checkpointing=True, method=LORA),
    ),
    "llama3 8b full adamw8bit ac-full": (
        200.0,
        partial(train, model="llama3:8b", length=4096, checkpointing=True, optimizer="adamw8bit", steps=8),
    ),
}
"""Time limit and function by name, the most valuable first."""
