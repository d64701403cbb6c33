"""Step time against Hugging Face's Trainer, and whether the Trainer shards here at all.

On the CPU it does not: with ``fsdp="full_shard"`` and FSDP2 asked for on two gloo ranks every rank still
holds every parameter, which this script shows first (``trainer_shard``). So the two are compared where they
do the same work: one process, the whole model, the same batch, AdamW, clipping, fp32. Whole programs run in
turn (A B, B A, ...); a program's figure is the median of its step times without the first ones, the result
the median of paired ratios with bootstrap bounds.

    python benchmarks/training/versus_trainer.py --pairs 5
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

LENGTH, STEPS, WARM = 128, 24, 6
CONFIG = llama(256, 6, 2048)
RIVAL = """\
import json, os, sys, time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

folder, steps, sharded = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "sharded"
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
tokens = torch.randint(0, model.config.vocab_size, (steps * 2, LENGTH))
times = []

class Clock(TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
        self.began = time.perf_counter()
    def on_step_end(self, *args, **kwargs):
        times.append(time.perf_counter() - self.began)

options = dict(fsdp="full_shard", fsdp_config={"version": 2}) if sharded else {}
arguments = TrainingArguments(
    output_dir=str(folder / "trainer"), max_steps=steps, per_device_train_batch_size=1, use_cpu=True,
    optim="adamw_torch_fused", max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to=[],
    disable_tqdm=True, **options,
)
trainer = Trainer(
    model=model, args=arguments, callbacks=[Clock()],
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
)
trainer.train()
held = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
if os.environ.get("RANK", "0") == "0":
    (folder / "trainer.json").write_text(json.dumps({"times": times, "held": held}))
"""


def ours(folder: Path, arguments: list[str]) -> list[float]:
    """Return the step times of ``fsdptool train`` on one process."""
    argv = [sys.executable, "-m", "fsdptool", *arguments, "-o", str(folder / "run"), "--force"]
    _start(argv, folder)
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step_seconds"] for line in lines]


def trainer(folder: Path, *, ranks: int, steps: int, sharded: bool) -> dict[str, Any]:
    """Run the Trainer; returns step times and the parameters rank 0 held."""
    argv = [sys.executable]
    if ranks > 1:
        argv += ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--local-addr", "127.0.0.1"]
        argv += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    _start([*argv, "rival.py", str(folder), str(steps), "sharded" if sharded else "whole"], folder)
    found: dict[str, Any] = json.loads((folder / "trainer.json").read_text())
    return found


def _start(argv: list[str], folder: Path) -> None:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=240)
    if done.returncode:
        raise RuntimeError(f"{argv} ended with {done.returncode}: {done.stderr[-2000:]}")


def sharding(folder: Path) -> dict[str, Any]:
    """Ask the Trainer for FSDP2 on two ranks and say what a rank held, or why it refused."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "model"))
    total = sum(parameter.numel() for parameter in model.parameters())
    try:
        held = trainer(folder, ranks=2, steps=1, sharded=True)["held"]
    except RuntimeError as error:
        return {"parameters": total, "held_by_rank_0": None, "refusal": str(error).splitlines()[-1]}
    return {"parameters": total, "held_by_rank_0": held, "shards": held < total}


def main() -> None:
    """Run and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/training_versus_trainer.json")
    )
    chosen = parser.parse_args()
    output = chosen.output.absolute()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    times: dict[str, list[float]] = {"fsdptool": [], "trainer": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = write_run(folder, CONFIG, ranks=1, steps=STEPS, length=LENGTH)
        (folder / "rival.py").write_text(RIVAL.replace("LENGTH", str(LENGTH)))
        shown = sharding(folder)
        for pair in turns(chosen.pairs, ("fsdptool", "trainer")):
            for rival in pair:
                seconds = (
                    ours(folder, arguments)
                    if rival == "fsdptool"
                    else trainer(folder, ranks=1, steps=STEPS, sharded=False)["times"]
                )
                times[rival].append(statistics.median(seconds[WARM:]))
    document = {
        **head(
            "step time on one CPU process, fsdptool over Hugging Face's Trainer; below 1 is faster",
            pairs=chosen.pairs,
            steps=STEPS,
            length=LENGTH,
            config=CONFIG,
        ),
        "trainer_shard": shown,
        "median_seconds": {rival: statistics.median(values) for rival, values in times.items()},
        "ratio": bounds([a / b for a, b in zip(times["fsdptool"], times["trainer"], strict=True)]),
    }
    output.write_text(json.dumps(document, indent=2) + "\n")
    keys = ("trainer_shard", "median_seconds", "ratio")
    sys.stdout.write(json.dumps({key: document[key] for key in keys}, indent=2) + "\n")


if __name__ == "__main__":
    main()
