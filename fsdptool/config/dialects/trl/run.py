"""The run that a TRL file or command line describes.

Sources: TRL 1.16.0 ``trainer/model_config.py``, ``trainer/base_config.py``, ``trainer/utils.py:261-277``
(quantisation), ``trainer/sft_trainer.py:1127``, ``trainer/dpo_trainer.py:939`` (losses in chunks); TRL
0.18.0.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from fsdptool.config.dialects.run_reader import (
    RunFile,
    RunReader,
    dtype_word,
    global_batch,
    may_shard,
    names,
    state_bits,
)
from fsdptool.config.dialects.trainer.run import arguments, computed_in, fsdp, mesh_of_accelerate
from fsdptool.config.dialects.trl.run_keys import KEYS, OLD, OLD_DEFAULTS, WITHOUT_DROPOUT
from fsdptool.config.programs import is_before
from fsdptool.records.described_run import DescribedRun
from fsdptool.scripts import SCRIPTS
from fsdptool.source.peft_targets import PEFT_TARGETS, USUAL, type_of
from fsdptool.spelling import integer

_OF_0_18 = ("torch_dtype", "max_seq_length", "max_prompt_length", "use_liger")
"""Keys of 0.18 that 1.16 refuses and that decide the run."""
_FLASH = ("use_flash_attention_2", "use_flash_attn")
"""Switches of alignment-handbook 0.1, and of scripts around TRL."""
_SHIPPED = {
    "fsdp1": 8, "fsdp2": 8, "zero1": 8, "zero2": 8, "zero3": 8, "multi_gpu": 8, "single_gpu": 1,
}  # fmt: skip
"""Configurations that TRL ships, and their numbers of processes (``trl/accelerate_configs``)."""
_DTYPES = ("auto", "bfloat16", "float16", "float32")
"""Choices of ``dtype`` (``trainer/model_config.py:93``)."""
_DPO_LOSSES = names("""
    sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard aot aot_pair aot_unpaired apo_zero
    apo_down discopop
