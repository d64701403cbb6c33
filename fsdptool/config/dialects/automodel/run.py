"""The run that a NeMo AutoModel file describes, of its recipes for language and for diffusion.

Source: NeMo AutoModel 36044ad3 ``recipes/_dist_utils.py``, ``recipes/diffusion/train.py``,
``components/training/step_scheduler.py:119``, ``components/_peft/lora.py:85``, ``components/loss``,
``components/distributed/parallelizer.py:1192-1280`` (units, resharding).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdptool.config.dialects.automodel.run_keys import KEYS
from fsdptool.config.dialects.run_reader import RunFile, RunReader, dtype_word, global_batch, state_bits
from fsdptool.records.described_run import DescribedMesh, DescribedRun, Masters
from fsdptool.source.known_models import family_of_name, layer_classes_of

_MOE = ("embedding", "each block", "routed experts (own unit, only if ranks > ep)", "lm_head", "root")
_HEADS = re.compile(r"(?:^|[.*])(?:lm_head|embed_out|output|router|gate)\*?$")
"""Modules that ``all-linear`` leaves out as well, or that are not Linear layers."""
_DENSE = ("every layer of every ModuleList", "root")


def describe(file: RunFile) -> DescribedRun:
    """Return the run of a file."""
    read = RunReader(file, KEYS)
    if isinstance(file.data.get("recipe_args"), Mapping) and "model" not in file.data:
        return _describe_draft(read)
    diffusion = any(name in file.data for name in ("flow_matching", "ddp", "fsdp")) and not read.has(
        "dataset"
    )
    place = ("ddp" if "ddp" in file.data else "fsdp") if diffusion else "distributed"
    model = read.text("model.pretrained_model_name_or_path", "model.config.pretrained_model_name_or_path")
    if model is None and isinstance(read.raw("model.config"), str):
        model = read.text("model.config")
    stored = dtype_word(read.text("model.torch_dtype", "model.dtype")) or "bf16"
    adapter = isinstance(read.raw("peft"), dict)
    four = read.flag("quantization.load_in_4bit")
    mesh, processes = _mesh(read, place)
    for part in ("model.backend.linear", "model.backend.rms_norm"):
        if str(read.raw(part)).startswith("torch"):
            read.inert(part)  # what is planned
    strategy = read.text(f"{place}.strategy")
    sharded = place != "ddp" and strategy not in ("ddp", "megatron_fsdp")
    if strategy == "megatron_fsdp":
        read.notes.append("megatron_fsdp shards in a way of its own: FSDP2 is planned in its place")
    micro, total, accumulation = _batch(read, mesh, processes)
    optimizer, bits = _optimizer(read, stored)
    if optimizer is None and diffusion and isinstance(read.raw("optim"), dict):
        read.use("optim.learning_rate", "optim.optimizer")
        optimizer, bits = "adamw", state_bits("adamw", stored)
        read.notes.append(
            f"optim is the form of older versions: {KEYS.version} stops at it and reads optimizer"
        )
    if str(read.raw("loss_fn.fp32_upcast")).lower() == "false":
        read.unmodelled("loss_fn.fp32_upcast", "less")
    compute = dtype_word(read.text("model.compute_dtype")) or "bf16" if diffusion else "bf16"
    length = None if diffusion else _length(read)
    packed = _packed(read) > 0
    return read.describe(
        model=model,
        method="qlora" if adapter and four else "lora" if adapter else "full",
        lora_rank=read.whole("peft.dim") if adapter else None,
        lora_dropout=read.number("peft.dropout") if adapter else None,
        lora_targets=_targets(read) if adapter else None,
        base_dtype=stored if adapter else None,
        quantisation="nf4" if four else "int8" if read.flag("quantization.load_in_8bit") else "none",
        stored_dtype=stored,
        compute_dtype=compute,
        reduce_dtype=dtype_word(read.text(f"{place}.reduce_dtype")) or "fp32" if sharded else None,
        objective=_objective(read, diffusion),
        sequence_length=length,
        packing=None if diffusion else packed,
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=total,
        optimizer=optimizer,
        optimizer_state_bits=bits,
        optimizer_masters=_masters(read, stored),
        gradient_checkpointing=_checkpointing(read, place),
        attention=_attention(read, diffusion),
        fused_loss="cce" if "FusedLinear" in (read.text("loss_fn._target_") or "") else "none",
        compile=read.flag("compile.enabled") or read.flag(f"{place}.enable_compile"),
        processes=processes,
        fsdp=2 if sharded else None if strategy == "megatron_fsdp" else "none",
        wrap_classes=_units(model, mesh, diffusion) if sharded else (),
        reshard=_reshard(read, mesh) if sharded else None,
        cpu_offload=read.flag(f"{place}.cpu_offload") or read.has(f"{place}.offload_policy"),
        mesh=mesh,
        steps=read.whole("step_scheduler.max_steps"),
        epochs=read.number("step_scheduler.num_epochs"),
    )


def _describe_draft(read: RunReader) -> DescribedRun:
    """Return the run of a recipe that trains a draft of a frozen target for speculative decoding.

    Source: NeMo AutoModel 0.7.0 ``recipes/llm/train_eagle3.py:526-790`` (bf16 draft under DDP, AdamW).
    """
    recipe = read.text("recipe") or ""
    read.keys = replace(KEYS, memory={**KEYS.memory, "recipe": None})
    read.used.pop("recipe", None)
    read.notes.append(f"{recipe} trains a draft beside its frozen target: that network is not planned")
    processes = read.file.launch.processes or read.whole("nproc_per_node")
    micro = read.whole("recipe_args.micro_batch_size")
    accumulation = read.whole("recipe_args.grad_accumulation_steps") or 1
    mesh = DescribedMesh(dp_replicate=-1, dp_shard=1)
    checkpoints = read.flag("recipe_args.draft_gradient_checkpointing")
    attention = read.text("recipe_args.draft_attn_implementation") or "eager"
    optimizer, bits = _optimizer(read, "bf16")
    return read.describe(
        model=read.text("recipe_args.target_model_name_or_path"),
        method="full",
        quantisation="none",
        base_dtype="bf16",
        stored_dtype="bf16",
        compute_dtype="bf16",
        objective="distillation",
        sequence_length=read.whole("recipe_args.seq_length"),
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=global_batch(micro, accumulation, processes, mesh),
        optimizer=optimizer or "adamw",
        optimizer_state_bits=bits or state_bits("adamw", "bf16"),
        optimizer_masters=_masters(read, "bf16"),
        gradient_checkpointing="full" if checkpoints else "none",
        attention=attention,
        fused_loss="none",
        compile=False,
        processes=processes,
        fsdp="none",
        mesh=mesh,
        epochs=read.number("recipe_args.num_epochs"),
    )


def _checkpointing(read: RunReader, place: str) -> str:
    """Return what is recomputed; older files say it elsewhere (``parallelizer``, ``distributed_config``)."""
    keys = (
        f"{place}.activation_checkpointing",
        "parallelizer.activation_checkpointing",
        "distributed_config.activation_checkpointing",
        "model.do_gradient_checkpointing",
    )
    for key in keys:
        if str(read.raw(key)).lower() in ("selective", "full"):
            return str(read.value(key)).lower()
    return "full" if read.flag(*keys) else "none"


def _size(read: RunReader, key: str) -> int | None:
    """Return a size of the mesh; the text ``none`` is what follows from the others."""
    value = read.value(key)
    return None if value is None or str(value).lower() == "none" else read.whole(key)


def _mesh(read: RunReader, place: str) -> tuple[DescribedMesh, int | None]:
    """Return the mesh and the number of ranks, where the file says both sizes of the data-parallel part."""
    read.use(f"{place}.strategy", f"{place}.sequence_parallel", f"{place}.pipeline.pp_schedule")
    tp, cp, pp, ep = (_size(read, f"{place}.{name}_size") or 1 for name in ("tp", "cp", "pp", "ep"))
    launched = read.file.launch.processes
    if launched is None and read.file.launch.program == "automodel":
        launched = read.whole("nproc_per_node")
    if place == "ddp":
        return DescribedMesh(dp_replicate=-1, dp_shard=1), launched
    replicas = _size(read, f"{place}.dp_replicate_size") or 1
    data = _size(read, f"{place}.dp_size")
    mesh = DescribedMesh(replicas, data // replicas if data else -1, cp, tp, ep, pp)
    return mesh, data * tp * cp * pp if data else launched


def _batch(
    read: RunReader, mesh: DescribedMesh, processes: int | None
) -> tuple[int | None, int | None, int | None]:
    """Return the micro-batch, the global batch and the accumulation that follows (step_scheduler.py:119)."""
    micro = read.whole("step_scheduler.local_batch_size")
    total = read.whole("step_scheduler.global_batch_size")
    if not micro or total is None or processes is None:
        return micro, total, None
    data = max(1, processes // ((mesh.tp or 1) * (mesh.cp or 1) * (mesh.pp or 1)))
    if total % (micro * data):
        read.problems.append(
            f"global_batch_size {total} is not divisible by {micro} x {data}: AutoModel stops"
        )
        return micro, total, None
    return micro, total, total // (micro * data)


def _optimizer(read: RunReader, stored: str) -> tuple[str | None, int | None]:
    target = read.text("optimizer._target_") or ""
    name = target.rpartition(".")[2]
    if target.startswith("transformer_engine"):
        masters = read.flag("optimizer.master_weights")
        read.flag("optimizer.store_param_remainders")
        read.use("optimizer.exp_avg_dtype", "optimizer.exp_avg_sq_dtype", "optimizer.master_weight_dtype")
        states = dtype_word(read.text("optimizer.exp_avg_dtype")) or "fp32"
        return f"transformer_engine {name}{' with master weights' if masters else ''}", state_bits(
            "fused", states
        )
    if target.startswith("flashoptim"):  # flashoptim 0.1: states of 8 bits unless quantize is false
        whole = read.has("optimizer.quantize") and not read.flag("optimizer.quantize")
        return name.lower(), state_bits("adam", stored) if whole else 8
    plain = name.lower() or None
    return plain, state_bits(target.lower() if "bitsandbytes" in target else plain, stored)


def _masters(read: RunReader, stored: str) -> Masters | None:
    """Return what Transformer Engine's FusedAdam adds to weights of 16 bits.

    Remainders are those of bf16 weights, beside fp32 masters (Transformer Engine 2.8,
    ``pytorch/optimizers/fused_adam.py``: ``store_param_remainders``).
    """
    if not (read.text("optimizer._target_") or "").startswith("transformer_engine") or stored == "fp32":
        return None
    if not read.flag("optimizer.master_weights"):
        return "none"
    wide = (dtype_word(read.text("optimizer.master_weight_dtype")) or "fp32") == "fp32"
    low = wide and stored == "bf16" and read.flag("optimizer.store_param_remainders")
    return "remainders" if low else "whole"


def _targets(read: RunReader) -> tuple[str, ...] | str | None:
    if read.flag("peft.match_all_linear"):
        return "all-linear"
    named = read.names("peft.target_modules")
    if named:
        return (named,) if isinstance(named, str) else named
    # components/_peft/module_matcher.py:111 and :159 (0.7.0): every Linear that is not excluded.
    left = read.names("peft.exclude_modules")
    if not left:
        return (str(read.default("peft.target_modules", "*_proj", "components/_peft/module_matcher.py:111")),)
    if not all(_HEADS.search(name) for name in ((left,) if isinstance(left, str) else left)):
        read.unmodelled("peft.exclude_modules", "less")
    return "all-linear"


def _objective(read: RunReader, diffusion: bool) -> str:
    older = isinstance(read.raw("recipe"), dict)
    recipe = read.text("recipe._target_" if older else "recipe") or ""
    if diffusion:
        return "diffusion"
    if "KnowledgeDistillation" in recipe or read.has("teacher_model"):
        return "distillation"
    target = read.text("model._target_") or ""
    if "SequenceClassification" in recipe or "SeqCls" in recipe or "CrossEncoder" in f"{recipe} {target}":
        return "classification"
    if "Biencoder" in target or "BiEncoder" in recipe:
        return "contrastive"
    from_config = target.endswith("from_config")
    return "pretrain" if from_config and not read.flag("model.load_base_model") else "sft"


def _packed(read: RunReader) -> int:
    """Return the tokens of a packed row, 0 without packing; images are packed by a key of their own (0.7.0,
    ``recipes/_typed_config.py:401-453``), which older files have below the data set."""
    plain = read.whole("packed_sequence.packed_sequence_size") or 0
    below = "dataset.packing" if read.flag("dataset.packing.enabled") else "packed_sequence"
    return plain or read.whole(f"{below}.pack_size") or 0


def _length(read: RunReader) -> int | None:
    packed = _packed(read)
    if packed:
        return packed
    length = read.whole(
        *("dataset.seq_length", "dataset.seq_len", "dataset.max_length"),
        *("dataloader.collate_fn.p_max_len", "dataloader.collate_fn.rerank_max_length"),
    )
    if length is None:
        read.notes.append("no length is given: samples are padded to the longest of their micro-batch")
    return length


def _attention(read: RunReader, diffusion: bool) -> str | None:
    named: Any = read.text("model.attn_implementation") or read.text("model.backend.attn")
    if named is not None:
        return str(named)
    if diffusion:
        backend = read.text("model.attention_backend")
        return f"{backend} (diffusers backend)" if backend else None
    source = "_transformers/kernel_patches.py:71"
    return str(read.default("model.attn_implementation", "flash_attention_2 if installed, else sdpa", source))


def _units(model: str | None, mesh: DescribedMesh, diffusion: bool) -> tuple[str, ...]:
    if diffusion:
        return (*layer_classes_of(family_of_name(model or "")[0]), "root")
    return _MOE if (mesh.ep or 1) > 1 else _DENSE


def _reshard(read: RunReader, mesh: DescribedMesh) -> bool:
    """Every layer but the last is resharded; with experts divided, none unless the file says so."""
    keys = "distributed.reshard_after_forward", "distributed.moe.reshard_after_forward"
    if any(map(read.has, keys)):
        return read.flag(*keys)
    if (mesh.ep or 1) > 1:
        return bool(read.default("distributed.moe.reshard_after_forward", False, "distributed/config.py:178"))
    return (mesh.pp or 1) == 1
