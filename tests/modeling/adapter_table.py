"""Small models and the ``adapter_config.json`` files that are tried on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "attention_bias": True,
    "tie_word_embeddings": False,
}
TIED = LLAMA | {"tie_word_embeddings": True}
QWEN3 = {**LLAMA, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 8}
CLASSIFIER = QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 3}
MOE: dict[str, Any] = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 96,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": 96,
}
BERT: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForTokenClassification"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "num_labels": 5,
}
SD3: dict[str, Any] = {
    "_class_name": "SD3Transformer2DModel",
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 16,
    "out_channels": 4,
    "pos_embed_max_size": 8,
}

QV: dict[str, Any] = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
TABLES = {"modules_to_save": ["embed_tokens", "lm_head"]}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": (LLAMA, QV),
    "rank of peft's own": (LLAMA, {"target_modules": ["q_proj"]}),
    "targets of peft's own": (LLAMA, {"r": 4}),
    "tables saved": (LLAMA, QV | TABLES),
    "tables saved, tied": (TIED, QV | TABLES),
    "tables saved, tied and kept so": (TIED, QV | TABLES | {"ensure_weight_tying": True}),
    "one of two tied tables saved": (TIED, QV | {"modules_to_save": ["embed_tokens"]}),
    "the tied head saved": (TIED, QV | {"modules_to_save": ["lm_head"]}),
    "the tied head saved and its table with it": (
        TIED,
        QV | {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},
    ),
    "norms saved": (LLAMA, QV | {"modules_to_save": ["input_layernorm", "norm"]}),
    "a saved module keeps its layers": (LLAMA, QV | {"modules_to_save": ["layers.1.self_attn"]}),
    "no saved modules, written as such": (LLAMA, QV | {"modules_to_save": [], "exclude_modules": None}),
    "rows": (LLAMA, QV | {"trainable_token_indices": [1, 5, 90]}),
    "rows of a tied table": (TIED, QV | {"trainable_token_indices": [1, 5, 90]}),
    "rows by name": (LLAMA, QV | {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [3, 4]}}),
    "DoRA": (LLAMA, QV | {"use_dora": True}),
    "DoRA on a table and a head": (
        LLAMA,
        {"r": 2, "target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    ),
    "a table adapted": (LLAMA, {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
    "rsLoRA, ranks by pattern": (
        LLAMA,
        QV | {"use_rslora": True, "rank_pattern": {"q_proj": 8, r"layers\.0\.self_attn\.v_proj": 2}},
    ),
    "alphas by pattern": (LLAMA, QV | {"lora_alpha": 16, "alpha_pattern": {"v_proj": 4}}),
    "some left out": (LLAMA, QV | {"exclude_modules": ["layers.1.self_attn.q_proj"]}),
    "left out by expression": (LLAMA, QV | {"exclude_modules": r".*layers\.[01]\..*"}),
    "some blocks": (LLAMA, QV | {"layers_to_transform": [0, 2], "layers_pattern": "layers"}),
    "one block": (LLAMA, QV | {"layers_to_transform": 1}),
    "all linear": (QWEN3, {"r": 4, "target_modules": "all-linear"}),
    "by expression": (QWEN3, {"r": 4, "target_modules": r".*\.(q|k)_proj"}),
    "all biases": (LLAMA, QV | {"bias": "all"}),
    "biases of the targets": (LLAMA, QV | {"bias": "lora_only"}),
    "biases of the adapters": (LLAMA, QV | {"lora_bias": True}),
    "a random start": (LLAMA, QV | {"init_lora_weights": "gaussian"}),
    "experts": (MOE, {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}),
    "experts alone": (MOE, {"r": 2, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    "a classifier": (CLASSIFIER, QV | {"task_type": "SEQ_CLS"}),
    "labels of tokens": (BERT, {"r": 2, "target_modules": ["query"], "task_type": "TOKEN_CLS"}),
    "transposed": (GPT2, {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "transposed, DoRA": (GPT2, {"r": 4, "target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "transposed, rows": (GPT2, {"r": 4, "target_modules": ["c_attn"], "trainable_token_indices": [7]}),
    "two stacks": (T5, {"r": 4, "target_modules": ["q", "v"], "task_type": "SEQ_2_SEQ_LM"}),
    "two stacks, the shared table": (T5, {"r": 4, "target_modules": ["q"], "modules_to_save": ["shared"]}),
    "a denoiser": (SD3, {"r": 4, "target_modules": ["to_q", "to_k"]}),
    "a denoiser, more": (
        SD3,
        {"r": 4, "target_modules": ["to_q"], "use_dora": True, "modules_to_save": ["proj_out"]},
    ),
}


def write_adapter(folder: Path, config: dict[str, Any], settings: dict[str, Any]) -> Path:
    """Write a base without weights and an adapter of it; returns the adapter's folder."""
    base, adapter = folder / "base", folder / "adapter"
    base.mkdir(parents=True, exist_ok=True)
    adapter.mkdir(exist_ok=True)
    (base / "config.json").write_text(json.dumps(config))
    written = {"peft_type": "LORA", "base_model_name_or_path": str(base), **settings}
    (adapter / "adapter_config.json").write_text(json.dumps(written))
    return adapter


def library_model(config: dict[str, Any]) -> Any:
    """Build a base with its own library, on the device in force."""
    if "_class_name" in config:
        import diffusers

        kind = getattr(diffusers, config["_class_name"])
        return kind.from_config({k: v for k, v in config.items() if not k.startswith("_")})
    import transformers

    settings = transformers.AutoConfig.for_model(
        config["model_type"], **{k: v for k, v in config.items() if k != "model_type"}
    )
    return getattr(transformers, config["architectures"][0])(settings)
