"""A LLaMA-Factory file (v0) for a run; :mod:`fsdptool.config.dialects.llamafactory.run` reads its keys."""

from __future__ import annotations

from fsdptool.config.dialects.llamafactory.run_keys import KEYS
from fsdptool.config.dialects.run_writer import RunWriter
from fsdptool.config.dialects.trainer.write import put_arguments

_STAGES = {"sft": "sft", "pretrain": "pt", "reward": "rm", "ppo": "ppo", "dpo": "dpo", "orpo": "dpo",
           "simpo": "dpo", "kto": "kto"}  # fmt: skip
_ATTENTION = {"sdpa": "sdpa", "flash_attention_2": "fa2", "flash_attention_3": "fa3", "eager": "disabled"}
_SWITCHES = {
    "galore_adamw": "use_galore", "apollo_adamw": "use_apollo", "badam": "use_badam",
    "adam_mini": "use_adam_mini", "muon": "use_muon",
}  # fmt: skip
"""Optimizers that LLaMA-Factory switches on by a key of their own."""


def write(to: RunWriter) -> None:
    """Set the keys of a LLaMA-Factory file."""
    run = to.run
    to.need_objective(*_STAGES)
    objective = run.objective or "sft"
    to.put("model_name_or_path", to.model())
    to.put("stage", _STAGES[objective])
    to.put("do_train", True)
    if objective == "ppo":
        to.ask("reward_model", "YOUR-REWARD-MODEL", "name the model that gives the rewards")
        to.put("reward_model_type", "full")
    to.put("pref_loss", objective if objective in ("orpo", "simpo") else None)
    to.put("dataset", to.dataset())
    if run.program != to.program:
        to.lose("LLaMA-Factory knows data by the names of its dataset_info.json", "learning.dataset")
    if run.program == to.program:
        to.put("template", "default")
    else:
        to.ask("template", "default", "name the chat template of the model")
    _method(to)
    if run.sequence_length is None:
        to.lose("without it LLaMA-Factory cuts samples at 2048 tokens", "sequence_length")
    to.put("cutoff_len", run.sequence_length)
    to.put("packing", bool(run.packing))
    to.put("neat_packing", bool(run.packing) and not run.documents_joined)
    if objective not in ("sft", "pretrain"):
        to.lose("LLaMA-Factory packs samples for sft and pt alone", "packing", "documents_joined")
    put_arguments(to)
    _optimizer(to)
    _pure(to)
    to.put("disable_gradient_checkpointing", run.gradient_checkpointing == "none")
    if run.gradient_checkpointing in ("selective", "offload"):
        to.lose("LLaMA-Factory recomputes whole layers", "gradient_checkpointing")
    if run.activation_offloading:
        to.lose("LLaMA-Factory keeps activations on the device", "activation_offloading")
    to.put("flash_attn", to.choice("attention", _ATTENTION))
    liger = run.fused_loss == "liger"
    to.put("enable_liger_kernel", liger)
    if run.fused_loss in ("cce", "chunked") or (liger and objective not in ("sft", "pretrain")):
        to.lose("LLaMA-Factory fuses the loss only by liger, of sft and pt", "fused_loss")
    to.put_learning(KEYS.learning, "dataset")


def _method(to: RunWriter) -> None:
    run = to.run
    kind = {None: "full", "qlora": "lora", "lora8bit": "lora"}.get(run.method, run.method)
    if kind not in ("full", "lora", "freeze", "oft"):
        to.lose(f"LLaMA-Factory has no method {kind}: every parameter trains", "method")
        to.lose("goes with the method", "quantisation", "lora_rank", "lora_targets", "lora_dropout")
        kind = "full"
    to.put("finetuning_type", kind)
    to.lose("LLaMA-Factory loads the model in the dtype of its checkpoint", "base_dtype")
    to.lose("it has no key for modules that train beside the adapters", "lora_modules_to_save")
    if kind != "lora":
        return
    to.put("lora_rank", run.lora_rank)
    to.put("lora_dropout", run.lora_dropout or 0.0)
    targets = to.targets()
    if isinstance(targets, str) and targets != "all-linear":
        to.lose("LLaMA-Factory takes the names of modules, and no regular expression", "lora_targets")
    to.put("lora_target", "all" if targets == "all-linear" else targets)
    bits = {"qlora": 4, "lora8bit": 8}.get(run.method or "")
    to.put("quantization_bit", bits)
    if bits == 4 and "no double" in (run.quantisation or ""):
        to.put("double_quantization", False)
    to.lose(
        "LLaMA-Factory quantises with bitsandbytes, stored in the dtype that it computes in", "quantisation"
    )


def _optimizer(to: RunWriter) -> None:
    name, _, layerwise = (to.run.optimizer or "").partition("_layerwise")
    layerwise = "_layerwise" if (to.run.optimizer or "").endswith("_layerwise") else ""
    switch = _SWITCHES.get(name)
    if switch is not None:
        to.cannot.pop("optimizer", None)
        to.data.pop("optim", None)
        to.put(switch, True)
        if layerwise:
            to.put(f"{switch.removeprefix('use_')}_layerwise", True)


def _pure(to: RunWriter) -> None:
    """Set ``pure_bf16`` where what trains is held in bf16: otherwise LLaMA-Factory casts it to fp32."""
    run = to.run
    pure = run.stored_dtype in ("bf16", "checkpoint") and run.compute_dtype == "bf16"
    if pure:
        to.put("pure_bf16", True)
        to.put("bf16", False)
    why = "LLaMA-Factory holds what trains in fp32, or all in the dtype of the checkpoint (pure_bf16)"
    to.lose(why, "stored_dtype", "optimizer_state_bits", "reduce_dtype")
