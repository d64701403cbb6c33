"""The run that a torchtune file describes.

Source: torchtune 0.6.1 ``recipes/full_finetune_distributed.py``, ``recipes/lora_finetune_distributed.py``,
``recipes/dev/grpo_full_finetune_distributed.py`` (all completions in one pass, no accumulation),
``torchtune/training/_distributed.py:470`` (units), ``torchtune/modules/low_precision`` (nf4).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from fsdptool.config.dialects.launches import on_ranks, visible_devices
from fsdptool.config.dialects.run_reader import RunFile, RunReader, dtype_word, global_batch, state_bits
from fsdptool.config.dialects.torchtune.run_keys import KEYS, MODELS
from fsdptool.records.described_run import DescribedMesh, DescribedRun
from fsdptool.source.known_models import family_of_builder

_DISTRIBUTED = (
    "fsdp_cpu_offload", "fsdp_reshard_after_forward", "custom_sharded_layers", "tensor_parallel_dim",
    "data_parallel_shard_dim", "data_parallel_replicate_dim", "context_parallel_dim", "fsdp",
)  # fmt: skip


def describe(file: RunFile) -> DescribedRun | None:
    """Return the run of a file or of ``tune run``; None for what generates, evaluates or quantises."""
    if "optimizer" not in file.data and file.launch.program != "tune":
        return None
    read = RunReader(file, KEYS)
    model = "policy_model" if read.has("policy_model") else "model"
    builder = read.text(f"{model}._component_") or ""
    name = builder.rpartition(".")[2]
    plain = re.sub(r"^(?:q?lora|dora)_", "", name)
    plain = re.sub(r"_(?:instruct|base)$", "", plain)
    family = MODELS.get(plain) or family_of_builder(plain)
    quantised = name.startswith("qlora_") or read.flag("model.quantize_base")
    adapter = quantised or name.startswith(("lora_", "dora_"))
    dtype = dtype_word(read.text("dtype"))
    loss = (read.text("loss._component_") or "").rpartition(".")[2]
    whole_dpo = not adapter and _objective(read, loss) == "dpo"
    distributed, processes, nodes = _recipe(read, file, whole_dpo=whole_dpo)
    ppo, grpo = model == "policy_model", read.has("grpo_samples")
    accumulation = 1 if grpo else read.whole("gradient_accumulation_steps")
    micro = _ppo_micro_batch(read, accumulation) if ppo else read.whole("batch_size")
    if grpo and micro is not None:
        micro *= read.whole("grpo_samples") or 1  # every completion of every prompt in one pass: grpo_step
    mesh = _mesh(read) if distributed else DescribedMesh()
    optimizer = read.text("optimizer._component_")
    recomputes = read.flag("enable_activation_checkpointing")
    selective = not recomputes and read.text("ac_mode") is not None
    selective = selective and read.raw("ac_option") is not None
    read.use("ac_option")
    _frozen(read, adapter)
    packed = read.flag("dataset.packed")
    layers = read.names("custom_sharded_layers")
    listed = (layers,) if isinstance(layers, str) else layers or ()
    length = read.whole("tokenizer.max_seq_len")
    if (ppo or grpo) and length is not None:
        length += read.whole("max_generated_tokens") or 0
    if length is None:
        read.notes.append("tokenizer.max_seq_len is empty: samples are not cut, so the length is in the data")
    steps = read.whole("max_steps_per_epoch")
    return read.describe(
        model=builder or None,
        family=family,
        method="qlora" if quantised else "lora" if adapter else "full",
        lora_rank=read.whole("model.lora_rank") if adapter else None,
        lora_dropout=read.number("model.lora_dropout") if adapter else None,
        lora_targets=_targets(read) if adapter else None,
        base_dtype=dtype,
        quantisation="torchao nf4 (block 64, scalers int8 in blocks of 256)" if quantised else "none",
        stored_dtype=dtype,
        compute_dtype=dtype,
        reduce_dtype=dtype,
        objective=_objective(read, loss),
        sequence_length=length,
        packing=packed,
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=global_batch(micro, accumulation, processes, mesh),
        optimizer=optimizer,
        optimizer_state_bits=state_bits((optimizer or "").rpartition(".")[2], dtype),
        gradient_checkpointing="full" if recomputes else "selective" if selective else "none",
        activation_offloading=read.flag("enable_activation_offloading"),
        attention="flex_attention" if packed else "sdpa",
        fused_loss="chunked" if "Chunked" in loss or loss.startswith("Linear") else "none",
        compile=read.flag("compile"),
        processes=processes,
        nodes=nodes,
        fsdp=2 if distributed else "none",
        wrap_classes=("every module named *.layers.<i>", *listed) if distributed else None,
        reshard=read.flag("fsdp_reshard_after_forward") and not grpo if distributed else None,
        cpu_offload=distributed and read.flag("fsdp_cpu_offload"),
        mesh=mesh,
        steps=steps,
        epochs=read.number("epochs"),
    )


def _recipe(read: RunReader, file: RunFile, *, whole_dpo: bool) -> tuple[bool, int | None, int | None]:
    """Return whether a distributed recipe reads the file, and the ranks and the nodes, where that is said.

    DPO of a whole model has a distributed recipe only (``recipes/full_dpo_distributed.py``).
    """
    read.use("m")
    words = f"{file.launch.verb} {read.raw('m')} {file.hints}".replace("multi-device", "distributed")
    first = re.search(r"single[_ ]device|distributed", words)
    if any(read.has(key) for key in _DISTRIBUTED) or read.has("grpo_samples") or whole_dpo:
        distributed = True
    elif read.flag("optimizer_in_bwd") and "bitsandbytes" in str(read.raw("optimizer._component_")):
        distributed = False
    elif first is not None:
        distributed = first.group() == "distributed"
    else:
        distributed = False
        read.notes.append("the file does not say which recipe reads it: taken for one of a single device")
    launch = file.launch
    if launch.program == "tune":
        launch = on_ranks(launch, file.data, "nproc_per_node", "nnodes")
        visible = visible_devices(file.environment)
        if file.data.get("nproc_per_node") in ("gpu", "auto") and launch.nodes and visible:
            launch = replace(launch, processes=visible * launch.nodes)
    read.use("nproc_per_node", "nnodes")
    return (True, launch.processes, launch.nodes) if distributed else (False, 1, None)


_PARTS = ("model.decoder_trainable", "model.encoder_trainable", "model.fusion_trainable")


def _frozen(read: RunReader, adapter: bool) -> None:
    """Tell the parts of a multimodal model that are not trained as the others are.

    Builders of whole models take truths, those of adapters ``full``, ``lora`` and ``frozen``
    (``torchtune/models/llama3_2_vision/_model_builders.py``).
    """
    for key in _PARTS:
        word = str(read.raw(key)).lower()
        if word in ("false", "frozen"):
            read.unmodelled(key, "less")
        elif word == "full" and adapter:
            read.problems.append(f"{key}: full stops torchtune beside adapters: it takes lora and frozen")
            read.use(key)
        else:
            read.inert(key)


def _ppo_micro_batch(read: RunReader, accumulation: int | None) -> int | None:
    """Return the sequences of one backward pass of PPO (``recipes/ppo_full_finetune_single_device.py``)."""
    read.use("batch_size")
    batch = read.whole("ppo_batch_size")
    return batch // accumulation if batch is not None and accumulation else batch


def _mesh(read: RunReader) -> DescribedMesh:
    shard, replicate = read.whole("data_parallel_shard_dim"), read.whole("data_parallel_replicate_dim")
    return DescribedMesh(
        dp_replicate=replicate or 1,
        dp_shard=shard or -1,
        cp=read.whole("context_parallel_dim") or 1,
        tp=read.whole("tensor_parallel_dim") or 1,
    )


def _targets(read: RunReader) -> tuple[str, ...]:
    named: Any = read.value("model.lora_attn_modules") or ()
    layers = [*map(str, named)] if isinstance(named, list | tuple) else [str(named)]
    if read.flag("model.apply_lora_to_mlp"):
        layers += ["w1", "w2", "w3"]
    if read.flag("model.apply_lora_to_output"):
        layers.append("output")
    return tuple(layers)


def _objective(read: RunReader, loss: str) -> str:
    if read.has("teacher_model"):
        return "distillation"
    if read.has("policy_model"):
        return "ppo"
    if read.has("grpo_samples"):
        return "grpo"
    if "DPO" in loss or "Rso" in loss or "SimPO" in loss:
        return "dpo"
    component = str(read.raw("dataset._component_") or "")
    return "pretrain" if "text_completion" in component else "sft"
