"""Which model classes the breadth sweep covers, and a small configuration of each.

The classes are those of transformers' own auto mappings. A small configuration is the class's default,
reduced by the rules that the conformance tests use (``fsdptool.families.synthetic.shrink``); what these rules
get wrong for a model type is corrected here, with odd sizes where the model allows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdptool.families.registry import load_registry
from fsdptool.families.synthetic import shrink

GROUPS: Mapping[str, tuple[str, ...]] = {
    "causal-lm": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",), "masked-lm": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",),
    "image-text": ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",),
    "vision": (
        "MODEL_FOR_IMAGE_MAPPING_NAMES", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES",
        "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING_NAMES", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
        "MODEL_FOR_INSTANCE_SEGMENTATION_MAPPING_NAMES", "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING_NAMES",
        "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES", "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES", "MODEL_FOR_MASK_GENERATION_MAPPING_NAMES",
        "MODEL_FOR_KEYPOINT_DETECTION_MAPPING_NAMES", "MODEL_FOR_IMAGE_TO_IMAGE_MAPPING_NAMES",
    ),
    "audio": (
        "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
        "MODEL_FOR_CTC_MAPPING_NAMES", "MODEL_FOR_AUDIO_FRAME_CLASSIFICATION_MAPPING_NAMES",
        "MODEL_FOR_AUDIO_XVECTOR_MAPPING_NAMES", "MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES",
        "MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES", "MODEL_FOR_AUDIO_TOKENIZATION_NAMES",
    ),
}  # fmt: skip
"""The tables of transformers that list model classes, by what the classes read or predict."""

TEXT_GROUPS = ("causal-lm", "masked-lm", "seq2seq")
"""Groups whose classes read token ids."""

LENGTH = 32
"""Tokens per sample."""

_MLA = {"head_dim": 8}  # of the rotary part (qk_rope_head_dim), which several configurations call head_dim
_KDA = {"linear_head_dim": 16, "linear_num_heads": 4, "num_experts_per_token": 2, **_MLA}
_BERT = {
    **{"hidden_size": 64, "intermediate_size": 136, "num_hidden_layers": 2, "num_attention_heads": 4},
    "vocab_size": 515,
}
_SWIN = {"num_heads": [2, 4, 8, 16], "depths": [2, 2, 2, 2]}
_XLM = {"emb_dim": 64, "n_heads": 4}
_REFORMER = {
    **{"attn_layers": ["local", "lsh"], "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 48]},
    **{"attention_head_size": 16, "feed_forward_size": 128, "num_buckets": 4},
    **{"local_attn_chunk_length": 16, "lsh_attn_chunk_length": 16},
}
_GEMMA3N = {
    **{"intermediate_size": 128, "num_kv_shared_layers": 0, "laurel_rank": 8},
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
}

CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "axk1": _MLA,
    "bailing_hybrid": {"num_expert_group": 1, **_KDA},
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        **{"encoder_hash_byte_group_vocab": 101, "encoder_hash_byte_group_size": [3, 4]},
        **{"encoder_config.hidden_size_global": 64, "decoder_config.hidden_size_global": 64},
    },
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "dbrx": {
        "n_heads": 4,
        "ffn_config.ffn_hidden_size": 96,
        "attn_config.rope_theta": 10000.0,
        "attn_config.clip_qkv": 8.0,
    },
    "dots3_note": {
        **{"head_dim": 8, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 4},
        "shared_experts_intermediate_size": 128,
        "rope_parameters.sliding_attention.partial_rotary_factor": 1.0,
        "rope_parameters.indexed_attention.partial_rotary_factor": 1.0,
    },
    "deepseek_v2": {"num_experts_per_tok": 2, **_MLA},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "encoder-decoder": {
        "encoder": {"model_type": "bert", **_BERT},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True, **_BERT},
        **{"decoder_start_token_id": 1, "pad_token_id": 0},
    },
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16},
    "flaubert": _XLM,
    "gemma3n": {f"text_config.{key}": value for key, value in _GEMMA3N.items()},
    "gemma3n_text": _GEMMA3N,
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "kimi_linear": _KDA,
    "laguna": {"num_attention_heads_per_layer": [4, 4]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "longcat_flash": {
        "expert_ffn_hidden_size": 64,
        "ffn_hidden_size": 128,
        "zero_expert_num": 2,
        "moe_topk": 2,
        **_MLA,
    },
    "longt5": {"decoder_start_token_id": 0},
    "luke": {"entity_vocab_size": 101, "entity_emb_size": 32},
    "marian": {"decoder_vocab_size": 512},
    "ministral": {"head_dim": 16},
    "mobilebert": {"embedding_size": 32},
    "nemotron": {"num_key_value_heads": 2},
    "perceiver": {
        **{"d_latents": 64, "d_model": 64, "num_latents": 16, "num_self_attends_per_block": 2},
        **{"num_self_attention_heads": 4, "num_cross_attention_heads": 4, "vocab_size": 262},
        "max_position_embeddings": LENGTH,
    },
    "qwen4_exp": {
        **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16},
        **{"indexer_compress_ratio": 4, "hc_lowrank": 8},
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": _REFORMER,
    "swin": _SWIN,
    "swin2sr": {"num_heads": [4, 4, 4, 4]},
    "swinv2": _SWIN,
    "donut-swin": _SWIN,
    "switch_transformers": {"decoder_start_token_id": 0},
    "t5": {"decoder_start_token_id": 0},
    "xlm": _XLM,
    "xlnet": {"d_head": 16, "d_inner": 128},
    "xlstm": {"embedding_dim": 64, "mode": "train", "qk_dim_factor": 1.0},
    "xmod": {"default_language": "en_XX"},
    "youtu": _MLA,
    "zamba": {"attention_hidden_size": 128, "attention_head_dim": 32},
    "zamba2": {
        **{"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 16, "adapter_rank": 8},
        **{"kv_channels": 16, "num_query_groups": 4, "hybrid_layer_ids": None},
    },
}
"""By model type: dotted keys and the values that the reduced configuration needs; None drops a key."""

BY_CLASS: Mapping[str, Mapping[str, Any]] = {
    "PerceiverForImageClassificationConvProcessing": {"num_cross_attention_heads": 1},
    "PerceiverForImageClassificationFourier": {"num_cross_attention_heads": 1},
    "ReformerModelWithLMHead": {"is_decoder": True},
}
"""The same by class, where classes of one model type need different values."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model class of the sweep.

    Attributes:
        name: Class name in transformers.
        model_type: The first type that the mapping lists for it.
        group: Key of the table of groups; a class that several groups list is in the first.
    """

    name: str
    model_type: str
    group: str


def subjects() -> Iterator[Subject]:
    """Yield every class of the tables once, in their order."""
    from transformers.models.auto import modeling_auto

    seen: set[str] = set()
    for group, tables in GROUPS.items():
        for table in tables:
            for model_type, value in getattr(modeling_auto, table, {}).items():
                for name in (value,) if isinstance(value, str) else value:
                    if name not in seen:
                        seen.add(name)
                        yield Subject(name, model_type, group)


def small_config(subject: Subject) -> dict[str, Any]:
    """Return a small raw configuration of a class.

    Raises:
        ModelError: transformers refuses the default or the reduced configuration.
    """
    config = {"model_type": subject.model_type, "architectures": [subject.name]}
    family = load_registry().match(config)
    small = shrink(family, config, subject.name)
    corrections = {**CORRECTIONS.get(subject.model_type, {}), **BY_CLASS.get(subject.name, {})}
    for path, value in corrections.items():
        *parents, last = path.split(".")
        target = small
        for key in parents:
            target = target.setdefault(key, {})
        if value is None:
            target.pop(last, None)
        else:
            target[last] = value
    return small
