"""Micro-batches: of transformers models by objective, of denoisers, and as a recipe lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError, ModelError
from fsdptool.families.protocol import Fill, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from fsdptool.records.recipe import Recipe


DEFAULT_LENGTH = 512
"""Tokens of a text sample when the recipe names none and the model allows as many."""

_TABLES = ("n_positions", "max_position_embeddings", "max_target_positions", "n_ctx")
"""Names under which configurations keep the size of their position table."""

_LEARNED = frozenset(
    {
        *("albert", "bart", "bert", "big_bird", "biogpt", "blenderbot", "blenderbot-small", "camembert"),
        *("clip", "clip_text_model", "codegen", "deberta", "distilbert", "electra", "gpt2", "gpt_neo"),
        *("imagegpt", "longformer", "marian", "mbart", "mpnet", "opt", "pegasus", "roberta", "siglip"),
        *("siglip_text_model", "whisper", "xlm-roberta", "xlm-roberta-xl"),
    }
)
"""Model types whose positions are rows of a table: a longer sequence is an index error there. Rotary
and relative models run beyond ``max_position_embeddings``."""


def text_config(config: Any) -> Any:
    """Return the part of a configuration object that describes its text model."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        inner = getattr(config, name, None)
        if inner is not None:
            return text_config(inner)
    return config


def vocabulary(config: Any) -> int:
    """Return the number of tokens of a configuration object.

    Raises:
        ModelError: It names none.
    """
    text = text_config(config)
    for name in ("vocab_size", "n_vocab", "src_vocab_size"):
        size = getattr(text, name, None)
        if isinstance(size, int) and size > 0:
            return size
    raise ModelError(
        f"{type(config).__name__} has no vocab_size",
        help="write a family plugin for the model",
    )


def positions(config: Any) -> int | None:
    """Return how many positions the model has rows for, or None if it computes them."""
    text = text_config(config)
    if getattr(text, "model_type", "") not in _LEARNED:
        return None
    sizes = [getattr(text, name, None) for name in _TABLES]
    size = next((size for size in sizes if isinstance(size, int) and size > 0), None)
    if size is not None and text.model_type in ("roberta", "xlm-roberta", "camembert", "xlm-roberta-xl"):
        return size - 2  # positions start behind the padding index
    return size


def length(config: Any, recipe: Recipe) -> int:
    """Return the tokens per sample.

    Raises:
        ConfigError: The recipe asks for more than the model has positions for.
    """
    limit = positions(config)
    wanted = recipe.batch.sequence_length
    if wanted is None:
        return min(DEFAULT_LENGTH, limit) if limit is not None else DEFAULT_LENGTH
    if wanted < 2:
        raise ConfigError(f"batch.sequence_length is {wanted}; a sample needs at least two tokens")
    if limit is not None and wanted > limit:
        raise ConfigError(
            f"batch.sequence_length is {wanted}, but {type(config).__name__} has {limit} positions",
            help=f"use at most {limit}",
        )
    return wanted


