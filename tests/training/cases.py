"""Tiny models of every kind, the batches they train on, and what the ranks do with them."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdptool.inspection.build import build
from fsdptool.inspection.walk import walk
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.units import plan_teacher, plan_units
from fsdptool.records.anatomy import Anatomy, ModelSpec, WrapChoice
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import (
    Batch,
    Distillation,
    Lora,
    Method,
    ModelChoice,
    Objective,
    Optimizer,
    Recipe,
)
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.folder import RunInputs
from fsdptool.source import resolve

STEPS = 50
FEW = 4
"""Steps of runs that differ in their layout alone: optimizers have states from the second on.

Runs of fifty steps are one decoder's in test_numerics.py and every one's in benchmarks/training/numerics.py.
"""
MICRO_BATCHES = 4
SAMPLES = 2
LENGTH = 12

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
TIED = {**LLAMA, "tie_word_embeddings": True}
WINDOWS = {
    **LLAMA,
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "head_dim": 6,
    "sliding_window": 5,
}
# An embedding of which two ranks hold more than 4096 elements each: bitsandbytes packs from there on.
LONG_LIST = {**LLAMA, "vocab_size": 512}
MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.05,
    "max_position_embeddings": 32,
}
MOE_EVEN = {**MOE, "num_experts": 8}
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 96,
    "d_model": 24,
    "d_kv": 6,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "feed_forward_proj": "relu",
    "initializer_factor": 0.5,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
CLASSIFIER = {**BERT, "architectures": ["BertForSequenceClassification"], "num_labels": 5}
MODERN_BERT = {
    "model_type": "modernbert",
    "architectures": ["ModernBertForMaskedLM"],
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "global_attn_every_n_layers": 2,
    "local_attention": 6,
    "pad_token_id": 0,
}
SD3 = {
    "_class_name": "SD3Transformer2DModel",
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 16,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 16,
}
UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2],
    "attention_head_dim": [2, 4],
    "cross_attention_dim": 16,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 80,
    "use_linear_projection": True,
    "norm_num_groups": 8,
}

QWEN3 = {
    **LLAMA,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 6,
    "tie_word_embeddings": True,
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 96,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.05,
}
TWO_EXPERTS = {**MIXTRAL, "num_local_experts": 2}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "max_position_embeddings": 32,
}
GPT_OSS = {
    **MOE,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 6,
}


@dataclass(frozen=True)
class Case:
    """One model under one objective."""

    name: str
    config: dict[str, Any]
    wrap: tuple[str, ...]
    objective: str
    lora: tuple[str, ...]
    lora_parameters: tuple[str, ...] = ()
    rate: float = 2e-3
    options: dict[str, Any] = field(default_factory=dict)
    beside: bool = False
    """Not one of the objectives: a model for particular tests."""


CASES = {
    case.name: case
    for case in (
        Case("causal", LLAMA, ("LlamaDecoderLayer",), "causal_lm", ("q_proj", "v_proj", "down_proj")),
        Case("packed", TIED, ("LlamaDecoderLayer",), "causal_lm", ("q_proj", "v_proj")),
        Case(
            "moe",
            MOE,
            ("Qwen3MoeDecoderLayer",),
            "causal_lm",
            ("q_proj",),
            ("experts.gate_up_proj", "experts.down_proj"),
        ),
        Case("seq2seq", T5, ("T5Block",), "seq2seq", ("q", "v")),
        Case("masked", BERT, ("BertLayer",), "masked_lm", ("query", "value")),
        Case("classify", CLASSIFIER, ("BertLayer",), "classification", ("query", "value")),
        Case("flow", SD3, ("JointTransformerBlock",), "flow_matching", ("to_q", "to_v")),
        Case(
            "epsilon",
            UNET,
            ("BasicTransformerBlock", "ResnetBlock2D"),
            "epsilon",
            ("to_q", "to_v"),
        ),
        Case(
            "velocity",
            UNET,
            ("BasicTransformerBlock", "ResnetBlock2D"),
            "v_prediction",
            ("to_q", "to_v"),
        ),
        Case("long list", LONG_LIST, ("LlamaDecoderLayer",), "causal_lm", ("q_proj",), beside=True),
        Case("windows", WINDOWS, ("MistralDecoderLayer",), "causal_lm", ("q_proj",), beside=True),
        Case("qwen3 tied", QWEN3, ("Qwen3DecoderLayer",), "causal_lm", ("q_proj", "o_proj"), beside=True),
        Case("gpt2", GPT2, ("GPT2Block",), "causal_lm", ("c_attn", "c_proj"), beside=True),
        Case("qwen3 moe", MOE_EVEN, ("Qwen3MoeDecoderLayer",), "causal_lm", ("q_proj",), beside=True),
        Case("mixtral", MIXTRAL, ("MixtralDecoderLayer",), "causal_lm", ("q_proj",), beside=True),
        Case("two experts", TWO_EXPERTS, ("MixtralDecoderLayer",), "causal_lm", ("q_proj",), beside=True),
        Case("deepseek", DEEPSEEK, ("DeepseekV3DecoderLayer",), "causal_lm", ("kv_b_proj",), beside=True),
        Case("modern bert", MODERN_BERT, ("ModernBertEncoderLayer",), "masked_lm", ("Wqkv",), beside=True),
        Case("gpt-oss", GPT_OSS, ("GptOssDecoderLayer",), "causal_lm", ("q_proj",), beside=True),
    )
}


def anatomy_of(spec: ModelSpec, wrap: tuple[str, ...]) -> Anatomy:
    """Take the anatomy of a model whose wrap classes are known."""
    walked = walk(build(spec))
    return Anatomy(
        spec,
        walked.parameters,
        walked.buffers,
        walked.modules,
        WrapChoice(wrap, ()),
        walked.input_embedding,
        walked.output_embedding,
        walked.final_norm,
        walked.no_split_modules,
        walked.repeated_blocks,
    )


def write_model(folder: Path, config: dict[str, Any]) -> str:
    """Write a model folder with nothing but a configuration; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def recipe_for(case: Case, reference: str, method: str, **changes: Any) -> Recipe:
    """Return a recipe; ``changes`` replace fields of it."""
    chosen = {
        "full": Method("full"),
        "lora": Method("lora", lora=Lora(rank=4, alpha=8.0, targets=case.lora)),
        "lora_parameters": Method(
            "lora", lora=Lora(rank=2, alpha=8.0, targets=case.lora, target_parameters=case.lora_parameters)
        ),
        "lora_replicated": Method(
            "lora", lora=Lora(rank=4, alpha=8.0, targets=case.lora, adapters="replicated")
        ),
        "distillation": Method(
            "distillation",
            distillation=Distillation(
                ModelChoice(f"{reference}-teacher", weights="random"), temperature=1.5, alpha=0.4
            ),
        ),
    }[method]
    base = Recipe(
        model=ModelChoice(reference, weights="random"),
        method=chosen,
        objective=Objective(case.objective, case.options),
        batch=Batch(micro_batch=SAMPLES, sequence_length=LENGTH),
        optimizer=Optimizer(
            learning_rate=case.rate, betas=(0.9, 0.99), epsilon=1e-6, weight_decay=0.01, clip_grad_norm=None
        ),
        steps=STEPS,
        seed=7,
    )
    return dataclasses.replace(base, **changes)


