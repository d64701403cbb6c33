"""The run that a TOML file of torchtitan describes.

Source: torchtitan 0.2.2 ``config/job_config.py``, ``train.py:212`` (accumulation),
``distributed/parallel_dims.py``, ``models/llama3/infra/parallelize.py:287`` (units),
``components/loss.py:23``; files before 0.1 say ``batch_size``.
"""

from __future__ import annotations

import re
from typing import Any

from fsdptool.config.dialects.run_reader import RunFile, RunReader, dtype_word, state_bits
from fsdptool.config.dialects.torchtitan.run_keys import FAMILIES, FLEX, KEYS
from fsdptool.records.described_run import DescribedMesh, DescribedRun

_UNITS = ("token embedding", "TransformerBlock", "norm + output (one unit)", "root")
_FLUX = (
    "img_in, time_in, vector_in, txt_in (each)",
    "DoubleStreamBlock",
    "SingleStreamBlock",
    "final_layer",
    "root",
)


def describe(file: RunFile) -> DescribedRun:
    """Return the run of a file or of a command line with ``--job.config_file``."""
    read = RunReader(file, KEYS)
    if "float8" not in str(read.raw("model.converters") or ""):
        read.inert("quantize.linear.float8.enable_fsdp_float8_all_gather")
    name, flavour = read.text("model.name") or "", read.text("model.flavor") or ""
    hub = read.text("hf_transformers.model")
    size = flavour.lower().replace("_flex", "").replace("_varlen", "").replace("_irope", "")
    family = None if hub else FAMILIES.get((name, size))
    # Forks train further models beside text encoders, as Flux is trained.
    diffusion = name == "flux" or (family is None and hub is None and read.has("encoder.t5_encoder"))
    mesh = _mesh(read)
    sharded = mesh.dp_shard != 1 or (mesh.cp or 1) > 1
    micro, accumulation, total, ranks = _batch(read, mesh)
    stored = dtype_word(read.text("training.dtype"))
    optimizer = (read.text("optimizer.name") or "").lower()
    mode = (read.text("activation_checkpoint.mode") or "").lower()
    if mode == "selective":
        option = read.text("activation_checkpoint.selective_ac_option")
        read.notes.append(
            "every operator decides what is recomputed"
            if option == "op"
            else f"every {option}. block is recomputed"
        )
    else:
        read.use("activation_checkpoint.selective_ac_option")
    image = read.whole("training.img_size")
    return read.describe(
        model=hub or f"{name} {flavour}".strip() or None,
        family=family,
        method="full",
        quantisation="none",
        stored_dtype=stored,
        compute_dtype=dtype_word(read.text("training.mixed_precision_param")),
        reduce_dtype=dtype_word(read.text("training.mixed_precision_reduce")),
        objective="diffusion" if diffusion else "grpo" if "grpo" in read.data else "pretrain",
        sequence_length=None if diffusion else read.whole("training.seq_len"),
        height=image,
        width=image,
        packing=None if diffusion else True,
        documents_joined=None if diffusion else True,
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=total,
        optimizer=optimizer,
        optimizer_state_bits=state_bits(optimizer, stored),
        gradient_checkpointing=_checkpointing(mode, diffusion),
        attention=_attention(name, flavour, family, hub),
        fused_loss="none",
        compile=_compiles(read, "model"),
        compiled_loss=_compiles(read, "loss"),
        processes=file.launch.processes or ranks,
        fsdp=2 if sharded else "none",
        wrap_classes=_units(name, diffusion) if sharded else None,
        reshard=_reshard(read, mesh) if sharded else None,
        cpu_offload=read.flag("training.enable_cpu_offload"),
        mesh=mesh,
        steps=read.whole("training.steps"),
    )


def _units(name: str, diffusion: bool) -> tuple[str, ...] | None:
    """Return the units of FSDP; None for a fork's model."""
    if not diffusion:
        return _UNITS
    return _FLUX if name == "flux" else None


def _mesh(read: RunReader) -> DescribedMesh:
    def size(*keys: str) -> int:
        return read.whole(*keys) or 1

    return DescribedMesh(
        dp_replicate=size(
            "parallelism.data_parallel_replicate_degree", "training.data_parallel_replicate_degree"
        ),
        dp_shard=size(
            "parallelism.data_parallel_shard_degree",
            "training.data_parallel_shard_degree",
            "training.data_parallel_degree",
        ),
        cp=size("parallelism.context_parallel_degree", "experimental.context_parallel_degree"),
        tp=size("parallelism.tensor_parallel_degree", "training.tensor_parallel_degree"),
        ep=size("parallelism.expert_parallel_degree"),
        pp=size("parallelism.pipeline_parallel_degree", "experimental.pipeline_parallel_degree"),
    )


def _batch(read: RunReader, mesh: DescribedMesh) -> tuple[int | None, int | None, int | None, int | None]:
    """Return the micro-batch, the accumulation, the global batch and the ranks, as far as they are known."""
    micro = read.whole("training.local_batch_size", "training.batch_size")
    wanted = read.whole("training.global_batch_size")
    data = (mesh.dp_replicate or 1) * (mesh.dp_shard or 1) if (mesh.dp_shard or 1) > 0 else None
    others = (mesh.cp or 1) * (mesh.tp or 1) * (mesh.pp or 1)
    launched = read.file.launch.processes
    if data is None and launched is not None:
        data = max(1, launched // others)
    ranks = data * others if data is not None and (mesh.dp_shard or 1) > 1 else None
    if wanted is not None and wanted > 0:
        known = bool(micro) and data is not None
        if known and micro and data is not None and wanted % (micro * data):
            read.problems.append(
                f"global_batch_size {wanted} is not a multiple of {micro} x {data} data-parallel ranks"
            )
        accumulation = wanted // (micro * data) if known and micro and data else None
        return micro, accumulation, wanted, ranks
    steps = read.whole("training.gradient_accumulation_steps") or 1  # a key of forks
    total = micro * steps * data if micro is not None and data is not None else None
    return micro, steps, total, ranks


def _checkpointing(mode: str, diffusion: bool) -> str | None:
    if mode in ("full", "none"):
        return mode
    if mode == "memory_budget":
        return "selective"
    # Flux checkpoints whole blocks in every mode but none.
    return "full" if diffusion else "selective"


def _attention(name: str, flavour: str, family: str | None, hub: str | None) -> str | None:
    if name in FLEX or "_flex" in flavour or "_irope" in flavour:
        return "flex"
    return "varlen" if "_varlen" in flavour else "sdpa" if family or hub or name == "llama3" else None


def _compiles(read: RunReader, part: str) -> bool:
    """Whether the model, or the loss, is compiled (0.2.2 ``components/loss.py``)."""
    listed: Any = read.value("compile.components")
    components = listed if isinstance(listed, list) else ["model", "loss"]
    old = read.flag("training.compile")
    return old or (read.flag("compile.enable") and part in components)


def _reshard(read: RunReader, mesh: DescribedMesh) -> bool:
    policy = (read.text("parallelism.fsdp_reshard_after_forward") or "default").lower()
    return (mesh.pp or 1) == 1 if policy == "default" else re.match("always", policy) is not None