def causal(config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
    """Decoder: tokens, labels aligned with them, and positions where documents are packed."""
    shape = (recipe.batch.micro_batch, length(config, recipe))
    size = vocabulary(config)
    specs = [
        TensorSpec("input_ids", shape, "int64", "tokens", high=size),
        TensorSpec("labels", shape, "int64", "labels", high=size),
    ]
    if packs(config, recipe):
        specs.append(TensorSpec("position_ids", shape, "int64", "positions"))
    return tuple(specs)


_NO_POSITIONS = frozenset(("blt", "cpmant", "mpt", "reformer", "transfo-xl", "xlm", "xlnet"))
"""Model types that cannot be told where documents begin; BLT attends to patches, which positions do not
describe (transformers 5.23)."""

_RECURRENT = frozenset(
    {
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
        *("kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid"),
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba"),
        *("zamba2",),
    }
)
"""Model types with layers that hand a state on from token to token (transformers 5.23). Their kernels on
CUDA could reset it (``seq_idx``); the code that runs elsewhere cannot."""

_STATEFUL_LAYERS = frozenset(
    {
        *("linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid"),
        *("compressed_sparse_attention", "heavily_compressed_attention"),
    }
)
"""Kinds of layers, as configurations list them, that mix tokens whatever the attention mask says."""


def separates(config: Any) -> bool:
    """Say whether the model can keep packed documents apart, told by ``position_ids``."""
    text = text_config(config)
    if getattr(text, "model_type", "") in _NO_POSITIONS | _RECURRENT:
        return False
    lists = (getattr(text, name, None) for name in ("layer_types", "layers_block_type", "block_types"))
    return not any(_STATEFUL_LAYERS.intersection(kinds) for kinds in lists if isinstance(kinds, list | tuple))


def packs(config: Any, recipe: Recipe) -> bool:
    """Say whether the batch carries ``position_ids`` that tell packed documents apart."""
    return recipe.data.packing and recipe.data.document_mask and separates(config)


def masked(config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
    """Encoder: tokens, their mask, labels per token."""
    shape = (recipe.batch.micro_batch, length(config, recipe))
    size = vocabulary(config)
    return (
        TensorSpec("input_ids", shape, "int64", "tokens", high=size),
        TensorSpec("attention_mask", shape, "int64", "mask"),
        TensorSpec("labels", shape, "int64", "labels", high=size),
    )


def token_classes(config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
    """Encoder with a class per token."""
    ids, mask, labels = masked(config, recipe)
    return ids, mask, TensorSpec("labels", labels.shape, "int64", "labels", high=config.num_labels)


def sequence_to_sequence(config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
    """Encoder-decoder of text: both sides are as long as the recipe says."""
    return masked(config, recipe)


def classes(config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
    """Text classifier, or image classifier where the configuration speaks of pixels."""
    batch = recipe.batch.micro_batch
    labels = TensorSpec("labels", (batch,), "int64", "labels", high=max(int(config.num_labels), 1))
    if getattr(config, "image_size", None):
        return (pixels(config, batch), labels)
    return (*masked(config, recipe)[:2], labels)


def pixels(config: Any, batch: int) -> TensorSpec:
    """Images at the size the configuration names."""
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else (size[0], size[-1])
    channels = getattr(config, "num_channels", 3)
    return TensorSpec("pixel_values", (batch, channels, height, width), "float32", "normal", compute=True)


def pairs(config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
    """Images with their texts. A lone pair has no negatives, so at least the recipe's batch is used."""
    batch = recipe.batch.micro_batch
    text = config.text_config
    wanted = recipe.batch.sequence_length
    limit = text.max_position_embeddings
    if wanted is not None and wanted > limit:
        raise ConfigError(
            f"batch.sequence_length is {wanted}, but the text model has {limit} positions",
            help=f"use at most {limit}",
        )
    shape = (batch, wanted or limit)
    return (
        TensorSpec("input_ids", shape, "int64", "tokens", high=text.vocab_size),
        TensorSpec("attention_mask", shape, "int64", "mask"),
        pixels(config.vision_config, batch),
    )


def features(config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
    """Encoder without a head: inputs, and a target of the last hidden state's shape."""
    batch = recipe.batch.micro_batch
    width = int(text_config(config).hidden_size)
    if getattr(config, "image_size", None) and not hasattr(config, "vocab_size"):
        image = pixels(config, batch)
        patch = config.patch_size
        count = (image.shape[2] // patch) * (image.shape[3] // patch) + 1
        return image, TensorSpec("target", (batch, count, width), "float32", "normal")
    ids, mask, _ = masked(config, recipe)
    target = (*ids.shape, width)
    if any(name.endswith("WithProjection") for name in config.architectures or ()):
        target = (batch, int(config.projection_dim))
    return ids, mask, TensorSpec("target", target, "float32", "normal")


Sample = Mapping[str, "Tensor"]

SOURCES: Mapping[str, str] = {
    "encoder_hidden_states": "prompt_embeds",
    "encoder_hidden_states_t5": "prompt_embeds_t5",
    "encoder_hidden_states_llama3": "prompt_embeds_llama3",
    "pooled_embeds": "pooled_prompt_embeds",
    "pooled_projections": "pooled_prompt_embeds",
    "text_embeds": "pooled_prompt_embeds",
    "encoder_attention_mask": "prompt_attention_mask",
    "encoder_hidden_states_mask": "prompt_attention_mask",
}
"""Where a denoiser's argument comes from, by the names pipelines give what they encode."""

SAMPLINGS = ("uniform", "logit_normal")


def time(uniform: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return times in [0, 1) from numbers in [0, 1), monotonously.

    ``timestep_sampling`` ``uniform``, or ``logit_normal`` with ``logit_mean`` and ``logit_std`` (Esser
    et al. 2024, section 3.1); then ``shift`` s moves mass towards noise by s t / (1 + (s - 1) t) (their
    section 5.3.2).

    Args:
        uniform: Any shape, fp64.
        options: The objective's options.

    Raises:
        ConfigError: An option has an invalid value.
    """
    import torch

    sampling = options.get("timestep_sampling", "logit_normal")
    mean, deviation = float(options.get("logit_mean", 0.0)), float(options.get("logit_std", 1.0))
    shift = float(options.get("shift", 1.0))
    if sampling not in SAMPLINGS:
        raise ConfigError(f"timestep_sampling is {sampling!r}", help=f"choose {' or '.join(SAMPLINGS)}")
    if shift <= 0 or deviation <= 0:
        raise ConfigError("shift and logit_std must be positive")
    levels = uniform.double()
    if sampling == "logit_normal":
        inner = levels.clamp(1e-9, 1 - 1e-9)
        normal = torch.special.ndtri(inner)
        levels = torch.sigmoid(mean + deviation * normal)
    return shift * levels / (1 + (shift - 1) * levels)


def stacked(samples: Sequence[Sample], name: str) -> Tensor:
    """Return one tensor of all samples; shorter texts are filled with zeros at their end.

    Raises:
        ConfigError: A sample has no such tensor.
    """
    import torch

    if missing := [number for number, sample in enumerate(samples) if name not in sample]:
        raise ConfigError(
            f"cached sample {missing[0]} has no {name}",
            help=f"it has: {', '.join(sorted(samples[missing[0]]))}; recreate the cache",
        )
    tensors = [sample[name] for sample in samples]
    longest = max(tensor.shape[0] if tensor.dim() else 0 for tensor in tensors)
    return torch.stack([_filled(tensor, longest) for tensor in tensors])


def _filled(tensor: Tensor, length: int) -> Tensor:
    import torch

    if not tensor.dim() or tensor.shape[0] == length:
        return tensor
    return torch.cat((tensor, tensor.new_zeros(length - tensor.shape[0], *tensor.shape[1:])))


_KEYS = frozenset({"shape", "dtype", "high", "low", "values", "flat"})


def listed_inputs(listed: Any, micro_batch: int) -> tuple[TensorSpec, ...]:
    """Return the tensors that ``objective.options.inputs`` lists.

    Each name has the ``shape`` of one sample and a ``dtype``; integers ``high`` and ``low``, between which
    they are drawn; ``values``, the first entries of each sample; and ``flat``, which makes the samples follow
    one another along the first dimension.

    Raises:
        ConfigError: The list is not one of tensors.
    """
    if not isinstance(listed, Mapping) or not listed:
        raise ConfigError("objective.options.inputs must map names to tensors", help=_EXAMPLE)
    specs = []
    for name, item in listed.items():
        known = isinstance(item, Mapping) and set(item) <= _KEYS and "shape" in item
        shape = item["shape"] if known else None
        if not isinstance(shape, Sequence) or not all(isinstance(size, int) and size > 0 for size in shape):
            raise ConfigError(f"objective.options.inputs.{name} is not a tensor", help=_EXAMPLE)
        dtype = str(item.get("dtype", "float32"))
        spec = described(str(name), (micro_batch, *shape), dtype, item.get("high"))
        values = item.get("values", ())
        numbers = isinstance(values, Sequence) and not isinstance(values, str)
        if not numbers or not all(isinstance(value, int | float) for value in values):
            raise ConfigError(
                f"objective.options.inputs.{name}.values is not a list of numbers", help=_EXAMPLE
            )
        low = item.get("low", 0)
        # Without a bound to draw below, integers are zero behind the values that are given.
        fill: Fill = "constant" if spec.fill == "tokens" and spec.high is None and values else spec.fill
        specs.append(replace(spec, values=tuple(values), low=low, fill=fill))
    return tuple(specs)


_EXAMPLE = "for example inputs: {x: {shape: [3, 32, 32]}, labels: {shape: [], dtype: int64, high: 10}}"


def described(name: str, shape: tuple[int, ...], dtype: str, high: int | None) -> TensorSpec:
    """Return a tensor's description; integers are drawn below ``high``, floats from a normal distribution.

    Raises:
        ConfigError: torch has no such dtype.
    """
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"{name}: torch has no dtype {dtype!r}", help="for example float32 or int64")
    if kind is torch.bool:
        return TensorSpec(name, shape, dtype, "mask")
    if kind.is_floating_point:
        return TensorSpec(name, shape, dtype, "normal", compute=True)
    return TensorSpec(name, shape, dtype, "labels" if name == "labels" else "tokens", high=high)
