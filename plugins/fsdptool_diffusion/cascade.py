"""Cascades that predict noise on a cosine schedule: Stable Cascade and DeepFloyd IF."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.objectives.diffusion import Epsilon
from fsdptool.families.protocol import Objective, TensorSpec
from fsdptool_diffusion.base import TRAIN_STEPS, Denoiser, Geometry, floats

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe

Specs = tuple[TensorSpec, ...]


class CosineEpsilon(Denoiser):
    """A denoiser trained to predict noise on the cosine schedule."""

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return noise prediction with that schedule as its default."""
        return {Epsilon.name: partial(Epsilon, denoise=self.denoise, schedule="cosine")}


class StableCascade(CosineEpsilon):
    """Stable Cascade: stage C in latents of 42.67 pixels, stage B in latents of 4.

    Stage C is told CLIP's text and an image's embedding, stage B pooled text and stage C's latents.
    """

    exact_inputs = ()  # embeds times in the dtype they come in
    geometry = Geometry(spatial=4, patch=16)
    text_tokens = 77
    resolution = 42.67

    def small(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the card's small values; stage B has its own."""
        found: Mapping[str, Any] = self.options["small_b" if config.get("effnet_in_channels") else "small"]
        return found

    def latent_shape(self, full: Mapping[str, Any], recipe: Recipe) -> tuple[int, ...]:
        """Return channels, rows and columns; stage C's sides are rounded up, as the pipeline does.

        Raises:
            ConfigError: A side is not positive, or stage B cannot halve it often enough.
        """
        if full.get("effnet_in_channels"):
            return super().latent_shape(full, recipe)
        return (int(full["in_channels"]), *self.coarse(recipe))

    def coarse(self, recipe: Recipe) -> tuple[int, int]:
        """Return rows and columns of stage C's latents."""
        batch = recipe.batch
        height, width = batch.height or self.geometry.height, batch.width or self.geometry.width
        for name, given in (("height", height), ("width", width)):
            if given <= 0:
                raise ConfigError(f"batch.{name} is {given}; it must be positive")
        return ceil(height / self.resolution), ceil(width / self.resolution)

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return what the configuration has an input for."""
        specs = [floats("clip_text_pooled", shape[0], 1, full["clip_text_pooled_in_channels"])]
        if full.get("clip_text_in_channels"):
            specs.append(floats("clip_text", shape[0], self.tokens(recipe), full["clip_text_in_channels"]))
        if full.get("clip_image_in_channels"):
            specs.append(floats("clip_img", shape[0], 1, full["clip_image_in_channels"]))
        if full.get("effnet_in_channels"):
            specs.append(floats("effnet", shape[0], full["effnet_in_channels"], *self.coarse(recipe)))
        return tuple(specs)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with time as a fraction."""
        names = ("clip_text_pooled", "clip_text", "clip_img", "effnet")
        result: Tensor = model(
            sample=noisy,
            timestep_ratio=((time + 1) / TRAIN_STEPS).to(noisy.dtype),
            return_dict=False,
            **{name: batch[name] for name in names if name in batch},
        )[0]
        return result


class DeepFloyd(CosineEpsilon):
    """DeepFloyd IF: in pixels. The second stage sees the small image enlarged and how noisy it is."""

    geometry = Geometry(spatial=1, patch=8, height=64, width=64)
    text_tokens = 77

    def geometry_for(self, full: Mapping[str, Any]) -> Geometry:
        """Return 64 pixels for the first stage, 256 for the second."""
        if full["in_channels"] == 3:
            return self.geometry
        return Geometry(spatial=1, patch=32, height=256, width=256)

    def latent_channels(self, full: Mapping[str, Any]) -> int:
        """Return the image's channels: the other half of the output is a variance, not trained here."""
        return int(full["out_channels"]) // 2

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return T5 states; the second stage adds the enlarged image and its noise level."""
        width = full.get("encoder_hid_dim") or full["cross_attention_dim"]
        specs = [floats("encoder_hidden_states", shape[0], self.tokens(recipe), width)]
        if full["in_channels"] > shape[1]:
            specs.append(floats("condition", shape[0], full["in_channels"] - shape[1], *shape[2:]))
        if full.get("class_embed_type") == "timestep":
            specs.append(TensorSpec("class_labels", shape[:1], "int64", "timesteps", high=TRAIN_STEPS))
        return tuple(specs)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call; keep the noise half of the output."""
        import torch

        states = torch.cat((noisy, batch["condition"]), dim=1) if "condition" in batch else noisy
        result: Tensor = model(
            sample=states,
            timestep=time,
            encoder_hidden_states=batch["encoder_hidden_states"],
            class_labels=batch.get("class_labels"),
            return_dict=False,
        )[0]
        return result[:, : noisy.shape[1]]
