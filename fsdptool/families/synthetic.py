"""Small models and synthetic data: shrunk configurations, and micro-batches drawn from a spec.

A shrunk configuration makes a model of the same structure, for conformance tests, tests and benchmarks: every
kind of layer survives at least twice, widths become a few dozen, and the links between the parts of a
multimodal configuration still fit. torch is imported on use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.families.protocol import TensorSpec

if TYPE_CHECKING:
    from torch import Generator, Tensor


WIDTH = 64
HEADS = 4
HEAD = WIDTH // HEADS
VOCABULARY = 512

_DEPTH = frozenset(
    {
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
        *("num_decoder_layers", "num_encoder_layers", "depth", "num_single_layers", "num_global_layers"),
        *("num_refiner_layers", "num_blocks", "num_dit_blocks", "num_mmdit_layers", "num_single_dit_layers"),
    }
)
_SIZES: Mapping[str, int] = {
    **dict.fromkeys(
        (
            *("hidden_size", "d_model", "n_embd", "embed_dim", "projection_dim", "projection_size"),
            *("out_hidden_size", "lru_width", "vision_output_dim", "projector_input_dim"),
            *("projector_output_dim", "pooler_hidden_size", "word_embed_proj_dim", "output_hidden_size"),
            *("codevector_dim", "proj_codevector_dim", "classifier_proj_size", "output_channels"),
            *("embedding_size", "cross_attention_hidden_size"),
        ),
        WIDTH,
    ),
    **dict.fromkeys(
        (
            *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
            *("shared_intermediate_size", "intermediate_size_mlp", "encoder_ffn_dim", "decoder_ffn_dim"),
            *("ffn_dim", "d_ff", "mlp_dim", "n_inner"),
        ),
        2 * WIDTH,
    ),
    **dict.fromkeys(
        (
            *("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "attention_heads"),
            *("decoder_attention_heads", "linear_num_key_heads", "linear_num_value_heads"),
        ),
        HEADS,
    ),
    **dict.fromkeys(
        (
            *("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "linear_key_head_dim"),
            *("linear_value_head_dim", "global_head_dim", "mamba_d_head", "query_pre_attn_scalar"),
        ),
        HEAD,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 32),
    **dict.fromkeys(("state_size", "mamba_d_state", "time_step_rank", "mamba_dt_rank"), 8),
    "qk_rope_head_dim": HEAD // 2,
    "rotary_dim": HEAD,
    "mamba_n_heads": 2 * WIDTH // HEAD,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_negatives": 8,
    "num_codevectors_per_group": 16,
    "tokens_per_second": 2,
    "num_position_embeddings": 64,
    "position_embedding_size": 256,
}
_DERIVED = frozenset(
    {
        *("qk_head_dim", "ffn_hidden_size", "attention_layers", "moe_layers", "no_rope_layers", "scale"),
        *("num_pos_feats", "transformers_version", "_name_or_path", "dtype", "_attn_implementation"),
        *("label2id", "out_features", "out_indices", "stage_names", "per_layer_config"),
        *("_out_features", "_out_indices"),
    }
)
_LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "block_types")


def shrink(family: Any, config: Mapping[str, Any], model_class: str | None = None) -> dict[str, Any]:
    """Return a small configuration of the same structure.

    Args:
        family: The family that builds it. Where it has them, ``complete(config, model_class)`` returns the
            configuration with every key, and ``small(config)`` what the general rules get wrong: dotted keys
            and their small values.
        config: A raw configuration.
        model_class: Class that will be built; None asks the family.

    Raises:
        ModelError: The configuration is refused by its class.
    """
    complete: Callable[..., dict[str, Any]] | None = getattr(family, "complete", None)
    full = dict(config) if complete is None else complete(config, model_class or family.model_class(config))
    reduced = _reduce(full)
    for key in ("architectures", "model_type", "_class_name"):
        if key in config:
            reduced[key] = config[key]
    small: Callable[..., Mapping[str, Any]] | None = getattr(family, "small", None)
    for path, value in (small(config) if small is not None else {}).items():
        keys = path.split(".")
        # One card serves several classes: what this class does not have is not for it.
        if complete is None or keys[0] in full:
            _assign(reduced, keys, value)
    return reduced


def _assign(target: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        target = target.setdefault(key, {})
    target[path[-1]] = value


def _reduce(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = _layers(config)
    reduced: dict[str, Any] = {}
    for key, value in config.items():
        if key in _DERIVED or value is None:
            continue
        if key == "id2label":
            reduced["num_labels"] = min(len(value), 10)
        elif isinstance(value, Mapping) and (key.endswith("_config") or "model_type" in value):
            reduced[key] = _reduce(value)
        elif key.startswith("rope_") and isinstance(value, Mapping):
            reduced[key] = _rope(value)
        elif key in _LAYER_LISTS and isinstance(value, list):
            reduced[key] = [value[index] for index in layers]
        elif key in _DEPTH and isinstance(value, int):
            reduced[key] = min(value, len(layers))
        else:
            reduced[key] = _value(key, value, config)
    _shrink_vocabulary(reduced)
    return reduced


def _layers(config: Mapping[str, Any]) -> list[int]:
    """Return which layers survive: two of each kind, in their order."""
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(kinds, list) and kinds:
        taken: dict[Any, int] = {}
        kept = []
        for index, kind in enumerate(kinds):
            taken[kind] = taken.get(kind, 0) + 1
            if taken[kind] <= 2:
                kept.append(index)
        return kept if len(kept) > 1 else [0, 0]
    return [0, 1, 2] if config.get("first_k_dense_replace") else [0, 1]


def _value(key: str, value: Any, config: Mapping[str, Any]) -> Any:
    if key in ("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads") and isinstance(
        value, int
    ):
        heads = config.get("num_attention_heads", config.get("n_head"))
        return HEADS if value == heads else 1 if value == 1 else 2
    if key in _SIZES and isinstance(value, int) and not isinstance(value, bool):
        return min(value, _SIZES[key])
    if key == "image_size" and isinstance(config.get("patch_size"), int):
        return min(value, 4 * config["patch_size"]) if isinstance(value, int) else value
    if key == "first_k_dense_replace":
        return min(value, 1)
    if key in ("max_position_embeddings", "n_positions", "sliding_window", "attention_chunk_size"):
        return min(value, 128) if isinstance(value, int) else value
    if key in ("fullatt_block_indexes", "deepstack_visual_indexes", "global_attn_indexes"):
        return [1]
    return value


def _rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings: sections must add up to half a head; long-context factors are per frequency."""
    reduced = dict(value)
    for key, item in value.items():
        if isinstance(item, Mapping):
            reduced[key] = _rope(item)
        elif key == "mrope_section":
            reduced[key] = [HEAD // 2 - 4, 2, 2]
        elif key in ("long_factor", "short_factor") and isinstance(item, list):
            reduced[key] = item[: HEAD // 2]
    return reduced


def _shrink_vocabulary(config: dict[str, Any]) -> None:
    """Cut the vocabulary and move special tokens below its new end, each to a place of its own."""
    size = config.get("vocab_size")
    if isinstance(size, int) and size > VOCABULARY:
        config["vocab_size"] = VOCABULARY
    place = VOCABULARY - 1
    moved: dict[int, int] = {}
    for key, value in config.items():
        if not key.endswith(("_token_id", "_token_index")):
            continue
        if isinstance(value, list):
            config[key] = [min(item, VOCABULARY - 40) for item in value]
        elif isinstance(value, int) and value >= VOCABULARY - 32:
            if value not in moved:
                moved[value] = place
                place -= 1
            config[key] = moved[value]


def synthesise(
    specs: Iterable[TensorSpec], generator: Generator, *, compute_dtype: str | None = None
) -> dict[str, Tensor]:
    """Return one micro-batch on the CPU.

    Args:
        specs: What the family says a micro-batch is.
        generator: Every value comes from it, in the order of ``specs``.
        compute_dtype: dtype of floating tensors whose spec says ``compute``; None keeps the spec's.
    """
    return {spec.name: _draw(spec, generator, compute_dtype) for spec in specs}


def _draw(spec: TensorSpec, generator: Generator, compute_dtype: str | None) -> Tensor:
    import torch

    dtype = getattr(torch, compute_dtype if spec.compute and compute_dtype else spec.dtype)
    shape = spec.shape
    if spec.fill in ("tokens", "labels"):
        drawn = torch.randint(spec.low, spec.high or 2, shape, generator=generator)
    elif spec.fill == "timesteps" and not dtype.is_floating_point:
        drawn = torch.randint(0, spec.high or 1000, shape, generator=generator)
    elif spec.fill in ("uniform", "timesteps"):
        drawn = torch.rand(shape, generator=generator)
    elif spec.fill == "normal":
        drawn = torch.randn(shape, generator=generator)
    elif spec.fill == "mask":
        drawn = torch.ones(shape)
    elif spec.fill == "positions":
        drawn = torch.arange(shape[-1]).expand(shape).clone()
    else:
        drawn = torch.zeros(shape)
    drawn = drawn.to(dtype)
    if spec.values:
        _write(drawn, spec)
    return drawn


def _write(drawn: Tensor, spec: TensorSpec) -> None:
    import torch

    values = torch.tensor(spec.values, dtype=drawn.dtype)
    drawn.view(drawn.shape[0], -1)[:, : values.numel()] = values
