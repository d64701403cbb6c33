"""What TrainingArguments say of a run, and the runs of scripts that take nothing else.

Sources: transformers 5.24.0 ``training_args.py``, ``modeling_utils.py:4183`` (dtype of loading), its
``examples/pytorch/language-modeling/run_clm.py``; accelerate 1.15 ``accelerator.py``,
``utils/fsdp_utils.py`` (what is upcast); the scripts of stanford_alpaca and FastChat, which many others copy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdptool.config.dialects.run_reader import RunFile, RunReader, dtype_word, global_batch, state_bits
from fsdptool.config.dialects.trainer.run_keys import KEYS, MODELS, OLD, SCRIPTS, script_of
from fsdptool.files.tree import ParseError, parse_json, to_python
from fsdptool.records.described_run import LIGER_KERNELS, DescribedMesh, DescribedRun
from fsdptool.spelling import integer

_OF_4 = ("adafactor", "evaluation_strategy", "fsdp_transformer_layer_cls_to_wrap", "sharded_ddp", "no_cuda")
"""Arguments that transformers 5 does not have, though 4.x did."""
_LENGTHS = ("model_max_length", "max_seq_length", "max_length", "cutoff_len", "max_source_length")
"""Flags with which scripts set the length of a sample."""
_FLASH = ("use_flash_attn", "flash_attn", "use_flash_attention_2")
"""Flags that switch flash attention on."""
_SWITCHES = ("use_lora", "use_peft", "lora_enable", "apply_lora", "use_peft_lora")
"""Flags that switch adapters on."""
_OBJECTIVES = ("dpo", "grpo", "kto", "orpo", "ppo", "rloo")
"""What the names of scripts say that they minimise."""
_SHIPPED = re.compile(
    r"(?:^|/)accelerate_configs?/(?:deepspeed_)?(zero[123]|fsdp[12]|multi_gpu|ddp|single_gpu)\.ya?ml$"
)
"""Files of TRL 1.16 (``trl/accelerate_configs``), alignment-handbook and open-r1 that say the same."""
_CUT = "at most the tokenizer's maximum"
_EAGER = ("bloom",)
"""Models that had no other attention than eager in transformers 4."""


def describe(file: RunFile) -> DescribedRun | None:
    """Return the run of a script that takes TrainingArguments; None where it is told not to train."""
    known = script_of(file.launch.script)
    if known is not None and _only_evaluates(file.data):
        return None
    old = any(key in file.data for key in _OF_4)
    read = RunReader(file, replace(KEYS, version=file.version or (OLD if old else KEYS.version)))
    model = read.text(*MODELS)
    if model is None and known is not None and known.model is not None:
        model = read.default("model_name_or_path", known.model, "examples/pytorch: ModelArguments")
    common = arguments(read, old=old)
    if model is None:
        read.notes.append("a file of arguments alone names no model, no length and no method")
        return read.describe(**{**common, "optimizer_state_bits": _bits_alone(common)})
    base = dtype_word(read.text("dtype", "torch_dtype"))
    if base is None:
        base = "fp32" if old else "checkpoint"
        source = "modeling_utils.py:4183: float32 before transformers 5, then as the checkpoint is stored"
        read.default("dtype", base, source)
    stored: str | None = "fp32" if common["fsdp"] != "none" and common["compute_dtype"] != "fp32" else base
    if common["fsdp"] is None and stored != base:
        stored = None
    texts = _texts(read, file.launch.script)
    adapter = _adapter(read)
    if adapter["method"] != "full":
        stored = "fp32"
    common |= adapter
    mixed = common["fsdp"] not in ("none", None) and common["compute_dtype"] != "fp32"
    reduced = common["compute_dtype"] if mixed else stored
    common["compute_dtype"] = computed_in(common["compute_dtype"], base)
    return read.describe(
        **common,
        model=model,
        base_dtype=base,
        stored_dtype=stored,
        reduce_dtype=reduced,
        **texts,
        optimizer_state_bits=state_bits(common["optimizer"], stored),
        attention=_attention(read, file.launch.script, model, old),
    )


def _only_evaluates(data: Mapping[str, Any]) -> bool:
    """Whether flags ask for an evaluation, and not for training."""
    words = {name: str(data.get(name, "")).lower() for name in ("do_train", "do_eval", "do_predict")}
    if words["do_train"]:
        return words["do_train"] in ("false", "0", "no")
    return any(words[name] not in ("", "false", "0", "no") for name in ("do_eval", "do_predict"))


def _bits_alone(common: Mapping[str, Any]) -> int | None:
    """Return the bits of states that do not follow the dtype of weights, which is not known here."""
    return state_bits(common["optimizer"], None)


def _adapter(read: RunReader) -> dict[str, Any]:
    """Return the method, by the flags that scripts with peft share (alpaca-lora, FastChat's train_lora)."""
    named = [key for key in _SWITCHES if read.has(key)]
    on = any(read.flag(key) for key in named)
    words = re.split(r"[^a-z]+", read.file.launch.script.rpartition(".")[2].lower())
    told = [word for word in ("lora", "qlora") if word in words]
    # Scripts without a switch adapt whatever they are given a rank for.
    if not on and (named or not (told or any(map(read.has, ("lora_r", "lora_rank", "q_lora"))))):
        return {"method": "full", "quantisation": "none"}
    read.use("lora_alpha")
    bits = read.whole("bits") or (4 if "qlora" in told else None)
    four = read.flag("load_in_4bit") or read.flag("q_lora") or bits == 4
    return {
        "method": "qlora" if four else "lora",
        "quantisation": "bnb nf4" if four else "none",
        "lora_rank": read.whole("lora_r", "lora_rank", *(("rank",) if told else ())),
        "lora_dropout": read.number("lora_dropout"),
        "lora_targets": read.names("lora_target_modules", "lora_target"),
    }


def _texts(read: RunReader, script: str) -> dict[str, Any]:
    """Return the length, how rows are filled, and the objective of a script's texts."""
    name = script.rpartition(".")[2]
    known = script_of(script)
    if known is None and ("run_clm" in name or read.has("block_size")):
        known = SCRIPTS["run_clm"]
    if known is None and read.has("train_file") and not any(map(read.has, _LENGTHS)):
        known = SCRIPTS["run_clm"]
    if known is None:
        length = read.whole(*_LENGTHS)
        if length is None and read.has("model_name_or_path"):
            source = "stanford_alpaca and FastChat train.py: TrainingArguments"
            length = read.default("model_max_length", 512, source)
        elif length is None:
            read.notes.append("the length of samples is that of the data: give --seq-len")
        words = re.split(r"[^a-z]+", name.lower())
        objective = next((word for word in _OBJECTIVES if word in words), "sft")
        rows = {"packing": False, "documents_joined": False}
        return {"sequence_length": length, "objective": objective, **rows}
    length = read.whole(known.key) if known.key is not None else None
    if length is None and known.length is not None and known.key is not None:
        length = read.default(known.key, known.length, f"examples/pytorch {name}.py; {_CUT}")
    elif length is None and not known.pictures:
        read.notes.append("the length of samples is that of the data: give --seq-len")
    read.use("max_target_length", "pad_to_max_length", "line_by_line")
    joined = known.packing and not read.flag("line_by_line")
    padded = known.padded if read.raw("pad_to_max_length") is None else read.flag("pad_to_max_length")
    return {
        "sequence_length": length,
        "packing": joined,
        "documents_joined": joined,
        "full_rows": padded,
        "objective": known.objective,
    }


def _attention(read: RunReader, script: str, model: str, old: bool) -> str:
    named = read.text("attn_implementation")
    if named is None and (script.endswith("train_mem") or any(read.flag(key) for key in _FLASH)):
        return "flash_attention_2"
    if named is None and old and any(word in model.lower() for word in _EAGER):
        return "eager"
    return named or read.default("attn_implementation", "sdpa", "transformers' default")


def computed_in(dtype: str, base: str) -> str:
    """Return the dtype of matrix products: without autocast it is that of the weights."""
    return base if dtype == "fp32" and base in ("bf16", "fp16", "checkpoint") else dtype


def arguments(
    read: RunReader, *, old: bool = False, sharding: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the facts that TrainingArguments decide.

    Args:
        read: The file.
        old: Whether transformers 4 is meant: FSDP1 unless the file says otherwise.
        sharding: What :func:`fsdp` returns, where that is of another version.
    """
    launch = read.file.launch
    micro = read.whole("per_device_train_batch_size", "per_gpu_train_batch_size")
    accumulation = read.whole("gradient_accumulation_steps")
    compute = "bf16" if read.flag("bf16") else "fp16" if read.flag("fp16") else None
    read.use("fp16")
    if compute is None:
        compute = dtype_word(launch.mixed_precision) or "fp32"
    sharding = fsdp(read, old=old) if sharding is None else sharding
    recomputes = read.flag("activation_checkpointing") or read.flag("gradient_checkpointing")
    steps = read.whole("max_steps")
    optimizer: str | None
    if read.flag("adafactor"):
        optimizer = "adafactor"
    elif "optim" not in read.data and old:
        optimizer = read.default("optim", "adamw_torch", "transformers 4.x training_args.py")
    else:
        optimizer = read.text("optim")
    if read.raw("deepspeed") or launch.deepspeed:
        read.notes.append(
            "DeepSpeed is out of scope: the FSDP2 equivalent is fsdp with fsdp_config version 2"
        )
    loader_settings(read)
    mesh = DescribedMesh()
    recomputes = sharding.pop("checkpoints") or recomputes
    return {
        "micro_batch": micro,
        "accumulation": accumulation,
        "global_batch": global_batch(micro, accumulation, launch.processes, mesh),
        "optimizer": optimizer,
        "compute_dtype": compute,
        "gradient_checkpointing": "full" if recomputes else "none",
        "fused_loss": "liger" if read.flag("use_liger_kernel") else "none",
        "fused_kernels": LIGER_KERNELS if read.flag("use_liger_kernel") else (),
        "compile": read.flag("torch_compile") or launch.compiles,
        "processes": launch.processes,
        "mesh": mesh,
        "steps": steps if steps is not None and steps > 0 else None,
        "epochs": read.number("num_train_epochs"),
        **sharding,
    }


def loader_settings(read: RunReader) -> None:
    """Count ``accelerator_config`` as without effect where it changes no shape and no gradient."""
    loading = read.raw("accelerator_config")
    if isinstance(loading, Mapping):
        # training_args.py:161 reads the texts "true" and "false" of this mapping as truth values.
        splits = str(loading.get("split_batches") or False).lower() not in ("false", "0")
        counts = splits or loading.get("gradient_accumulation_kwargs")
        read.inert(*(() if counts else ("accelerator_config",)))


def fsdp(read: RunReader, *, old: bool = False) -> dict[str, Any]:
    """Return the sharding of ``fsdp`` and ``fsdp_config``, or of the launcher.

    Besides the facts, ``checkpoints`` says whether FSDP's own activation checkpointing is on.
    """
    launch = read.file.launch
    words = read.value("fsdp")
    text = " ".join(words) if isinstance(words, list) else str(words or "")
    if isinstance(words, str) and words and read.text("fsdp") is None:  # a variable
        sharding = dict.fromkeys(("fsdp", "wrap_classes", "reshard", "cpu_offload"))
        return {**sharding, "checkpoints": False}
    on = bool(words) and text.lower() not in ("false", "none", "", "[]")
    block = read.raw("fsdp_config")
    if isinstance(block, str) and block.lstrip().startswith("{"):
        read.use("fsdp_config")
        try:
            root = parse_json(block).root
            block = to_python(root) if root is not None else None
        except ParseError:
            read.problems.append("fsdp_config is not JSON")
            block = None
    if isinstance(block, str):
        read.use("fsdp_config")
        named = block
        block = read.file.beside(named)
        if block is None:
            read.unread_elsewhere(f"fsdp_config {named} is not read: what it sets is not known")
    if not on and not launch.fsdp:
        return {
            "fsdp": "none",
            "wrap_classes": None,
            "reshard": None,
            "cpu_offload": False,
            "checkpoints": False,
        }
    if not on:
        return {
            "fsdp": launch.fsdp,
            "wrap_classes": launch.wrap_classes,
            "reshard": launch.reshard,
            "cpu_offload": launch.cpu_offload,
            "checkpoints": launch.checkpointing,
        }
    config = block if isinstance(block, Mapping) else {}

    def get(name: str) -> Any:
        for key in (name, f"fsdp_{name}"):
            if key in config:
                read.use(f"fsdp_config.{key}")
                return config[key]
        return None

    version = 2 if str(get("version") or (1 if old else 2)).startswith("2") else 1
    wrapped = get("transformer_layer_cls_to_wrap") or read.value("fsdp_transformer_layer_cls_to_wrap")
    listed = wrapped if isinstance(wrapped, list) else str(wrapped).split(",") if wrapped else []
    reshard = get("reshard_after_forward")
    shards = "full_shard" in text or "hybrid_shard" in text if version == 1 else True
    return {
        "fsdp": version,
        "wrap_classes": tuple(str(item).strip() for item in listed) or None,
        "reshard": shards if reshard is None or version == 1 else bool(reshard),
        "cpu_offload": "offload" in text or bool(get("cpu_offload") or get("offload_params")),
        "checkpoints": bool(get("activation_checkpointing")),
    }


def shipped(name: str) -> dict[str, Any] | None:
    """Return what an accelerate file says that TRL and projects around it ship, or None."""
    found = _SHIPPED.search(name)
    if found is None:
        return None
    name = found.group(1)
    kind = "DEEPSPEED" if name.startswith("zero") else "FSDP" if name.startswith("fsdp") else "MULTI_GPU"
    said: dict[str, Any] = {"distributed_type": kind, "mixed_precision": "bf16"}
    said["num_processes"] = 1 if name == "single_gpu" else 8
    return said | ({"fsdp_config": {"fsdp_version": int(name[-1])}} if kind == "FSDP" else {})


def mesh_of_accelerate(block: Any) -> DescribedMesh | None:
    """Return the sizes of ``parallelism_config``."""
    if not isinstance(block, dict):
        return None
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    sizes = {name: integer(block.get(f"parallelism_config_{name}_size")) for name in names}
    return DescribedMesh(**{name: size for name, size in sizes.items() if size is not None})
