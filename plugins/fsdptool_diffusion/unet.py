"""UNets, the cascades that predict noise on a cosine schedule, and the image VAE."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.objectives.features import Reconstruction
from fsdptool.families.protocol import Objective, TensorSpec
from fsdptool_diffusion.base import TRAIN_STEPS, Denoiser, DiffusersFamily, Geometry, floats
from fsdptool_diffusion.objectives import Edm, Epsilon

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe


Specs = tuple[TensorSpec, ...]


def halved(full: Mapping[str, Any]) -> int:
    """Return by what a UNet divides its sides: every level but the last halves them (diffusers 0.42.1)."""
    return 1 << (len(full["down_block_types"]) - 1)


class UNet(Denoiser):
    """Stable Diffusion 1, XL and Kolors."""

    geometry = Geometry(patch=8, height=512, width=512)
    text_tokens = 77

    def patch_for(self, full: Mapping[str, Any]) -> int:
        """Return what the levels divide by."""
        return halved(full)

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return CLIP's states; XL adds pooled text and the six sizes."""
        width = full.get("encoder_hid_dim") or full["cross_attention_dim"]
        specs = [floats("encoder_hidden_states", shape[0], self.tokens(recipe), width)]
        if full.get("addition_embed_type") == "text_time":
            pooled = full["projection_class_embeddings_input_dim"] - 6 * full["addition_time_embed_dim"]
            pixels = self.own_geometry(full).spatial
            size = (float(shape[2] * pixels), float(shape[3] * pixels))
            ids = (*size, 0.0, 0.0, *size)
            specs += [
                floats("text_embeds", shape[0], pooled),
                TensorSpec("time_ids", (shape[0], 6), "float32", "constant", compute=True, values=ids),
            ]
        return tuple(specs)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call; XL takes its additions in a dictionary."""
        added = {name: batch[name] for name in ("text_embeds", "time_ids") if name in batch}
        result: Tensor = model(
            sample=noisy,
            timestep=time,
            encoder_hidden_states=batch["encoder_hidden_states"],
            added_cond_kwargs=added or None,
            return_dict=False,
        )[0]
        return result


class UNetXL(UNet):
    """Stable Diffusion XL and Kolors: trained at 1024 pixels."""

    geometry = Geometry(patch=4, height=1024, width=1024)


class VideoUNet(Denoiser):
    """Stable Video Diffusion: from one image, under EDM preconditioning."""

    geometry = Geometry(patch=8, temporal=1, height=576, width=1024, frames=14)
    text_tokens = 1

    def patch_for(self, full: Mapping[str, Any]) -> int:
        """Return what the levels divide by."""
        return halved(full)

    def latent_channels(self, full: Mapping[str, Any]) -> int:
        """Return what the VAE makes; the image's latents are further channels."""
        return int(full["out_channels"])

    def tokens(self, recipe: Recipe) -> int:
        """Return 1: the image's CLIP embedding."""
        return 1

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> Specs:
        """Return latents, noise, the noise level and the image."""
        full = self.full(config)
        shape = (recipe.batch.micro_batch, *self.latent_shape(full, recipe))
        times = full["projection_class_embeddings_input_dim"] // full["addition_time_embed_dim"]
        return (
            TensorSpec("latents", shape, "float32", "normal", compute=True),
            TensorSpec("noise", shape, "float32", "normal", compute=True),
            TensorSpec("log_sigma", shape[:1], "float32", "normal"),
            floats("condition", shape[0], full["in_channels"] - shape[1], *shape[2:]),
            floats("encoder_hidden_states", shape[0], 1, full["cross_attention_dim"]),
            TensorSpec(
                "added_time_ids",
                (shape[0], times),
                "float32",
                "constant",
                compute=True,
                values=(6.0, 127.0, 0.02)[:times],
            ),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with frames before channels and the image's latents behind the video's."""
        import torch

        states = torch.cat((noisy, batch["condition"]), dim=1)
        result: Tensor = model(
            sample=states.transpose(1, 2),
            timestep=time,
            encoder_hidden_states=batch["encoder_hidden_states"],
            added_time_ids=batch["added_time_ids"],
            return_dict=False,
        )[0]
        return result.transpose(1, 2)

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return EDM."""
        from functools import partial

        return {Edm.name: partial(Edm, denoise=self.denoise)}


class ImageVae(DiffusersFamily):
    """The VAE of Stable Diffusion, trained to reconstruct images."""

    size = 256

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> Specs:
        """Return images."""
        full = self.complete(config, self.model_class(config))
        batch = recipe.batch
        shape = (batch.micro_batch, full["in_channels"], batch.height or self.size, batch.width or self.size)
        return (TensorSpec("sample", shape, "float32", "normal", compute=True),)

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return reconstruction."""
        return {Reconstruction.name: Reconstruction}


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

    def patch_for(self, full: Mapping[str, Any]) -> int:
        """Return what stage B's patches and levels divide by; stage C's sides are rounded."""
        if not full.get("effnet_in_channels"):
            return self.geometry.patch
        return int(full["patch_size"]) << (len(full["block_out_channels"]) - 1)

    def small(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the card's small values; stage B has its own."""
        options: Mapping[str, Any] = self.options["small_b" if config.get("effnet_in_channels") else "small"]
        return options

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

    def patch_for(self, full: Mapping[str, Any]) -> int:
        """Return what the levels divide by."""
        return halved(full)

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
