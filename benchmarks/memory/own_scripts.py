"""Real peaks of training scripts that people write themselves, on CPUs, beside the plans of their text.

    python benchmarks/memory/own_scripts.py [--only TEXT] [-o FILE]

Each row writes a script with a loop of its own, runs it on one process or on two over gloo, and plans the
same file: ``fsdptool plan loop.py``. The model and the instrument are those of ``other_programs.py``. A plan
is for rows of 257 tokens, as the script makes them; it trains on 256.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import other_programs

RESULT = Path(__file__).parents[1] / "results" / "memory_own_scripts.json"
SCRIPT = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

seq_len = 256
{before}
model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32, use_cache=False)
{shard}
optimizer = {optimizer}
rows = torch.randint(5, 8000, (64, seq_len + 1), generator=torch.Generator().manual_seed(0))
loader = DataLoader(rows, batch_size=2)
{prepare}
for step, batch in enumerate(loader):
    inputs, labels = batch[:, :-1], batch[:, 1:]
{loss}
    {backward}
    if (step + 1) % {accumulation} == 0:
        optimizer.step()
        optimizer.zero_grad()
    if step + 1 == 3 * {accumulation}:
        break
"""
GROUP = 'dist.init_process_group("gloo")'
MESH = f'{GROUP}\nmesh = init_device_mesh("cpu", (2,))'
FORWARD = "    loss = model(input_ids=inputs, labels=inputs).loss"
SHARD = """\
for layer in model.{layers}:
    fully_shard(layer, mesh=mesh{options})
fully_shard(model, mesh=mesh{options})"""
NARROW = ", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
PLUGIN = """\
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True,
    transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)"""
OUTSIDE = """\
    logits = model(input_ids=inputs).logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())"""


@dataclass(frozen=True)
class Loop:
    """A script: what differs from row to row.

    Attributes:
        processes: One, or two over gloo.
        before: Statements before the model is loaded.
        shard: Statements that shard or change it.
        optimizer: The optimizer.
        prepare: Statements after the loader.
        loss: Statements of the forward and the loss.
        backward: The call of backward.
        accumulation: Micro-batches of a step.
    """

    processes: int
    before: str = MESH
    shard: str = SHARD.format(layers="model.layers", options="")
    optimizer: str = "torch.optim.AdamW(model.parameters(), lr=1e-4)"
    prepare: str = ""
    loss: str = FORWARD
    backward: str = "loss.backward()"
    accumulation: int = 1

    def text(self) -> str:
        """Return the script."""
        return SCRIPT.format(**vars(self))


_AUTOCAST = FORWARD.replace("    loss", '    with torch.autocast("cpu", dtype=torch.bfloat16):\n        loss')
LOOPS = {
    "fully_shard, fp32": Loop(2),
    "fully_shard, bf16 policy": Loop(2, shard=SHARD.format(layers="model.layers", options=NARROW)),
    "fully_shard, accumulation": Loop(2, accumulation=2),
    "fully_shard, outputs held": Loop(
        2, loss="    outputs = model(input_ids=inputs, labels=inputs)\n    loss = outputs.loss"
    ),
    "fully_shard, loss after forward, SGD with momentum": Loop(
        2,
        shard=SHARD.format(layers="model.layers", options=f"{NARROW}, reshard_after_forward=False"),
        optimizer="torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)",
        loss=OUTSIDE,
    ),
    "fully_shard, adapters": Loop(
        2,
        shard='model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))\n'
        + SHARD.format(layers="base_model.model.model.layers", options=""),
        optimizer="torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4)",
    ),
    "accelerate's plugin": Loop(
        2,
        before=PLUGIN,
        shard="",
        prepare="model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        backward="accelerator.backward(loss)",
    ),
    "DDP": Loop(2, before=GROUP, shard="model = DistributedDataParallel(model)"),
    "one process, autocast": Loop(1, before="", shard="", loss=_AUTOCAST),
    "one process, autocast, recomputed": Loop(
        1, before="", shard="model.gradient_checkpointing_enable()\nmodel.train()", loss=_AUTOCAST
    ),
}


def measured(loop: Loop, folder: Path) -> list[int]:
    """Run a script and return the peak of each rank in bytes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    # Weights that are cast while they load are otherwise made in threads, whose allocations are not seen.
    environment["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    launch = [sys.executable]
    if loop.processes > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(loop.processes)]
    if "accelerator" in loop.before:
        environment |= {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true"}
    command = [*launch, str(Path(other_programs.__file__)), "--worker", "loop.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise RuntimeError(f"{done.stdout[-2000:]}{done.stderr[-6000:]}")
    return [json.loads((folder / f"peak-{rank}.json").read_text()) for rank in range(loop.processes)]


def planned(loop: Loop, folder: Path) -> dict[str, Any]:
    """Return the document of the plan of a script."""
    words = [sys.executable, "-m", "fsdptool", "plan", "loop.py", "--profile", "cpu-gloo", "--format", "json"]
    words += ["--gpus", str(loop.processes), "--model", "model"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1, 5):
        raise RuntimeError(done.stderr)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def main() -> int:
    """Measure and plan every row; returns 1 if one is more than 2 % apart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="text that the row's name must contain")
    parser.add_argument("-o", "--output", type=Path, default=RESULT)
    options = parser.parse_args()
    from fsdptool.records.diagnostic import library_versions

    rows: dict[str, Any] = {}
    if options.only and options.output.exists():
        rows = json.loads(options.output.read_text(encoding="utf-8"))["rows"]
    for name, loop in LOOPS.items():
        if options.only not in name:
            continue
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            other_programs.make_inputs(folder)
            (folder / "loop.py").write_text(loop.text(), encoding="utf-8")
            plan, peaks = planned(loop, folder), measured(loop, folder)
        chosen = next(item for item in plan["candidates"] if item["id"] == plan["chosen"])
        memory = chosen["allocated_peak_bytes"]
        rows[name] = {
            "processes": loop.processes,
            "planned_bytes": memory,
            "measured_bytes": peaks,
            "difference": memory / max(peaks) - 1,
            "limits": plan["inputs"].get("limits"),
        }
        sys.stdout.write(f"{name}: planned {memory:,}, measured {peaks}, {rows[name]['difference']:+.2%}\n")
        sys.stdout.flush()
    document = {"benchmark": "memory/own_scripts", "libraries": library_versions(), "rows": rows}
    options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return int(any(abs(row["difference"]) > 0.02 for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
