"""Real peaks of training scripts that people write themselves, on CPUs, beside the plans of their text.

    python benchmarks/memory/own_scripts.py [--only TEXT] [-o FILE]

Each row writes a script with a loop of its own, runs it on one process or on two over gloo, and plans the
same file: ``fsdptool plan loop.py``. The model and the instrument are those of ``other_programs.py``. A plan
is for rows of 257 tokens, as the script makes them; it trains on 256.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "harness"))
import other_programs
from planned_peaks import compare, measured_peaks, parser, plan_document

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


def row_of(loop: Loop, folder: Path) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Plan and run a script in a folder."""
    other_programs.make_inputs(folder)
    (folder / "loop.py").write_text(loop.text(), encoding="utf-8")
    plan = plan_document(["loop.py", "--gpus", str(loop.processes), "--model", "model"], folder)
    plugin = {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true"}
    peaks = measured_peaks(
        [str(Path(other_programs.__file__)), "--worker", "loop.py"],
        folder,
        loop.processes,
        **(plugin if "accelerator" in loop.before else {}),
    )
    return {"processes": loop.processes}, plan, peaks


def main() -> int:
    """Measure and plan every row; returns 1 if one is more than 2 % apart."""
    options = parser(__doc__, RESULT).parse_args()
    return compare(
        "memory/own_scripts", {name: partial(row_of, loop) for name, loop in LOOPS.items()}, options
    )


if __name__ == "__main__":
    sys.exit(main())
