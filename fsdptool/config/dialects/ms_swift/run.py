"""The run that an ms-swift file or command line describes.

Source: ms-swift 4.6.0 ``arguments/base_args/quant_args.py:45`` (what quantises),
``trainers/arguments.py:289`` (accumulation), ``arguments/sft_args.py`` (fsdp),
``arguments/rlhf_args.py:292`` (reference copy).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdptool.config.dialects.launches import counted, ranks_of, visible_devices
from fsdptool.config.dialects.ms_swift.run_keys import KEYS, SECOND, SHIPPED, THIRD
from fsdptool.config.dialects.run_reader import (
    RunFile,
    RunKeys,
    RunReader,
    dtype_word,
    global_batch,
    saved_modules,
    state_bits,
    told_frozen,
)
from fsdptool.config.dialects.trainer.run import arguments
from fsdptool.records.described_run import DescribedMesh, DescribedRun
from fsdptool.source.known_models import family_of_name

_ATTENTION = {
    "flash_attn": "flash_attention_2",
    "flash_attention_2": "flash_attention_2",
    "flash_attention_3": "flash_attention_3",
}
_TASKS = {
    "seq_cls": "classification", "embedding": "embedding", "reranker": "reranker",
    "generative_reranker": "reranker", "prm": "classification",
}  # fmt: skip
"""Values of ``task_type`` that train another head than that of the language model (base_args.py)."""
_ONLY_IN_2 = frozenset([
    "sft_type", "model_id_or_path", "batch_size", "lora_target_modules", "lora_dropout_p", "quantization_bit",
    "template_type", "train_dataset_sample", "custom_train_dataset_path", "deepspeed_config_path",
])  # fmt: skip
"""Names of version 2 that no later one has."""
_TARGET = 16
"""Samples of a step that the accumulation is chosen for (trainers/arguments.py:291)."""


def describe(file: RunFile) -> DescribedRun:
    """Return the run of a file or a command line."""
    file, wrapped = _unwrapped(file)
    keys = _keys_of(file.data)
    read = RunReader(file, replace(keys, version=file.version or keys.version))
    if wrapped:
        read.problems.append("the keys stand under args: a wrapper's format, which swift does not read")
    processes = _processes(read, file)
    read.file = replace(file, launch=replace(file.launch, processes=processes))
    objective = _objective(read, file)
    sharding = _sharding(read)
    facts = arguments(read)
    facts.pop("checkpoints", None)
    recomputes = facts["gradient_checkpointing"] != "none" and read.raw("gradient_checkpointing") not in (
        False,
        "false",
        "False",
    )
    facts["gradient_checkpointing"] = "full" if recomputes or sharding.get("checkpoints") else "none"
    facts["activation_offloading"] = bool(sharding.get("offloads"))
    facts |= {name: sharding[name] for name in ("fsdp", "reshard", "cpu_offload") if name in sharding}
    method = (read.text("tuner_type") or "lora").lower()
    base = dtype_word(read.text("torch_dtype")) or "checkpoint"
    compute = _compute(read, base)
    bits = read.whole("quant_bits") or None
    quantised = (read.text("quant_method") is not None or keys is SECOND) and bits is not None
    if bits is not None and not quantised:
        read.notes.append("quant_bits without quant_method quantises nothing")
    adapter = method != "full"
    stored = dtype_word(read.text("lora_dtype")) or "fp32" if adapter else base
    if facts["fsdp"] != "none":
        stored = "fp32"
    cp = read.whole("sequence_parallel_size") or 1
    mesh = DescribedMesh(cp=cp)
    facts["mesh"] = mesh
    facts["accumulation"] = _accumulation(read, facts["micro_batch"], processes, objective)
    facts["global_batch"] = global_batch(facts["micro_batch"], facts["accumulation"], processes, mesh)
    facts["compute_dtype"] = compute
    attention = read.text("attn_impl") or (
        "flash_attn" if read.flag("use_flash_attn") else None  # until 3.0
    )
    attention = attention or read.default("attn_impl", "sdpa", "transformers' default")
    read.use("vit_gradient_checkpointing", "packing_length")
    _refusals(read, objective, cp, attention)
    optimizer = facts["optimizer"]
    if read.raw("optimizer") == "muon":  # its own optimizers take the place of optim (optimizers/mapping.py)
        optimizer = facts["optimizer"] = read.text("optimizer")
    named = read.raw("model")  # with its variables, as another fact says that they are open
    model = read.text("model") or (named if isinstance(named, str) else None) or read.text("model_type")
    parts = ("freeze_vit", "freeze_aligner")
    told_frozen(read, model, parts, full=method == "full", default=keys is not SECOND)
    return read.describe(
        **facts,
        model=model,
        family=_family(read, model),
        method="qlora" if adapter and quantised and bits == 4 else method,
        lora_rank=read.whole("lora_rank") if adapter else None,
        lora_dropout=read.number("lora_dropout") if adapter else None,
        lora_targets=_targets(read) if adapter else None,
        lora_modules_to_save=saved_modules(read, "modules_to_save") if adapter else (),
        base_dtype=base,
        quantisation=_quantisation(read, bits) if quantised else "none",
        stored_dtype=stored,
        reduce_dtype=compute if facts["fsdp"] != "none" else stored,
        objective=objective,
        sequence_length=None if objective == "grpo" else _length(read),
        packing=read.flag("packing"),
        optimizer_state_bits=state_bits(optimizer, stored),
        attention=_ATTENTION.get(attention, attention),
    )


def _family(read: RunReader, model: object) -> str | None:
    """Return the size that ``model_type`` names (2.x: ``qwen2-audio-7b-instruct``), where the model's name
    says none."""
    kind = read.text("model_type")
    if kind is None or model == kind or family_of_name(str(model))[0] is not None:
        return None
    family, note = family_of_name(re.sub(r"(?<=\d)_(?=\d)", ".", kind))
    read.notes.extend([note] if note is not None else [])
    return family


def _unwrapped(file: RunFile) -> tuple[RunFile, bool]:
    """Return a file with the keys that a wrapper keeps under ``args``, and the variables it sets."""
    data = dict(file.data)
    section = data.get("ENV") or data.get("env")
    environment = dict(file.environment)
    if isinstance(section, Mapping):
        environment |= {str(key): str(value) for key, value in section.items()}
    inner = data.get("args")
    wrapped = isinstance(inner, Mapping) and "model" not in data
    if wrapped and isinstance(inner, Mapping):
        data = {str(key): value for key, value in inner.items()}
    return replace(file, data=data, environment=environment), wrapped


def _keys_of(data: Mapping[str, Any]) -> RunKeys:
    """Return the table of the version that a file is written for: 2.x has its own names, 3.x train_type."""
    if "tuner_type" in data or "train_type" in data:
        return KEYS if "tuner_type" in data else THIRD
    return SECOND if _ONLY_IN_2 & data.keys() else KEYS


def _processes(read: RunReader, file: RunFile) -> int | None:
    """Return the ranks: without NPROC_PER_NODE swift starts one, which divides layers over its GPUs."""
    launch, visible = file.launch, visible_devices(file.environment)
    given = {"NPROC_PER_NODE", "NNODES"} & file.environment.keys()
    found = launch.processes
    if found is None and given and launch.program in ("", "swift"):
        found, _ = ranks_of(file.environment, 1)
    if found is None and launch.program == "accelerate":
        found = visible
    if found is None and not given and (visible == 1 or (visible is not None and launch.program == "swift")):
        found = 1
    each = counted(file.environment.get("NPROC_PER_NODE", 1))
    if visible is not None and launch.program == "swift" and each is not None and visible // each > 1:
        read.notes.append(
            f"a process has several of the {visible} visible GPUs: the model's layers are divided among its "
            "GPUs (device_map auto), which is not planned"
        )
        read.unmodelled("CUDA_VISIBLE_DEVICES", "less")
    return found


def _objective(read: RunReader, file: RunFile) -> str:
    verb = file.launch.verb or file.launch.script.rpartition(".")[2]
    kind = read.text("rlhf_type")
    if kind is None and verb == "rlhf":
        kind = read.default("rlhf_type", "dpo", "swift/arguments/rlhf_args.py")
    read.use("num_generations", "max_completion_length")
    task = _TASKS.get(read.text("task_type") or "")
    if kind is None and task is not None:
        return task
    return {"rm": "reward"}.get(kind, kind) if kind else "pretrain" if verb == "pt" else "sft"


def _compute(read: RunReader, base: str) -> str:
    """Return the dtype of autocast: that of the weights, unless a switch says otherwise.

    ``arguments/base_args/model_args.py:_init_mixed_precision``: a switch that is not given follows them.
    """
    full = base in ("fp32", "fp16")
    half = read.flag("fp16") if read.has("fp16") else full
    brain = read.flag("bf16") if read.has("bf16") else not full
    if half and brain and base == "bf16":
        read.problems.append("fp16 beside torch_dtype bfloat16 switches both on: transformers stops")
    if half and read.has("fp16"):
        return "fp16"
    return "bf16" if brain else "fp16" if half else base


def _length(read: RunReader) -> int | None:
    length = read.whole("max_length")
    if length is None:
        read.notes.append("max_length is not given: ms-swift takes the model's maximum")
    return length


def _accumulation(read: RunReader, micro: int | None, processes: int | None, objective: str) -> int | None:
    if read.has("gradient_accumulation_steps"):
        return read.whole("gradient_accumulation_steps")
    source = "swift/trainers/arguments.py:289: max(1, ceil(16 / micro-batch / processes)); 1 for GRPO"
    if objective == "grpo":
        read.default("gradient_accumulation_steps", 1, source)
        return 1
    if processes is None or not micro:
        return None
    chosen = max(1, math.ceil(_TARGET / micro / processes))
    read.default("gradient_accumulation_steps", chosen, source)
    return chosen


def _targets(read: RunReader) -> tuple[str, ...] | str | None:
    if read.has("target_regex"):
        return read.text("target_regex")
    named = read.names("target_modules")
    listed = (named,) if isinstance(named, str) else named or ()
    if {"DEFAULT", "AUTO"} & {*listed}:
        read.notes.append("target_modules DEFAULT: ms-swift 2 adapts the projections of attention inputs")
        return None
    return "all-linear" if {"all-linear", "ALL"} & {*listed} else listed


def _refusals(read: RunReader, objective: str, cp: int, attention: str) -> None:
    """Note the combinations that stop ms-swift 4.6.0."""
    method = read.text("quant_method")
    if method in ("bnb", "hqq", "eetq", "quanto") and read.whole("quant_bits") is None:
        read.problems.append("quant_method needs quant_bits (arguments/base_args/quant_args.py:49)")
    if cp > 1 and read.has("rlhf_type") and objective not in ("dpo", "grpo"):
        read.problems.append(f"{objective} has no sequence_parallel_size (arguments/rlhf_args.py:719)")
    fused = attention in ("flash_attn", *(f"flash_attention_{number}" for number in (2, 3, 4)))
    if not fused and (read.flag("packing") or read.raw("padding_free") in (True, "true", "True")):
        read.problems.append("packing and padding_free need flash attention (arguments/sft_args.py:185)")


def _quantisation(read: RunReader, bits: int | None) -> str:
    method = read.text("quant_method") or "bnb"
    if method != "bnb" or bits != 4:
        return f"{method} int{bits}"
    double = "no double" if read.raw("bnb_4bit_use_double_quant") in (False, "false", "False") else "double"
    read.use("bnb_4bit_use_double_quant")
    kind = read.text("bnb_4bit_quant_type") or "nf4"
    storage = dtype_word(read.text("bnb_4bit_quant_storage")) or "uint8"
    return f"bnb {kind}, {double} quantisation, storage {storage}"


def _sharding(read: RunReader) -> dict[str, Any]:
    """Return what ``fsdp`` names, a word or a file of ms-swift's own form; else what the launcher sets."""
    named = read.text("fsdp")
    launched = next((item for item in read.problems if "accelerate's file" in item), None)
    if named is None:
        files = {key: value for key, value in SHIPPED.items() if key.endswith(".json")}
        known = next((value for key, value in files.items() if launched and key in launched), None)
        if known is not None and launched is not None:
            read.problems.remove(launched)
        return dict(known or {})
    for key, value in SHIPPED.items():
        if named == key or named.endswith(key):
            return dict(value)
    data = read.file.beside(named)
    if not isinstance(data, dict):
        read.problems.append(f"fsdp {named} is not read: taken for FSDP2 with its defaults")
        return {"fsdp": 2, "reshard": True, "cpu_offload": False}
    block = data.get("fsdp_config") or {}
    return {
        "fsdp": 1 if str(block.get("fsdp_version", 2)) == "1" else 2,
        "reshard": block.get("reshard_after_forward", True) is not False,
        "cpu_offload": "offload" in str(data.get("fsdp", "")),
        "checkpoints": bool(block.get("activation_checkpointing")),
        "offloads": bool(block.get("activation_cpu_offload")),
    }
