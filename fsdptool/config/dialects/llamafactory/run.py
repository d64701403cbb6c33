"""The run that a LLaMA-Factory file describes, in either of its formats.

Sources: LLaMA-Factory 0.9.5 ``hparams/`` (keys), ``model/adapter.py:313`` (what is upcast),
``model/loader.py``, ``model/model_utils/quantization.py:166``, ``model/model_utils/liger_kernel.py:94``; v1
``core/model_engine.py``, ``core/utils/batching.py:93``, ``plugins/trainer_plugins/distributed/fsdp2.py:176``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdptool.config.dialects.llamafactory.run_keys import KEYS, V1
from fsdptool.config.dialects.run_reader import (
    RunFile,
    RunReader,
    global_batch,
    saved_modules,
    state_bits,
    told_frozen,
)
from fsdptool.config.dialects.trainer.run import arguments
from fsdptool.records.described_run import LIGER_KERNELS, DescribedMesh, DescribedRun

_OBJECTIVES = {"pt": "pretrain", "sft": "sft", "rm": "reward", "ppo": "ppo", "dpo": "dpo", "kto": "kto"}
_ATTENTION = {"auto": "sdpa", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3",
              "disabled": "eager"}  # fmt: skip
_OPTIMIZERS = {
    "use_galore": "galore_adamw", "use_apollo": "apollo_adamw", "use_badam": "badam",
    "use_adam_mini": "adam_mini", "use_muon": "muon",
}  # fmt: skip
"""Switches that replace ``optim`` (train/trainer_utils.py:create_custom_optimizer)."""


_MEGATRON = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}  # fmt: skip
"""Sizes of a mesh that only mcore_adapter takes (``USE_MCA=1``)."""


def describe(file: RunFile) -> DescribedRun:
    """Return the run of a file."""
    if "model_name_or_path" not in file.data and "model" in file.data:
        return _describe_v1(file)
    read = RunReader(file, KEYS)
    if _uses_ray(file):  # train/tuner.py: the workers of Ray's TorchTrainer
        read.file = replace(file, launch=replace(file.launch, processes=read.whole("ray_num_workers")))
    stage = read.text("stage") or "sft"
    kind = (read.text("finetuning_type") or "lora").lower()
    pure = read.flag("pure_bf16")
    facts = arguments(read)
    read.use(
        "gradient_checkpointing",
        "lora_alpha",
        "do_train",
    )
    parts = ("freeze_vision_tower", "freeze_multi_modal_projector")
    told_frozen(read, read.text("model_name_or_path"), parts, full=kind == "full")
    if pure or (read.flag("fp8") and facts["compute_dtype"] == "fp32"):
        # train/fp8_utils.py:134 and :225: accelerate's fp8, which computes the rest under bf16 autocast.
        facts["compute_dtype"] = "bf16"
    facts["gradient_checkpointing"] = "none" if read.flag("disable_gradient_checkpointing") else "full"
    # LLaMA-Factory's own switch, or that of TrainingArguments: Trainer patches the model by itself.
    liger = read.flag("enable_liger_kernel") or facts["fused_loss"] == "liger"
    facts["fused_loss"] = "liger" if liger and stage in ("pt", "sft") else "none"
    facts["fused_kernels"] = LIGER_KERNELS if liger else ()
    adapter = kind in ("lora", "oft")
    bits = read.whole("quantization_bit")
    # model/adapter.py:257 and :284 (0.9.5): peft casts adapters to fp32, whatever pure_bf16 says.
    stored = "checkpoint" if (pure or read.flag("use_badam")) and not adapter else "fp32"
    optimizer = facts["optimizer"]
    for switch, name in _OPTIMIZERS.items():
        if read.flag(switch):
            layerwise = read.flag(f"{switch.removeprefix('use_')}_layerwise")
            optimizer = f"{name}_layerwise" if layerwise else name
    facts["optimizer"] = optimizer
    sharded = facts["fsdp"] != "none"
    apart, packs = read.flag("neat_packing"), read.flag("packing")
    if not apart and not read.has("packing"):
        packs = read.default("packing", stage == "pt", "hparams/parser.py:520: on for stage pt")
    # hparams/data_args.py: neat_packing switches packing on, whatever packing says.
    packed = (apart or packs) and stage in ("pt", "sft")
    if any(read.has(key) for key in _MEGATRON.values()) or read.flag("use_mca"):
        facts |= _megatron(read, facts)
    losses = read.text("pref_loss") if stage == "dpo" else None
    if stage not in _OBJECTIVES:
        read.problems.append(f"LLaMA-Factory has no stage {stage}: it takes {', '.join(_OBJECTIVES)}")
    if not read.flag("do_train"):
        read.problems.append("do_train is not true: LLaMA-Factory would train nothing")
    return read.describe(
        **facts,
        model=read.text("model_name_or_path"),
        method="qlora" if adapter and bits == 4 else "lora8bit" if adapter and bits == 8 else kind,
        lora_rank=read.whole("lora_rank") if kind == "lora" else None,
        lora_dropout=read.number("lora_dropout") if kind == "lora" else None,
        lora_targets=_targets(read) if kind == "lora" else None,
        lora_modules_to_save=saved_modules(read, "additional_target") if kind == "lora" else (),
        base_dtype="checkpoint",
        quantisation=_quantisation(read, bits),
        stored_dtype=stored,
        reduce_dtype=facts["compute_dtype"] if sharded else stored,
        objective=losses if losses in ("orpo", "simpo") else _OBJECTIVES.get(stage, stage),
        sequence_length=read.whole("cutoff_len"),
        packing=packed,
        documents_joined=packed and not apart,
        optimizer_state_bits=None
        if (optimizer or "").startswith(("galore", "apollo"))
        else state_bits(optimizer, stored),
        attention=_ATTENTION.get(read.text("flash_attn") or "auto", "sdpa"),
    )


def _uses_ray(file: RunFile) -> bool:
    """Whether Ray starts the workers: ``USE_RAY`` says so; a file alone does not know the variable."""
    if not file.launch.program:
        return file.launch.processes is None and "ray_num_workers" in file.data
    return file.environment.get("USE_RAY", "0").lower() not in ("0", "n", "no", "false", "")


def _megatron(read: RunReader, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mesh of Megatron (mcore_adapter ``training_args.py``), whose sharding is out of scope."""
    mesh = DescribedMesh(**{name: read.whole(key) or 1 for name, key in _MEGATRON.items()})
    read.notes.append("Megatron is out of scope: the FSDP2 equivalent is fsdp with fsdp_config version 2")
    written = [key for key in _MEGATRON.values() if read.has(key)]
    read.unmodelled(written[0] if written else "use_mca", None)
    ranks = read.file.launch.processes
    return {
        "mesh": mesh,
        "global_batch": global_batch(facts["micro_batch"], facts["accumulation"], ranks, mesh),
    }


