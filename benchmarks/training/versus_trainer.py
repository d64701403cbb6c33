"""Measure the step time relative to Hugging Face's Trainer, with and without sharding.

When FSDP2 is requested on two gloo ranks, the Trainer does not shard on the CPU: every rank holds every
parameter (``as_asked``). It is therefore compared twice, each time with the same model, batch, AdamW,
clipping and fp32:

- ``sharded``: two gloo ranks, with accelerate's FSDP2 plugin attached to the Trainer's accelerator by hand.
  The parameters that a rank then holds are recorded, too.
- ``whole``: one process, in which the Trainer does not shard. fsdptool shards over the single rank, which
  copies every unit's parameters in forward and in backward, and its gradients once.

Whole programs run in turn (A B, B A, ...). A program's figure is the median of its step times without the
first ones; the result is the median of paired ratios, with bootstrap bounds.

    python benchmarks/training/versus_trainer.py --pairs 12
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from paired import bounds, head, llama, turns, write_run

LENGTH, STEPS, WARM = 512, 16, 5
CONFIG = llama(256, 6, 2048)
RIVAL = """\
import json, os, sys, time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

folder, steps, way = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
tokens = torch.randint(0, model.config.vocab_size, (steps * 2, LENGTH))
times = []

class Clock(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        self.began = time.perf_counter()
    def on_step_end(self, *args, **kwargs):
        times.append(time.perf_counter() - self.began)

class Sharding(Trainer):
    # accelerate 1.15 leaves FSDP out on the CPU; everything after this is its own code and the Trainer's.
    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        from accelerate.state import AcceleratorState, PartialState
        from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
        )
        for shared in (PartialState._shared_state, AcceleratorState._shared_state):
            shared["distributed_type"] = DistributedType.FSDP
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        self.is_fsdp_enabled = True

options = dict(fsdp="full_shard", fsdp_config={"version": 2}) if way == "as_asked" else {}
arguments = TrainingArguments(
    output_dir=str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=1, use_cpu=True,
    optim="adamw_torch_fused", max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to=[],
    disable_tqdm=True, **options,
)
trainer = (Sharding if way == "sharded" else Trainer)(
    model=model, args=arguments, callbacks=[Clock()],
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
)
trainer.train()
held = [p.to_local() if isinstance(p, DTensor) else p for p in trainer.model.parameters()]
if os.environ.get("RANK", "0") == "0":
    document = {"times": times, "held": sum(p.numel() for p in held)}
    (folder / "trainer.json").write_text(json.dumps(document))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()  # gloo aborts now and then where the Trainer leaves this out
"""


def ours(folder: Path, arguments: list[str]) -> list[float]:
    """Return the step times of ``fsdptool train`` on one process."""
    argv = [
        sys.executable,
        "-m",
        "fsdptool",
        *arguments,
        "--no-predict",
        "-o",
        str(folder / "run"),
        "--force",
    ]
    _start(argv, folder)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step_seconds"] for line in lines]


def trainer(folder: Path, *, ranks: int, steps: int, way: str) -> dict[str, Any]:
    """Run the Trainer; returns step times and the parameters rank 0 held."""
    argv = [sys.executable]
    if ranks > 1:
        argv += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1"]
        argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    _start([*argv, "rival.py", str(folder), str(steps), way], folder)
    document: dict[str, Any] = json.loads((folder / "trainer.json").read_text())
    return document


def _start(argv: list[str], folder: Path) -> None:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(f"{argv} ended with {done.returncode}: {done.stderr[-2000:]}")


def as_asked(folder: Path) -> dict[str, Any]:
    """Request FSDP2 of the Trainer on two ranks; return what a rank held, or why it refused."""
    try:
        kept = trainer(folder, ranks=2, steps=1, way="as_asked")["held"]
    except RuntimeError as error:
        return {"held_by_rank_0": None, "refusal": str(error).splitlines()[-1]}
    return {"held_by_rank_0": kept}


def compare(ranks: int, way: str, pairs: int) -> dict[str, Any]:
    """Run both in turn; return medians, ratios and what a rank of the Trainer held."""
    times: dict[str, list[float]] = {"fsdptool": [], "trainer": []}
    kept = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = prepare(folder, ranks)
        for pair in turns(pairs, ("fsdptool", "trainer")):
            for rival in pair:
                if rival == "fsdptool":
                    seconds = ours(folder, arguments)
                else:
                    times_and_held = trainer(folder, ranks=ranks, steps=STEPS, way=way)
                    seconds, kept = times_and_held["times"], times_and_held["held"]
                times[rival].append(statistics.median(seconds[WARM:]))
    return {
        "ranks": ranks,
        "held_by_rank_0_of_trainer": kept,
        "median_seconds": {rival: statistics.median(values) for rival, values in times.items()},
        "ratio": bounds([a / b for a, b in zip(times["fsdptool"], times["trainer"], strict=True)]),
    }


def prepare(folder: Path, ranks: int) -> list[str]:
    """Write what both need; return the arguments of ``fsdptool train``."""
    (folder / "rival.py").write_text(RIVAL.replace("LENGTH", str(LENGTH)))
    return write_run(folder, CONFIG, ranks=ranks, steps=STEPS, length=LENGTH)


def parameters() -> int:
    """Return the number of parameters of the model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {key: value for key, value in CONFIG.items() if key not in ("model_type", "architectures")}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**settings))
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pairs", type=int, default=12, help="pairs of sharded runs; a third as many of whole ones"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/training_versus_trainer.json")
    )
    chosen = parser.parse_args()
    output = chosen.output.absolute()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), 2)
        shown = as_asked(Path(name))
    document = {
        **head(
            "step time, fsdptool over Hugging Face's Trainer; below 1 is faster",
            pairs=chosen.pairs,
            steps=STEPS,
            tokens=LENGTH,
            config=CONFIG,
        ),
        "parameters": parameters(),
        "as_asked": shown,
        "sharded": compare(2, "sharded", chosen.pairs),
        "whole": compare(1, "whole", max(chosen.pairs // 3, 3)),
    }
    output.write_text(json.dumps(document, indent=2) + "\n")
    keys = ("parameters", "as_asked", "sharded", "whole")
    sys.stdout.write(json.dumps({key: document[key] for key in keys}, indent=2) + "\n")


if __name__ == "__main__":
    main()
