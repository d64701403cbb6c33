"""A file of ``trl sft``, ``dpo``, ``grpo``, …; :mod:`fsdptool.config.dialects.trl.run` reads its keys."""

from __future__ import annotations

from fsdptool.config.dialects.run_writer import RunWriter
from fsdptool.config.dialects.trainer.write import put_arguments
from fsdptool.config.dialects.trl.run_keys import KEYS, WITHOUT_DROPOUT

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "checkpoint": "auto"}
_WITH_BETA = ("dpo", "kto", "grpo")
_ATTENTION = {
    **{name: name for name in ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")},
    "flex": "flex_attention",
}


def write(to: RunWriter) -> None:
    """Set the keys of a TRL file."""
    run = to.run
    to.need_objective("sft", "pretrain", "dpo", "kto", "grpo", "reward")
    objective = run.objective or "sft"
    if objective == "pretrain":
        to.lose("TRL trains texts with its SFT trainer", "objective")
    to.put("model_name_or_path", to.model())
    to.put("dataset_name", to.dataset())
    _method(to)
    _length(to, objective)
    put_arguments(to)
    del to.cannot["processes"]
    to.cannot["global_batch"] = "follows from the number of ranks (num_processes)"
    to.put("num_processes", run.processes)
    to.put("num_machines", run.nodes if run.nodes and run.nodes > 1 else None)
    to.put("gradient_checkpointing", run.gradient_checkpointing not in (None, "none"))
    if run.gradient_checkpointing in ("selective", "offload"):
        to.lose("TRL recomputes whole layers", "gradient_checkpointing")
    offloads = bool(run.activation_offloading) or run.gradient_checkpointing == "offload"
    to.put("activation_offloading", offloads if objective != "grpo" else None)
    if objective == "grpo":
        to.lose("TRL's trainer has no such key", "activation_offloading")
    if run.gradient_checkpointing == "offload":
        to.lose("TRL offloads what its layers keep", "activation_offloading")
    to.put("attn_implementation", to.choice("attention", _ATTENTION))
    if objective in ("sft", "pretrain", "dpo", "kto"):
        to.lose("TRL computes this loss in chunks", "fused_loss")
    else:
        to.put("use_liger_kernel", run.fused_loss == "liger")
        to.lose("TRL has no other than liger's", "fused_loss")
    to.put_learning(KEYS.learning, "dataset", *(() if objective in _WITH_BETA else ("preference_beta",)))
    if objective in _WITH_BETA and "beta" not in to.data:
        to.put("beta", 0.0 if objective == "grpo" else 0.1)
    if objective == "grpo":
        to.put("num_generations", to.data.get("num_generations", 8))
        to.ask("reward_funcs", ["YOUR-REWARD"], "name the functions that give the rewards")
    elif objective == "kto":
        to.put("desirable_weight", 1.0)
    elif objective == "reward":
        to.put("center_rewards_coefficient", 0.0)


def _method(to: RunWriter) -> None:
    run = to.run
    to.put("dtype", to.choice("base_dtype", _DTYPES))
    if run.method in (None, "full"):
        to.put("dtype", _DTYPES.get(run.stored_dtype or "") or _DTYPES.get(run.base_dtype or ""))
        to.cannot.pop("base_dtype", None)
    why = "TRL holds adapters in fp32 (in bf16 over a quantised base), and under FSDP all that trains in fp32"
    to.lose(why, "stored_dtype", "optimizer_state_bits", "reduce_dtype", "base_dtype")
    if run.method in (None, "full"):
        return
    if run.method not in ("lora", "qlora", "lora8bit"):
        to.lose(f"TRL has no method {run.method}: every parameter trains", "method")
        return
    to.put("use_peft", True)
    to.put("lora_r", run.lora_rank)
    to.put("lora_dropout", run.lora_dropout or 0.0)
    to.put("disable_dropout", False if run.lora_dropout and run.objective in WITHOUT_DROPOUT else None)
    to.put("lora_target_modules", to.targets())
    to.put("lora_modules_to_save", run.lora_modules_to_save or None)
    to.put("load_in_4bit", run.method == "qlora" or None)
    to.put("load_in_8bit", run.method == "lora8bit" or None)
    words = run.quantisation or ""
    if run.method == "qlora":
        double = "double quantisation" in words and "no double" not in words
        to.put("use_bnb_nested_quant", double)
        storage = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        kept = words.rpartition("storage ")[2] if "storage" in words else ""
        to.put("bnb_4bit_quant_storage", storage.get(kept, kept if kept == "uint8" else None))
    to.lose("TRL quantises with bitsandbytes: nf4 and int8", "quantisation")


def _length(to: RunWriter, objective: str) -> None:
    run = to.run
    if objective == "grpo":
        to.lose("TRL limits the completions (max_completion_length), and not the prompts", "sequence_length")
    else:
        to.put("max_length", run.sequence_length)
        if run.sequence_length is None:
            to.lose("without it TRL cuts samples at 1024 tokens", "sequence_length")
    to.put("packing", bool(run.packing) if objective in ("sft", "pretrain") else None)
    to.put("packing_strategy", "wrapped" if run.packing and run.documents_joined else None)
    if objective not in ("sft", "pretrain"):
        to.lose("TRL packs samples for sft alone", "packing", "documents_joined")
