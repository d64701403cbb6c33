"""An axolotl file for a run; the keys are those that :mod:`fsdptool.config.dialects.axolotl.run` reads."""

from __future__ import annotations

from collections.abc import Mapping

from fsdptool.config.canonical import values_written
from fsdptool.config.dialects.axolotl.run_keys import KEYS
from fsdptool.config.dialects.run_writer import RunWriter
from fsdptool.errors import ConfigError

_ATTENTION = {
    **{name: name for name in ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")},
    "flex": "flex_attention",
    "xformers": "xformers",
    "sage": "sage",
}
_OPTIMIZERS = {
    "adamw": "adamw_torch_fused", "adamw8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "sgd": "sgd",
    "muon": "muon", "paged_adamw_8bit": "paged_adamw_8bit", "paged_adamw_32bit": "paged_adamw_32bit",
    "lion": "lion_32bit",
}  # fmt: skip
_PLUGINS = {
    "cce": ("axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin", "cut_cross_entropy"),
    "liger": ("axolotl.integrations.liger.LigerPlugin", "liger_fused_linear_cross_entropy"),
}
_KINDS = {
    "sft": "chat_template", "pretrain": "completion", "orpo": "chat_template.argilla",
    "kto": "chatml.argilla", "reward": "bradley_terry.chat_template", "grpo": "YOUR-TRANSFORM",
}  # fmt: skip
"""How samples are read (``prompt_strategies``), by the objective."""
_RL = ("dpo", "ipo", "kto", "orpo", "simpo", "grpo")


def write(to: RunWriter, block: Mapping[str, str]) -> None:
    """Set the keys of an axolotl file; ``block`` names the settings of ``fsdp_config``."""
    run = to.run
    to.need_objective("sft", "pretrain", "reward", *_RL)
    if run.objective == "dpo" and run.method in ("qlora", "lora8bit") and run.fsdp not in (None, "none"):
        raise ConfigError(
            "axolotl has no counterpart of dpo over a quantised base under FSDP2",
            help="train without FSDP, or over a base in 16 bits",
        )
    to.put("base_model", to.model())
    _data(to)
    _method(to)
    _precision(to)
    if run.sequence_length is None:
        to.lose("without it axolotl cuts samples at 512 tokens", "sequence_length")
    to.put("sequence_len", run.sequence_length)
    to.put("pad_to_sequence_len", run.full_rows or None)
    to.put("sample_packing", bool(run.packing) and run.objective in (None, "sft", "pretrain"))
    to.lose("axolotl keeps the samples of a row apart", "documents_joined")
    to.lose("axolotl packs no samples of preferences and rewards", "packing")
    micro, accumulation = run.micro_batch, run.accumulation
    if (run.mesh.cp or 1) > 1 and to.data["sample_packing"] and (micro or 1) > 1:
        to.lose("axolotl divides packed rows one by one", "micro_batch", "accumulation")
        micro, accumulation = 1, (micro or 1) * (accumulation or 1)
    to.put("micro_batch_size", micro)
    to.put("gradient_accumulation_steps", accumulation)
    if run.micro_batch is None or run.accumulation is None:
        to.lose("left open by the source: axolotl takes 1", "micro_batch", "accumulation")
    to.put("max_steps", run.steps)
    to.put("num_epochs", run.epochs)
    to.put("optimizer", to.optimizer(_OPTIMIZERS, _as_it_is(run.optimizer)))
    if (run.mesh.cp or 1) > 1 and run.attention != "flash_attention_2":
        to.lose("axolotl divides sequences under flash_attention_2 alone", "attention")
        to.put("attn_implementation", "flash_attention_2")
    else:
        _attention(to)
    to.put("torch_compile", run.compile)
    _loss(to)
    _checkpointing(to)
    _sharding(to, block)
    to.put_learning(KEYS.learning, "dataset")
    if "learning_rate" not in to.data:
        to.put("learning_rate", 1e-4)
        to.lose("axolotl needs one: 1e-4 is written", "learning.learning_rate")
    to.launched()


def _attention(to: RunWriter) -> None:
    kernel = to.run.attention if "/" in (to.run.attention or "") else None
    to.put("attn_implementation", kernel or to.choice("attention", _ATTENTION))


def _as_it_is(name: str | None) -> tuple[str, ...]:
    """Return the name of an optimizer that transformers or axolotl itself knows by it."""
    plain = (name or "").startswith(("adamw_", "paged_", "lion_", "galore_", "rmsprop", "ao_", "optimi_"))
    return (name,) if name is not None and (plain or name in _OPTIMIZERS.values()) else ()


def _data(to: RunWriter) -> None:
    objective = to.run.objective or "sft"
    if objective == "pretrain" and to.run.steps is None:
        to.lose("axolotl streams texts only for a number of steps: they are trained as samples", "objective")
    kind = _KINDS.get(objective, "chat_template.default")
    texts = objective == "pretrain" and to.run.steps is not None
    to.put("pretraining_dataset" if texts else "datasets", [{"path": to.dataset(), "type": kind}])
    if objective in _RL:
        to.put("rl", objective)
        to.put("remove_unused_columns", False if objective == "kto" else None)
        if objective == "grpo":
            to.ask("trl.reward_funcs", ["YOUR-REWARD"], "name the functions that give the rewards")
    elif objective == "reward":
        to.put("reward_model", True)


def _method(to: RunWriter) -> None:
    run = to.run
    if run.method not in (None, "full", "lora", "qlora", "lora8bit"):
        to.lose(f"axolotl has no method {run.method}: every parameter trains", "method", "stored_dtype")
        to.lose("goes with the method", "optimizer_state_bits", "reduce_dtype", "base_dtype")
        return
    if run.method in (None, "full"):
        return
    to.put("adapter", "qlora" if run.method == "qlora" else "lora")
    to.put("load_in_4bit", run.method == "qlora")
    to.put("load_in_8bit", run.method == "lora8bit")
    to.put("lora_r", run.lora_rank)
    to.put("lora_dropout", run.lora_dropout or 0.0)
    targets = to.targets()
    if targets == "all-linear":
        to.put("lora_target_linear", True)
    else:
        to.put("lora_target_modules", targets)
    to.put("lora_modules_to_save", run.lora_modules_to_save or None)
    if run.method == "qlora":
        to.lose(
            "axolotl stores nf4 with double quantisation, in the dtype that it computes in", "quantisation"
        )
    elif run.quantisation not in (None, "none"):
        to.lose("axolotl quantises in 4 bits (qlora) and in 8 (lora)", "quantisation")


def _precision(to: RunWriter) -> None:
    run = to.run
    why = "axolotl holds weights, gradients and states in the dtype that it computes in, adapters in fp32"
    to.lose(why, "base_dtype", "stored_dtype", "optimizer_state_bits", "reduce_dtype")
    eight = run.method == "lora8bit" and run.compute_dtype == "fp32"
    if eight:
        to.lose("axolotl computes in fp16 over a base of 8 bits", "compute_dtype")
    to.put("bf16", run.compute_dtype in ("bf16", "fp8"))
    to.put("fp16", run.compute_dtype == "fp16")
    to.put("fp8", run.compute_dtype == "fp8" or None)


def _loss(to: RunWriter) -> None:
    found = _PLUGINS.get(to.run.fused_loss or "")
    if found is not None:
        to.put("plugins", [found[0]])
        to.put(found[1], True)
    to.put("chunked_cross_entropy", to.run.fused_loss == "chunked" or None)


def _checkpointing(to: RunWriter) -> None:
    run, mode = to.run, to.run.gradient_checkpointing
    offloads = bool(run.activation_offloading) or mode == "offload"
    to.put("gradient_checkpointing", mode not in (None, "none") or offloads)
    to.put("selective_checkpointing", mode == "selective" or None)
    if mode == "selective" and run.program != to.program:
        to.lose("axolotl saves the attention of each layer and recomputes the rest", "gradient_checkpointing")
    to.put("activation_offloading", offloads or None)
    if offloads:
        why = "axolotl offloads the inputs of layers and recomputes the rest"
        to.lose(why, "gradient_checkpointing", "activation_offloading")


def _sharding(to: RunWriter, block: Mapping[str, str]) -> None:
    run, mesh = to.run, to.run.mesh
    if run.fsdp not in (None, "none"):
        to.put("fsdp_version", 2)
        to.put("fsdp_config", values_written(to.settings(), block))
    for key, size in (
        ("dp_replicate_size", mesh.dp_replicate), ("dp_shard_size", mesh.dp_shard),
        ("context_parallel_size", mesh.cp), ("tensor_parallel_size", mesh.tp),
        ("expert_parallel_size", mesh.ep),
    ):  # fmt: skip
        told = size is not None and size > 1 and not (key.startswith("dp_") and run.fsdp == "none")
        to.put(key, size if told else None)
    to.lose("axolotl has no pipeline", "mesh.pp")
