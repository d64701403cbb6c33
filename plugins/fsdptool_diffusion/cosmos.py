"""NVIDIA's Cosmos: 1, Predict 2 and 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fsdptool.families.protocol import TensorSpec
from fsdptool_diffusion.base import Denoiser, Geometry, floats, one_sample, settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe

Specs = tuple[TensorSpec, ...]


class Cosmos(Denoiser):
    """Cosmos 1 and Predict 2."""

    geometry = Geometry(temporal=8, height=704, width=1280, frames=121)

    def latent_channels(self, full: Mapping[str, Any]) -> int:
        """Return what the VAE makes; video-to-world models take a mask channel besides."""
        return int(full["out_channels"])

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return T5 states."""
        return (floats("encoder_hidden_states", shape[0], self.tokens(recipe), full["text_embed_dim"]),)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with an empty condition and no padding."""
        config = settings(model)
        arguments: dict[str, Any] = {}
        if config.in_channels > noisy.shape[1]:
            arguments["condition_mask"] = noisy.new_zeros(noisy.shape[0], 1, *noisy.shape[2:])
        if config.concat_padding_mask:
            arguments["padding_mask"] = noisy.new_zeros(1, 1, noisy.shape[3] * 8, noisy.shape[4] * 8)
        with _resizing():
            result: Tensor = model(
                hidden_states=noisy,
                timestep=time,
                encoder_hidden_states=batch["encoder_hidden_states"],
                fps=16,
                return_dict=False,
                **arguments,
            )[0]
        return result


@contextmanager
def _resizing() -> Iterator[None]:
    """Give diffusers' Cosmos the one function of torchvision it calls, where torchvision is missing.

    diffusers 0.42 resizes the padding mask by ``torchvision.transforms`` and fails with a NameError
    without it; nearest-neighbour interpolation of torch gives the same mask.
    """
    from types import SimpleNamespace

    from diffusers.models.transformers import transformer_cosmos
    from torch.nn.functional import interpolate

    if hasattr(transformer_cosmos, "transforms"):
        yield
        return

    def resize(image: Tensor, size: list[int], **_: Any) -> Tensor:
        return interpolate(image, size=size, mode="nearest")

    transformer_cosmos.transforms = SimpleNamespace(
        functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )
    try:
        yield
    finally:
        del transformer_cosmos.transforms


class Cosmos3(Denoiser):
    """Cosmos 3, text to image or video: one packed sequence of a caption and a video.

    The caption's tokens see those before them, the video's tokens see everything; both have weights of
    their own in every layer (diffusers 0.42, transformer_cosmos3.py and pipeline_cosmos3_omni.py). The
    heads for sound and actions and the language head stay idle.
    """

    geometry = Geometry(spatial=16, temporal=4, patch=1, height=720, width=1280, frames=189)

    def latent_channels(self, full: Mapping[str, Any]) -> int:
        """Return what Wan 2.2's small VAE makes."""
        return int(full["latent_channel"])

    def latent_shape(self, full: Mapping[str, Any], recipe: Recipe) -> tuple[int, ...]:
        """Return channels, frames, rows and columns.

        Raises:
            ConfigError: The sizes do not divide, or the micro-batch is not one sample.
        """
        one_sample(self.name, recipe, "samples packed into one call would attend to one another")
        return super().latent_shape(full, recipe)

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the caption's tokens."""
        tokens = (shape[0], self.tokens(recipe))
        return (TensorSpec("input_ids", tokens, "int64", "tokens", high=full["vocab_size"]),)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with the caption first and every frame noisy."""
        import torch

        config = settings(model)
        frames, *sides = noisy.shape[2:]
        grid = (frames, *(-(-side // config.latent_patch_size) for side in sides))
        caption = batch["input_ids"][0]
        words, patches = caption.shape[0], grid[0] * grid[1] * grid[2]
        places = torch.arange(words + patches, device=noisy.device)
        result: Tensor = model(
            input_ids=caption,
            text_indexes=places[:words],
            position_ids=self.positions(config, words, grid, noisy.device),
            und_len=words,
            sequence_length=words + patches,
            vision_tokens=[noisy],
            vision_token_shapes=[grid],
            vision_sequence_indexes=places[words:],
            vision_mse_loss_indexes=places[words:],
            vision_timesteps=self.steps(time).expand(patches),
            vision_noisy_frame_indexes=[torch.arange(frames, device=noisy.device)],
            return_dict=False,
        )[0][0]
        return result

    def positions(self, config: Any, words: int, grid: tuple[int, ...], device: Any) -> Tensor:
        """Return (time, row, column) of every token, [3, tokens], at the model's own frame rate.

        Integers: FSDP2 would cast fractions to bf16, which cannot tell 15000 from 15001.
        """
        import torch

        start = words + config.unified_3d_mrope_temporal_modality_margin
        corner = 0 if config.unified_3d_mrope_reset_spatial_ids else start
        axes = [
            torch.arange(size, device=device) + first
            for size, first in zip(grid, (start, corner, corner), strict=True)
        ]
        cells = torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)
        return torch.cat((torch.arange(words, device=device).expand(3, -1), cells), dim=1)
