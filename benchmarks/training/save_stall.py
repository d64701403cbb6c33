"""Measure how long a checkpoint pauses training: asynchronous saves relative to synchronous ones.

Two gloo ranks train one model and save it in both ways in turn (A B B A ...), each time followed by the same
number of steps. ``stall`` is the time until training continues; ``window`` is the time of save and steps
together, which includes what the writing thread takes from concurrent steps. Figures are medians of paired
ratios, with bootstrap bounds.

    python benchmarks/training/save_stall.py --pairs 20
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from paired import bounds, head, llama, parser

RANKS, LENGTH, STEPS_AFTER = 2, 64, 3
CONFIG = llama(384, 4, 4096)


class Quiet:
    """An event log that discards events."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Discard an event."""

    def rewind(self, step: int) -> None:
        """Nothing was logged."""


class Position:
    """A data position for the checkpoint."""

    epoch = 0.0
    samples = 0

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: batches are made here."""
        return {}


def rank_main(rank: int, folder: str, pairs: int, out: str) -> None:
    """Save in both ways in turn on one rank; rank 0 writes the times."""
    from fsdptool.distributed.session import open_session
    from fsdptool.inspection import inspect
    from fsdptool.modeling.resolve import resolve_run
    from fsdptool.modeling.units import plan_units
    from fsdptool.records.recipe import Batch, Checkpoints, ModelChoice, Recipe
    from fsdptool.records.sharding import FsdpSettings
    from fsdptool.runs.folder import RunInputs
    from fsdptool.source import resolve
    from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
    from fsdptool.training.state import RunState
    from fsdptool.training.trainer import assemble

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS
    )
    spec = resolve(f"{folder}/model")
    settings = FsdpSettings(wrap_classes=("LlamaDecoderLayer",), use_cpu=True, mixed_precision="no")
    recipe = Recipe(
        model=ModelChoice(f"{folder}/model", weights="random"),
        batch=Batch(micro_batch=1, sequence_length=LENGTH),
        steps=1,
    )
    units = plan_units(inspect(spec), resolve_run(recipe, settings))
    result = assemble(RunInputs(Path(folder), recipe, settings, spec, units), open_session(settings))
    state = RunState(result.model, result.optimizer, Position(), 0, rank)  # type: ignore[arg-type]
    savers = {
        mode: RunCheckpointer(
            Path(folder, mode),
            Checkpoints(every_steps=1, keep_last=1, mode=mode),
            kind="sharded",
            events=Quiet(),  # type: ignore[arg-type]
        )
        for mode in ("async", "sync")
    }
    tokens = torch.randint(0, CONFIG["vocab_size"], (1, LENGTH))
    batch = {"input_ids": tokens, "labels": tokens.clone()}

    def steps() -> None:
        for _ in range(STEPS_AFTER):
            result.stepper.run([batch], rate=1e-4)
            state.step += 1

    steps()
    times: dict[str, list[dict[str, float]]] = {name: [] for name in savers}
    for index in range(pairs + 1):
        for mode in ("async", "sync") if index % 2 else ("sync", "async"):
            dist.barrier()
            began = time.perf_counter()
            savers[mode].save(state)
            dist.barrier()
            stalled = time.perf_counter()
            steps()
            dist.barrier()
            ended = time.perf_counter()
            savers[mode].close()
            dist.barrier()
            if index:  # the first round allocates the staging buffers
                times[mode].append({"stall": stalled - began, "window": ended - began})
    if rank == 0:
        total = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors().values())
        Path(out).write_text(json.dumps({"times": times, "bytes": total}))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Run and write the result."""
    options = parser(__doc__, "training_save_stall")
    options.add_argument("--pairs", type=int, default=20)
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG))
        out = f"{folder}/out.json"
        multiprocessing.spawn(rank_main, (folder, chosen.pairs, out), RANKS)
        result = json.loads(Path(out).read_text())
    times = result["times"]
    document = {
        **head(
            "checkpoint save on CPU, asynchronous over synchronous; below 1 is shorter",
            ranks=RANKS,
            pairs=chosen.pairs,
            steps_after=STEPS_AFTER,
            config=CONFIG,
        ),
        "checkpoint_bytes": result["bytes"],
        "median_seconds": {
            mode: {key: statistics.median(item[key] for item in items) for key in ("stall", "window")}
            for mode, items in times.items()
        },
        "ratios": {
            key: bounds([a[key] / b[key] for a, b in zip(times["async"], times["sync"], strict=True)])
            for key in ("stall", "window")
        },
    }
    chosen.output.write_text(json.dumps(document, indent=2) + "\n")
    sys.stdout.write(
        json.dumps({key: document[key] for key in ("median_seconds", "ratios")}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