def _targets(read: RunReader) -> tuple[str, ...] | str | None:
    named = read.names("lora_target")
    return "all-linear" if named == "all" else (named,) if isinstance(named, str) else named


def _quantisation(read: RunReader, bits: int | None) -> str:
    if bits is None:
        return "none"
    method = str(read.raw("quantization_method") or "bnb").lower()
    if method in ("hqq", "eetq"):  # planned as bitsandbytes': the key stays among those that are not modelled
        return f"{method} int{bits}"
    if bits == 8:
        return "bnb int8"
    single = read.has("double_quantization") and not read.flag("double_quantization")
    double = "no double" if single else "double"
    if read.raw("quantization_method") in ("bnb", "BNB", "bitsandbytes"):
        read.use("quantization_method")
    return f"bnb nf{bits}, {double} quantisation, storage = compute dtype"


def _objective_v1(read: RunReader, verb: str) -> str:
    """Return the objective: v1 has a command for each, and loads another class for rewards."""
    if verb == "rm" or read.raw("model_class") == "cls":
        read.use("model_class")
        return "reward"
    return "dpo" if verb == "dpo" else "sft"


def _describe_v1(file: RunFile) -> DescribedRun:
    """Return the run of a file in the v1 format: full training stores fp32, and FSDP2 reduces in fp32."""
    read = RunReader(file, V1)
    dist = read.raw("dist_config")
    read.use("dist_config.name", "dist_config.reshard_after_forward", "dist_config.offload_params")
    dist = dist if isinstance(dist, Mapping) else {}
    fsdp = dist.get("name") in ("fsdp2", "fsdpturbo")
    if dist.get("name") == "fsdpturbo":  # FSDP2 with experts of its own sharding, after 0.9.5
        read.unmodelled("dist_config.ep_modules", None)
    if dist.get("name") == "deepspeed":
        read.notes.append("DeepSpeed is out of scope: the FSDP2 equivalent is dist_config with name fsdp2")
        read.unmodelled("dist_config.config_file", None)
    cp = read.whole("dist_config.cp_size", "cp_size") or 1
    read.use("dist_config.cp_mode", "cp_mode")
    mesh = DescribedMesh(cp=cp, ep=read.whole("dist_config.ep_size") or 1)
    micro = read.whole("micro_batch_size")
    wanted = read.whole("global_batch_size")
    processes = file.launch.processes
    accumulation: int | None = 1
    if wanted is not None and micro:
        accumulation = wanted // (micro * max(1, processes // cp)) if processes else None
    strategy = (read.text("batching_strategy") or "normal").lower()
    if strategy.startswith("dynamic"):
        read.notes.append("a micro-batch is filled up to micro_batch_size x cutoff_len tokens")
    peft = read.raw("peft_config")
    read.use("peft_config", "quant_config")
    kind = str(peft.get("name") or "full") if isinstance(peft, Mapping) else "full"
    adapter = kind == "lora"
    if kind == "freeze":
        read.unmodelled("peft_config", "less")
    quant = read.raw("quant_config")
    quantised = isinstance(quant, Mapping)
    eight = isinstance(quant, Mapping) and str(quant.get("quantization_bit")) == "8"
    compute = "bf16" if read.flag("bf16") else "fp32"
    targets = peft.get("target_modules") if isinstance(peft, Mapping) else None
    attention = read.text("flash_attn") or "sdpa"
    optimizer = read.raw("optim_config")
    named = optimizer.get("name") if isinstance(optimizer, Mapping) else None
    read.value("optim_config")
    steps = read.whole("max_steps")
    return read.describe(
        model=read.text("model"),
        method=("lora8bit" if eight else "qlora") if adapter and quantised else kind,
        lora_rank=peft.get("r") if adapter and isinstance(peft, Mapping) else None,
        lora_targets=tuple(targets)
        if isinstance(targets, list)
        else "all-linear"
        if targets == "all"
        else targets,
        base_dtype="checkpoint",
        quantisation=("bnb int8" if eight else "bnb nf4") if quantised else "none",
        stored_dtype="fp32",
        compute_dtype=compute,
        reduce_dtype="fp32",
        objective=_objective_v1(read, file.launch.verb),
        sequence_length=read.whole("cutoff_len"),
        packing="padding_free" in strategy,
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=wanted or global_batch(micro, accumulation, processes, mesh),
        optimizer=named or "adamw_torch",
        optimizer_state_bits=32,
        gradient_checkpointing="full" if read.flag("enable_activation_checkpointing") else "none",
        attention={"fa2": "flash_attention_2"}.get(attention, attention),
        fused_loss="none",
        compile=False,
        processes=processes,
        fsdp=2 if fsdp else "none",
        reshard=dist.get("reshard_after_forward", True) if fsdp else None,
        cpu_offload=bool(dist.get("offload_params", False)),
        mesh=mesh,
        steps=steps,
        epochs=read.number("num_train_epochs"),
    )
