"""Measure the time to the end of the first step: ``fsdptool train`` relative to an accelerate script.

Both start two gloo ranks under torchrun on the same model. The time runs from the start of the process to
the end of the first step. It includes imports, rendezvous, building and, for fsdptool only, the memory
prediction, sharding and its proof. accelerate 1.15 does not shard on the CPU. The first pair is discarded:
it fills the page cache and fsdptool's cache of the model and its trace. Starts alternate (A B, B A, ...);
the figure is the median of paired ratios, with bootstrap bounds.

    python benchmarks/training/start_up.py --pairs 5
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paired import bounds, head, llama, parser, turns, write, write_run

RANKS, LENGTH = 2, 64
CONFIG = llama(256, 4, 2048)
RIVAL = """\
import json, sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

folder = Path(sys.argv[1])
accelerator = Accelerator(cpu=True)
config = AutoConfig.from_pretrained(folder / "model")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
tokens = torch.randint(0, config.vocab_size, (8, LENGTH))
loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
    break
if accelerator.is_main_process:
    (folder / "stepped").write_text("")
accelerator.end_training()
"""


def seconds_until(met: Path, argv: list[str], folder: Path) -> float:
    """Start a program; return the seconds until a file has content or exists, and wait for its end."""
    met.unlink(missing_ok=True)
    began = time.perf_counter()
    process = subprocess.Popen(
        argv, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
    )
    while not (met.exists() and (met.suffix != ".jsonl" or met.stat().st_size)):
        if process.poll() not in (None, 0):
            raise RuntimeError(f"{argv} ended with {process.returncode}")
        time.sleep(0.005)
    taken = time.perf_counter() - began
    if process.wait(timeout=120) != 0:
        raise RuntimeError(f"{argv} ended with {process.returncode}")
    return taken


def main() -> None:
    """Run and write the result."""
    options = parser(__doc__, "training_start_up")
    options.add_argument("--pairs", type=int, default=6)
    chosen = options.parse_args()
    times: dict[str, list[float]] = {"fsdptool": [], "accelerate": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = write_run(folder, CONFIG, ranks=RANKS, steps=1, length=LENGTH)
        (folder / "rival.py").write_text(RIVAL.replace("LENGTH", str(LENGTH)))
        programs = {
            "fsdptool": (
                folder / "run" / "metrics.jsonl",
                [sys.executable, "-m", "fsdptool", *arguments, "-o", str(folder / "run"), "--force"],
            ),
            "accelerate": (
                folder / "stepped",
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)),
                    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
                    *("--local-addr", "127.0.0.1", "rival.py", str(folder)),
                ],
            ),
        }
        for index, pair in enumerate(turns(chosen.pairs + 1, ("fsdptool", "accelerate"))):
            for rival in pair:
                taken = seconds_until(*programs[rival], folder)
                if index:
                    times[rival].append(taken)
    document = {
        **head(
            "seconds from the command to the first step's end, fsdptool over accelerate; below 1 is sooner",
            ranks=RANKS,
            pairs=chosen.pairs,
            config=CONFIG,
            sharded={"fsdptool": True, "accelerate": False},
        ),
        "median_seconds": {rival: statistics.median(values) for rival, values in times.items()},
        "ratio": bounds([a / b for a, b in zip(times["fsdptool"], times["accelerate"], strict=True)]),
    }
    write(document, chosen.output, "median_seconds", "ratio")


if __name__ == "__main__":
    main()
