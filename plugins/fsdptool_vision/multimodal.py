"""Models that read images or speech with text: micro-batches hold one of these before the text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.bases import TransformersFamily
from fsdptool.families.bases.batches import DEFAULT_LENGTH, pixels, vocabulary
from fsdptool.families.objectives import CausalLM, ModuleLoss
from fsdptool.families.objectives.common import inputs
from fsdptool.families.protocol import Objective, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from fsdptool.records.recipe import Recipe

IMAGE_SIZE = 448
"""Pixels, each way, for models that take images of any size and recipes that name none."""


@dataclass(frozen=True, slots=True)
class Image:
    """What one image, or one clip of speech, adds to each sample: its tokens in the text, further tensors."""

    tokens: int
    specs: tuple[TensorSpec, ...]
    types: str | None = None
    """Name of the tensor that marks image tokens by 1, where the model wants one."""
    token: str = "image_token_id"
    """Key of the configuration that holds the placeholder's token."""
    takes: str = "an image takes"
    """What it is and its verb, for messages."""
    sized: bool = False
    """Whether its tokens follow from the recipe's height and width."""


def _floats(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "float32", "normal", compute=True)


def _fixed(config: Any, recipe: Recipe, tokens: int, types: str | None = None) -> Image:
    return Image(tokens, (pixels(config.vision_config, recipe.batch.micro_batch),), types)