""")
_OBJECTIVES = (
    "sft",
    "dpo",
    "grpo",
    "kto",
    "reward",
    "rloo",
    "orpo",
    "cpo",
    "gkd",
    "nash_md",
    "online_dpo",
    "ppo",
    "prm",
    "bco",
    "xpo",
)
_PAIRS = ("kto", "orpo", "cpo", "simpo", "bco", "online_dpo", "nash_md", "xpo")
"""Trainers of preferences whose files hold the keys of DPO: only comments and names tell them."""


def describe(file: RunFile) -> DescribedRun:
    """Return the run of a file or a command line."""
    old = any(key in file.data for key in _OF_0_18)
    if file.version is not None:
        old = is_before(file.version, 0, 19)
    keys = replace(KEYS, version=OLD, defaults={**KEYS.defaults, **OLD_DEFAULTS}) if old else KEYS
    if file.launch.program == "python":  # how many processes the script is given is not said
        file = replace(file, launch=replace(file.launch, processes=None))
    read = RunReader(file, replace(keys, version=file.version or keys.version))
    objective = _objective(read)
    facts = arguments(read, sharding=fsdp(read, old=old))
    _accelerate(read, facts)
    if read.flag("fp16"):
        facts["compute_dtype"] = "fp16"
    named = read.value("dtype", "torch_dtype")
    base = dtype_word(named) or ("checkpoint" if str(named) == "auto" else "fp32")
    four, eight = read.flag("load_in_4bit"), read.flag("load_in_8bit")
    adapter = read.flag("use_peft") or four or eight
    own = not (file.path or "").endswith(SCRIPTS)  # a Python script names what torch takes (``torch.half``)
    if own and named is not None and str(named) not in _DTYPES and not str(named).startswith("$"):
        read.problems.append(f"TRL refuses the dtype {str(named)[:20]!r}: it takes {', '.join(_DTYPES)}")
    if (four or eight) and read.raw("use_peft") is not None and not read.flag("use_peft"):
        read.problems.append("quantised weights without use_peft: transformers refuses to train them")
    stored = base
    if adapter:
        # peft upcasts adapters to fp32; on a quantised base TRL casts them to bf16 (QLoRA).
        stored = "bf16" if four or eight else "fp32"
    mixed = facts["fsdp"] != "none" and facts["compute_dtype"] != "fp32"
    if mixed:
        stored = "fp32"
    reduce = facts["compute_dtype"] if mixed else stored
    facts["compute_dtype"] = computed_in(facts["compute_dtype"], base)
    optimizer = facts["optimizer"]
    packing = objective == "sft" and read.flag("packing")
    strategy = read.text("packing_strategy")
    read.use("lora_alpha")
    return read.describe(
        **{**facts, "fused_loss": _fused_loss(read, objective, old)},
        model=read.text("model_name_or_path", "model_name"),
        method="qlora" if four else "lora8bit" if eight else "lora" if adapter else "full",
        lora_rank=read.whole("lora_r") if adapter else None,
        lora_dropout=_dropout(read, objective) if adapter else None,
        lora_targets=_targets(read) if adapter else None,
        lora_modules_to_save=_saved(read),
        base_dtype=base,
        quantisation=_quantisation(read, base, old),
        stored_dtype=stored,
        reduce_dtype=reduce,
        objective=objective,
        sequence_length=_length(read, objective),
        packing=packing,
        documents_joined=packing and strategy == "wrapped",
        optimizer_state_bits=state_bits(optimizer, stored),
        activation_offloading=read.flag("activation_offloading"),
        attention=read.text("attn_implementation")
        or ("flash_attention_2" if any(read.flag(key) for key in _FLASH) else None)
        or read.default("attn_implementation", "sdpa", "transformers"),
    )


def _dropout(read: RunReader, objective: str) -> float | None:
    """Return the dropout of adapters, which trainers of pairs switch off unless they are told not to."""
    dropout = read.number("lora_dropout")
    named = read.has("disable_dropout")
    off = read.flag("disable_dropout") if named else objective in WITHOUT_DROPOUT
    return 0.0 if off else dropout


def _saved(read: RunReader) -> tuple[str, ...]:
    named = read.names("lora_modules_to_save")
    return (named,) if isinstance(named, str) else named or ()


def _targets(read: RunReader) -> tuple[str, ...] | str:
    named = read.names("lora_target_modules")
    if named is None:
        model = read.text("model_name_or_path", "model_name") or ""
        kind = type_of(model)
        if kind is not None and kind not in PEFT_TARGETS:
            read.problems.append(f"peft has no layers for models of type {kind}: name lora_target_modules")
        chosen = PEFT_TARGETS.get(kind or "", USUAL)
        told = chosen if isinstance(chosen, str) else ", ".join(chosen)
        read.default("lora_target_modules", told, "peft 0.21 utils/constants.py, by the model")
        return chosen
    return named


def _quantisation(read: RunReader, base: str, old: bool) -> str:
    if read.flag("load_in_8bit"):
        return "bnb int8"
    if not read.flag("load_in_4bit"):
        return "none"
    kind = read.text("bnb_4bit_quant_type") or "nf4"
    double = "double" if read.flag("use_bnb_nested_quant") else "no double"
    storage = read.text("bnb_4bit_quant_storage") or (base if old else "uint8")
    storage = dtype_word(storage) or storage
    return f"bnb {kind}, {double} quantisation, storage {storage}"


def _objective(read: RunReader) -> str:
    """Return the trainer: the command, else what only one trainer reads."""
    launch = read.file.launch
    script = launch.script.rpartition(".")[2]
    whole = next((word for word in _OBJECTIVES if "_" in word and word in script), "")
    for word in (launch.verb, script, whole, *script.split("_")):
        if word in _OBJECTIVES:
            return word
    if read.has("num_generations") or read.has("reward_funcs") or read.has("max_completion_length"):
        return "grpo"
    read.use("loss_type")
    if read.has("desirable_weight"):
        return "kto"
    if read.has("teacher_model_name_or_path"):
        return "gkd"
    if read.has("beta") or read.raw("loss_type") in _DPO_LOSSES:
        words = set(re.split(r"[^a-z_]+", read.file.hints.lower().replace("trainer", " ")))
        words |= {part for word in words for part in word.split("_")}
        return next((word for word in _PAIRS if word in words), "dpo")
    if read.has("center_rewards_coefficient"):
        return "reward"
    named = PurePath(read.file.path or "")
    told = [re.split(r"[^a-z]+", name.lower()) for name in (named.stem, named.parent.name)]
    return next((word for words in told for word in _OBJECTIVES if word in words), "sft")


def _length(read: RunReader, objective: str) -> int | None:
    if read.file.launch.script.endswith("sft_vlm") and not read.has("max_length"):
        read.notes.append("sft_vlm.py cuts nothing, so that images stay whole: give --seq-len")
        return None
    data = read.file.data
    if (
        objective not in ("grpo", "rloo")
        and data.get("max_length", 0) is None
        and not read.has("max_seq_length")
    ):
        read.use("max_length")
        read.notes.append("max_length is null, which cuts nothing: give --seq-len")
        return None
    if objective not in ("grpo", "rloo"):
        return read.whole("max_length", "max_seq_length")
    read.use("num_generations", "beta")
    prompt, completion = read.whole("max_prompt_length"), read.whole("max_completion_length")
    if prompt is None or completion is None:
        read.notes.append("the length of prompts is not in the file: give --seq-len (prompt and completion)")
        return None
    return prompt + completion


def _fused_loss(read: RunReader, objective: str, old: bool) -> str:
    read.use("beta", "loss_type")
    liger = read.flag("use_liger_kernel") or read.flag("use_liger")
    if not old and objective in ("sft", "dpo", "kto"):
        return "chunked"
    return "liger" if liger else "none"


def _accelerate(read: RunReader, facts: dict[str, Any]) -> None:
    """Add what ``accelerate_config`` names: a configuration that TRL ships, or a file."""
    named = read.text("accelerate_config")
    data = read.file.beside(named) if named is not None and named not in _SHIPPED else None
    data = data if isinstance(data, dict) else {}
    processes = read.whole("num_processes") or integer(data.get("num_processes")) or _SHIPPED.get(named or "")
    facts["mesh"] = mesh_of_accelerate(data.get("parallelism_config")) or facts["mesh"]
    machines = read.whole("num_machines") or integer(data.get("num_machines"))
    if machines is not None:
        facts["nodes"] = machines
    if processes is not None:
        facts["processes"] = processes
        facts["global_batch"] = global_batch(
            facts["micro_batch"], facts["accumulation"], processes, facts["mesh"]
        )
    if named is None or facts["fsdp"] != "none":
        return
    if named in ("fsdp1", "fsdp2"):
        facts |= {"fsdp": int(named[-1]), "reshard": True, "cpu_offload": False}
        return
    if named.startswith("zero"):
        read.notes.append(
            f"DeepSpeed ({named}) is out of scope: the FSDP2 equivalent is accelerate_config: fsdp2"
        )
        return
    if not data:
        if named not in _SHIPPED:
            read.unread_elsewhere(f"accelerate_config {named} is not read: what it sets is not known")
        if may_shard(named):
            facts |= {"fsdp": None, "cpu_offload": None}
        return
    block = data.get("fsdp_config") or {}
    if str(data.get("distributed_type")).upper() == "FSDP":
        wrapped = block.get("fsdp_transformer_layer_cls_to_wrap")
        facts |= {
            "fsdp": 2 if str(block.get("fsdp_version", 1)) == "2" else 1,
            "wrap_classes": tuple(name.strip() for name in str(wrapped).split(",")) if wrapped else None,
            "reshard": block.get("fsdp_reshard_after_forward", True) is not False,
            "cpu_offload": bool(block.get("fsdp_offload_params")),
        }
        if block.get("fsdp_activation_checkpointing"):
            facts["gradient_checkpointing"] = "full"
