"""The run that a file of minitrain describes, and the file that describes a run.

A real program's table names the file and the line of the source behind each default.
"""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import Learned, RunFile, RunKeys, RunReader, names, sides, state_bits
from fsdptool.config.dialects.run_writer import RunWriter
from fsdptool.errors import ConfigError
from fsdptool.records.described_run import DescribedMesh, DescribedRun

_SOURCE = "minitrain/settings.py"
_PRECISIONS = ("fp32", "bf16", "fp16", "fp8")

KEYS = RunKeys(
    program="minitrain",
    version="1.0",
    defaults={
        "precision": ("fp32", f"{_SOURCE}:8"),
        "data.rows": (1, f"{_SOURCE}:11"),
        "data.length": (1024, f"{_SOURCE}:12"),
        "optimizer": ("adamw", f"{_SOURCE}:15"),
        "sharding.free_after_forward": (True, f"{_SOURCE}:20"),
    },
    no_effect=names("minitrain log_every data.path"),
    memory=sides(more="keep_average", less="optimizer_in_backward"),
    time=names("data.workers"),
    learning={"learning_rate": Learned("learning_rate", 1e-4), "dataset": Learned("data.path")},
)


def describe(file: RunFile) -> DescribedRun:
    """Return the run: every rank takes ``data.rows`` rows, and there is no accumulation."""
    read = RunReader(file, KEYS)
    sharded = "sharding" in file.data
    rows, gpus = read.whole("data.rows"), read.whole("gpus")
    precision, engine = read.text("precision"), read.text("sharding.engine")
    if precision not in _PRECISIONS:
        read.problems.append(f"precision must be one of {', '.join(_PRECISIONS)}, not {precision}")
        precision = None
    if engine not in (None, "fsdp1", "fsdp2"):
        read.problems.append(f"engine must be fsdp1 or fsdp2, not {engine}")
    optimizer = read.text("optimizer")
    blocks = read.names("sharding.blocks")
    return read.describe(
        model=read.text("model"),
        method="full",
        quantisation="none",
        stored_dtype="fp32",
        compute_dtype=precision,
        objective="sft",
        sequence_length=read.whole("data.length"),
        packing=read.flag("data.packed"),
        micro_batch=rows,
        accumulation=1,
        global_batch=rows * gpus if rows is not None and gpus is not None else None,
        optimizer=optimizer,
        optimizer_state_bits=state_bits(optimizer, "fp32"),
        gradient_checkpointing="full" if read.flag("sharding.recompute") else "none",
        attention="sdpa",
        fused_loss="none",
        compile=False,
        processes=gpus,
        fsdp=(1 if engine == "fsdp1" else 2) if sharded else "none",
        wrap_classes=(blocks,) if isinstance(blocks, str) else blocks,
        reshard=read.flag("sharding.free_after_forward") if sharded else None,
        cpu_offload=read.flag("sharding.offload"),
        mesh=DescribedMesh(dp_replicate=1, dp_shard=-1),
        steps=read.whole("steps"),
    )


def write(to: RunWriter) -> None:
    """Set the keys of a file.

    Raises:
        ConfigError: minitrain has no counterpart of the run.
    """
    run = to.run
    to.need_objective("sft", "pretrain")
    if run.method not in (None, "full"):
        raise ConfigError(f"minitrain has no counterpart of the method {run.method}: it trains all weights")
    to.put("minitrain", 1)
    to.put("gpus", run.processes)
    to.put("model", to.model())
    to.put("precision", to.choice("compute_dtype", {name: name for name in _PRECISIONS}))
    to.put("data.rows", run.micro_batch)
    to.put("data.length", run.sequence_length)
    to.put("data.packed", run.packing)
    to.put("optimizer", to.optimizer({"adamw": "adamw"}))
    to.put("steps", run.steps)
    if run.fsdp != "none":
        settings = to.settings()
        to.put("sharding.engine", "fsdp2")
        to.put("sharding.free_after_forward", settings.reshard_after_forward)
        to.put("sharding.offload", settings.cpu_offload)
        to.put("sharding.recompute", run.gradient_checkpointing not in (None, "none"))
        to.put("sharding.blocks", settings.wrap_classes or None)
    to.put_learning(KEYS.learning)
    to.lose("minitrain updates the weights after every micro-batch", "accumulation", "global_batch")
    to.lose("minitrain has one mesh: a shard on every rank", "mesh.dp_replicate", "mesh.dp_shard")