def _llava(config: Any, recipe: Recipe) -> Image:
    vision = config.vision_config
    return _fixed(config, recipe, (vision.image_size // vision.patch_size) ** 2)


def _gemma3(config: Any, recipe: Recipe) -> Image:
    return _fixed(config, recipe, int(config.mm_tokens_per_image), "token_type_ids")


def _paligemma(config: Any, recipe: Recipe) -> Image:
    vision = config.vision_config
    return _fixed(config, recipe, (vision.image_size // vision.patch_size) ** 2, "token_type_ids")


def _llama4(config: Any, recipe: Recipe) -> Image:
    vision = config.vision_config
    grid = vision.image_size // vision.patch_size
    return _fixed(config, recipe, int(grid**2 * vision.pixel_shuffle_ratio**2))


def _sides(recipe: Recipe, unit: int) -> tuple[int, int]:
    """Return rows and columns of units of ``unit`` pixels."""
    sides = []
    for name, given in (("height", recipe.batch.height), ("width", recipe.batch.width)):
        side = given or max(IMAGE_SIZE // unit, 1) * unit
        if side % unit:
            raise ConfigError(f"batch.{name} is {side}; this model needs a multiple of {unit} pixels")
        sides.append(side // unit)
    return sides[0], sides[1]


def _qwen(config: Any, recipe: Recipe) -> Image:
    vision, batch = config.vision_config, recipe.batch.micro_batch
    merge = vision.spatial_merge_size
    rows, columns = _sides(recipe, vision.patch_size * merge)
    patches = rows * columns * merge**2
    channels = getattr(vision, "in_channels", None) or getattr(vision, "in_chans", 3)
    width = channels * vision.temporal_patch_size * vision.patch_size**2
    grid = (1, rows * merge, columns * merge)
    return Image(
        rows * columns,
        (
            _floats("pixel_values", batch, patches, width),
            TensorSpec("image_grid_thw", (batch, 3), "int64", "constant", values=grid),
        ),
        "mm_token_type_ids",
        sized=True,
    )


def _mistral3(config: Any, recipe: Recipe) -> Image:
    vision, batch = config.vision_config, recipe.batch.micro_batch
    unit = vision.patch_size * config.spatial_merge_size
    rows, columns = _sides(recipe, unit)
    size = (rows * unit, columns * unit)
    return Image(
        rows * columns,
        (
            _floats("pixel_values", batch, vision.num_channels, *size),
            TensorSpec("image_sizes", (batch, 2), "int64", "constant", values=size),
        ),
        sized=True,
    )


def _gemma4(config: Any, recipe: Recipe) -> Image:
    vision, batch = config.vision_config, recipe.batch.micro_batch
    pool = vision.pooling_kernel_size
    rows, columns = _sides(recipe, vision.patch_size * pool)
    height, width = rows * pool, columns * pool
    places = tuple(part for y in range(height) for x in range(width) for part in (x, y))
    return Image(
        rows * columns,
        (
            _floats("pixel_values", batch, height * width, 3 * vision.patch_size**2),
            TensorSpec("image_position_ids", (batch, height * width, 2), "int64", "constant", values=places),
        ),
        "mm_token_type_ids",
        sized=True,
    )


def _mllama(config: Any, recipe: Recipe) -> Image:
    vision, batch = config.vision_config, recipe.batch.micro_batch
    tiles, side = vision.max_num_tiles, vision.image_size
    count = recipe.batch.sequence_length or DEFAULT_LENGTH
    # Images enter through cross-attention: one token stands for them in the text.
    return Image(
        1,
        (
            _floats("pixel_values", batch, 1, tiles, vision.num_channels, side, side),
            TensorSpec("aspect_ratio_ids", (batch, 1), "int64", "constant", values=(1,)),
            TensorSpec("aspect_ratio_mask", (batch, 1, tiles), "int64", "mask"),
            TensorSpec("cross_attention_mask", (batch, count, 1, tiles), "int64", "mask"),
        ),
    )


def _internvl(config: Any, recipe: Recipe) -> Image:
    """One tile of a picture (448 x 448 pixels in every published size)."""
    vision = config.vision_config
    height, width = vision.image_size
    rows, columns = height // vision.patch_size[0], width // vision.patch_size[1]
    tokens = int(rows * columns * config.downsample_ratio**2)
    return Image(tokens, (_floats("pixel_values", recipe.batch.micro_batch, 3, height, width),))


def _llava_next(config: Any, recipe: Recipe) -> Image:
    """A square picture of two tiles each way, and the whole in one more; each row of tokens ends with a
    token of its own (``pack_image_features``)."""
    vision, batch = config.vision_config, recipe.batch.micro_batch
    side, patches = vision.image_size, vision.image_size // vision.patch_size
    tiles = ((patches * 2) * (patches * 2 + 1)) + patches**2
    return Image(
        tiles,
        (
            _floats("pixel_values", batch, 5, 3, side, side),
            TensorSpec("image_sizes", (batch, 2), "int64", "constant", values=(2 * side, 2 * side)),
        ),
    )


def _idefics3(config: Any, recipe: Recipe) -> Image:
    """One tile of a picture."""
    vision = config.vision_config
    tokens = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
    side = vision.image_size
    return Image(tokens, (_floats("pixel_values", recipe.batch.micro_batch, 1, 3, side, side),))


def _lfm2(config: Any, recipe: Recipe) -> Image:
    vision, batch = config.vision_config, recipe.batch.micro_batch
    side = int(vision.num_patches**0.5)
    width = vision.num_channels * vision.patch_size**2
    return Image(
        (side // config.downsample_factor) ** 2,
        (
            _floats("pixel_values", batch, side * side, width),
            TensorSpec("spatial_shapes", (batch, 2), "int64", "constant", values=(side, side)),
            TensorSpec("pixel_attention_mask", (batch, side * side), "int64", "mask"),
        ),
    )


def _audio(config: Any, recipe: Recipe, tokens: int, *further: TensorSpec) -> Image:
    """Return 30 seconds of speech, as Whisper's encoder takes it: two frames to each of its positions."""
    audio = config.audio_config
    shape = (recipe.batch.micro_batch, audio.num_mel_bins, 2 * audio.max_source_positions)
    return Image(
        tokens,
        (_floats("input_features", *shape), *further),
        token="audio_token_id",
        takes="30 seconds of speech take",
    )


def _qwen2_audio(config: Any, recipe: Recipe) -> Image:
    positions = config.audio_config.max_source_positions
    mask = TensorSpec("feature_attention_mask", (recipe.batch.micro_batch, 2 * positions), "int64", "mask")
    return _audio(config, recipe, (positions - 2) // 2 + 1, mask)


def _voxtral(config: Any, recipe: Recipe) -> Image:
    audio = config.audio_config
    return _audio(config, recipe, audio.max_source_positions * audio.hidden_size // audio.intermediate_size)


_IMAGES: Mapping[str, Callable[[Any, Recipe], Image]] = {
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm4v": _qwen,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "lfm2_vl": _lfm2,
    "llama4": _llama4,
    "llava": _llava,
    "llava_next": _llava_next,
    "mistral3": _mistral3,
    "mllama": _mllama,
    "paligemma": _paligemma,
    "qwen2_5_vl": _qwen,
    "qwen2_audio": _qwen2_audio,
    "qwen2_vl": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_vl_moe": _qwen,
    "voxtral": _voxtral,
}
"""Type of a model to what stands before its text: a picture, or speech."""


class Multimodal(TransformersFamily):
    """Causal language modelling over one image, or one clip of speech, and a text per sample."""

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return text with placeholders at its head, and the image or speech, if the model takes any.

        Raises:
            ConfigError: The sequence is too short for the image or the speech.
        """
        configuration = self.config_object(config, self.model_class(config))
        seen = getattr(configuration, "vision_config", None) or getattr(configuration, "audio_config", None)
        if seen is None or "inputs" in recipe.objective.options:
            return super().batch_spec(config, recipe)
        image = _IMAGES[configuration.model_type](configuration, recipe)
        wanted = recipe.batch.sequence_length
        length = wanted or max(DEFAULT_LENGTH, image.tokens + DEFAULT_LENGTH // 4)
        if length < image.tokens + 2:
            smaller = ", or a smaller image (batch.height, batch.width)" if image.sized else ""
            raise ConfigError(
                f"batch.sequence_length is {length}, but {image.takes} {image.tokens} tokens of it",
                help=f"use at least {image.tokens + 2}{smaller}",
            )
        shape = (recipe.batch.micro_batch, length)
        placeholders = (int(getattr(configuration, image.token)),) * image.tokens
        # Text tokens stay off every special token: a stray placeholder has no image.
        names = ("image_token_id", "video_token_id", "audio_token_id")
        specials = [token for name in names if isinstance(token := getattr(configuration, name, None), int)]
        high = min([vocabulary(configuration), *(token for token in specials if token > 256)])
        low = max([0, *(token + 1 for token in specials if token <= 256)])
        specs = [
            TensorSpec("input_ids", shape, "int64", "tokens", high=high, low=low, values=placeholders),
            TensorSpec("labels", shape, "int64", "labels", high=high, values=(-100,) * image.tokens),
            *image.specs,
        ]
        if image.types is not None:
            specs.append(TensorSpec(image.types, shape, "int64", "constant", values=(1,) * image.tokens))
        return tuple(specs)

    def untouched(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the card's prefixes; ``{last}`` stands for the vision tower's last layer."""
        prefixes = super().untouched(config)
        if not prefixes:
            return prefixes
        vision = self.config_object(config, self.model_class(config)).vision_config
        return tuple(prefix.format(last=vision.num_hidden_layers - 1) for prefix in prefixes)

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return causal language modelling over images and text, and the loss that the class computes."""
        return {CausalLM.name: partial(CausalLM, arguments=flat_patches), ModuleLoss.name: ModuleLoss}


def flat_patches(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the model's arguments; Qwen's patches follow one another over all images."""
    arguments = inputs(batch)
    if "image_grid_thw" in arguments:
        arguments["pixel_values"] = arguments["pixel_values"].flatten(0, 1)
    return arguments
