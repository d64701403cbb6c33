"""Measure each rank's host memory while pretrained weights are loaded, relative to ``from_pretrained``.

Two gloo ranks load one model from a folder of sharded safetensors, each way in separate processes: the
trainer (meta build, ``fully_shard``, slices of the files into this rank's rows), and the usual way (every
rank calls transformers' ``from_pretrained``, then ``fully_shard``). Files are bf16, as most are published,
and the model is loaded in fp32, as it is trained. The figure is the peak of the process's anonymous memory
above its level before the load, read from ``/proc/self/status`` a thousand times a second. Pages of mapped
files are excluded, because the kernel can drop them. ``shard_bytes`` is the minimum that a rank must hold.

    python benchmarks/training/loading_host_memory.py --rounds 3
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from paired import bounds, head, llama, parser, turns, write

RANKS = 2
SHARD = "40MB"


def anonymous() -> int:
    """Return the bytes of anonymous memory of this process."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in text.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def peak_of(act: Callable[[], Any]) -> tuple[int, Any]:
    """Return the peak anonymous memory above the start while ``act`` runs, and its result."""
    before, highest, ended = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.001):
            highest[0] = max(highest[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = act()
    finally:
        ended.set()
        thread.join()
    return max(highest[0], anonymous()) - before, result


def ours(folder: Path) -> Callable[[], Any]:
    """Return a function that loads through the trainer, with everything before the weights done."""
    from fsdptool.distributed.session import open_session
    from fsdptool.inspection import inspect
    from fsdptool.modeling.resolve import resolve_run
    from fsdptool.modeling.units import plan_units
    from fsdptool.records.recipe import Batch, ModelChoice, Recipe
    from fsdptool.records.sharding import FsdpSettings
    from fsdptool.source import resolve
    from fsdptool.training.trainer import build_sharded

    spec = resolve(str(folder))
    settings = FsdpSettings(wrap_classes=("LlamaDecoderLayer",), use_cpu=True, mixed_precision="no")
    choice = ModelChoice(str(folder), weights="pretrained", dtype="float32")
    recipe = Recipe(model=choice, batch=Batch(micro_batch=1, sequence_length=16), steps=1)
    plan = plan_units(inspect(spec), resolve_run(recipe, settings))
    session = open_session(settings)
    return lambda: build_sharded(spec, choice, plan, settings, session, recipe=recipe, seed=0)[0]


def usual(folder: Path) -> Callable[[], Any]:
    """Return a function that loads through ``from_pretrained`` and shards afterwards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaForCausalLM

    mesh = init_device_mesh("cpu", (RANKS,))

    def load() -> Any:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    return load


def rank_main(rank: int, folder: str, rival: str) -> None:
    """Load once on one rank and write its peak."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), TQDM_DISABLE="1")
    store = dist.FileStore(f"{folder}/store-{rival}-{os.getppid()}", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = Path(folder, "model")
    load = ours(model) if rival == "fsdptool" else usual(model)
    dist.barrier()
    peak, result = peak_of(load)
    total = sum(p.to_local().numel() * p.element_size() for p in result.parameters())
    Path(folder, f"peak-{rank}.json").write_text(json.dumps({"peak": peak, "held": total}))
    dist.barrier()
    dist.destroy_process_group()


def measure(folder: str, rival: str) -> list[dict[str, int]]:
    """Load once on all ranks, in fresh processes."""
    Path(folder).joinpath(f"store-{rival}-{os.getpid()}").unlink(missing_ok=True)
    multiprocessing.spawn(rank_main, (folder, rival), RANKS)
    return [json.loads(Path(folder, f"peak-{rank}.json").read_text()) for rank in range(RANKS)]


def main() -> None:
    """Run and write the result."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options = parser(__doc__, "training_loading_memory")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--width", type=int, default=768, help="hidden size; 768 gives 327 MB in fp32")
    chosen = options.parse_args()
    config = llama(chosen.width, 8, 16384)
    results: dict[str, list[list[dict[str, int]]]] = {"fsdptool": [], "from_pretrained": []}
    with tempfile.TemporaryDirectory() as folder:
        plain = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**plain))
        total = sum(p.numel() * p.element_size() for p in model.parameters())
        model.bfloat16()
        model.save_pretrained(Path(folder, "model"), max_shard_size=SHARD)
        del model
        for pair in turns(chosen.rounds, ("fsdptool", "from_pretrained")):
            for rival in pair:
                results[rival].append(measure(folder, rival))
    peaks = {
        rival: [max(rank["peak"] for rank in one) for one in rounds] for rival, rounds in results.items()
    }
    document = {
        **head(
            "peak host memory of a rank while loading, fsdptool over from_pretrained; below 1 is less",
            ranks=RANKS,
            rounds=chosen.rounds,
            config=config,
            file_size=SHARD,
        ),
        "model_bytes": total,
        "shard_bytes": results["fsdptool"][0][0]["held"],
        "peak_bytes": {rival: statistics.median(values) for rival, values in peaks.items()},
        "ratio": bounds([a / b for a, b in zip(peaks["fsdptool"], peaks["from_pretrained"], strict=True)]),
    }
    write(document, chosen.output, "model_bytes", "shard_bytes", "peak_bytes", "ratio")


if __name__ == "__main__":
    main()