def inputs_for(
    case: Case, folder: Path, recipe: Recipe, *, mesh: ParallelDims | None = None, **settings: Any
) -> RunInputs:
    """Plan the units of a case; the teacher has one block more."""
    spec = resolve(recipe.model.reference)
    chosen = FsdpSettings(wrap_classes=case.wrap, use_cpu=True, mixed_precision="no")
    chosen = dataclasses.replace(chosen, mesh=mesh or ParallelDims(), **settings)
    run = resolve_run(recipe, chosen)
    recipe = dataclasses.replace(run.recipe, batch=recipe.batch)
    units = plan_units(anatomy_of(spec, case.wrap), run)
    if recipe.method.distillation is None:
        return RunInputs(folder, recipe, chosen, spec, units)
    teacher = resolve(recipe.method.distillation.teacher.reference)
    return RunInputs(
        folder,
        recipe,
        chosen,
        spec,
        units,
        teacher,
        plan_teacher(anatomy_of(teacher, case.wrap), run),
    )


_DEEPER = {
    "t5": ("num_layers", 3),
    "SD3Transformer2DModel": ("num_layers", 3),
    "UNet2DConditionModel": ("layers_per_block", 2),
    "gpt2": ("n_layer", 3),
}


def deeper(config: dict[str, Any]) -> dict[str, Any]:
    """Return the teacher's configuration: one block more."""
    kind = config.get("model_type") or config["_class_name"]
    key, value = _DEEPER.get(kind, ("num_hidden_layers", 3))
    return {**config, key: value}


def prepare_case(case: Case, folder: Path, method: str, **changes: Any) -> tuple[Recipe, Path]:
    """Write the model (and its teacher) and return the recipe."""
    reference = write_model(folder / "model", case.config)
    write_model(folder / "model-teacher", deeper(case.config))
    return recipe_for(case, reference, method, **changes), folder


def micro_batch(case: Case, step: int, index: int) -> dict[str, torch.Tensor]:
    """Return micro-batch ``index`` of a step; targets are spread very unevenly over micro-batches."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    kind = case.objective
    if kind in ("flow_matching", "epsilon", "v_prediction"):
        return _latents(case, generator)
    tokens = torch.randint(3, 96, (SAMPLES, LENGTH), generator=generator)
    if kind == "classification":
        labels = torch.randint(0, 5, (SAMPLES,), generator=generator)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    labels = tokens.clone()
    kept = (2, LENGTH, 5, 1)[index % 4]
    labels[:, kept:] = -100
    if kind == "causal_lm":
        if case.name == "packed":
            cut = 3 + (step + index) % 6
            positions = torch.cat((torch.arange(cut), torch.arange(LENGTH - cut)))
            return {
                "input_ids": tokens,
                "labels": labels,
                "position_ids": positions.expand(SAMPLES, -1).clone(),
            }
        return {"input_ids": tokens, "labels": labels}
    if kind == "masked_lm":
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels[:, :8]}


def _latents(case: Case, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    batch = {"latents": normal(SAMPLES, 4, 8, 8), "noise": normal(SAMPLES, 4, 8, 8)}
    batch["encoder_hidden_states"] = normal(SAMPLES, 5, 16)
    if case.objective == "flow_matching":
        batch["sigma"] = torch.rand(SAMPLES, generator=generator)
        batch["pooled_projections"] = normal(SAMPLES, 16)
        return batch
    batch["timestep"] = torch.randint(0, 1000, (SAMPLES,), generator=generator)
    batch["text_embeds"] = normal(SAMPLES, 32)
    batch["time_ids"] = torch.randint(0, 64, (SAMPLES, 6), generator=generator).float()
    return batch
