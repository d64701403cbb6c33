"""Further denoisers of image, video and sound that diffusers has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import TensorSpec
from fsdptool_diffusion.base import Denoiser, Geometry, floats, mask, settings

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe

Specs = tuple[TensorSpec, ...]


class ErnieImage(Denoiser):
    """ERNIE-Image: latents of 16 pixels; captions with their lengths."""

    geometry = Geometry(spatial=16, patch=1)

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return text states and how many of them are real."""
        count = self.tokens(recipe)
        return (
            floats("encoder_hidden_states", shape[0], count, full["text_in_dim"]),
            TensorSpec("text_lens", (shape[0],), "int64", "constant", values=(count,)),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with ERNIE's argument names."""
        result: Tensor = model(
            hidden_states=noisy,
            timestep=self.steps(time),
            text_bth=batch["encoder_hidden_states"],
            text_lens=batch["text_lens"],
            return_dict=False,
        )[0]
        return result


class HunyuanImage(Denoiser):
    """HunyuanImage 2.1: 32 pixels per latent."""

    exact_inputs = ()  # embeds times in the dtype they come in
    geometry = Geometry(spatial=32, patch=1, height=2048, width=2048)
    text_tokens = 1000

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return text states and mask; glyph text where the model reads it."""
        count = self.tokens(recipe)
        specs = [
            floats("encoder_hidden_states", shape[0], count, full["text_embed_dim"]),
            mask("encoder_attention_mask", shape[0], count),
        ]
        if full.get("text_embed_2_dim"):
            specs += [
                floats("encoder_hidden_states_2", shape[0], 128, full["text_embed_2_dim"]),
                mask("encoder_attention_mask_2", shape[0], 128),
            ]
        return tuple(specs)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with both texts."""
        text = {name: tensor for name, tensor in batch.items() if name.startswith("encoder_")}
        if settings(model).guidance_embeds:
            text["guidance"] = noisy.new_full((noisy.shape[0],), 1000.0)
        result: Tensor = model(hidden_states=noisy, timestep=self.steps(time), return_dict=False, **text)[0]
        return result


class Kandinsky5(Denoiser):
    """Kandinsky 5: channels last; video models take a condition and its mask as further channels."""

    exact_inputs = ()  # embeds times in the dtype they come in
    geometry = Geometry(temporal=4, height=512, width=768, frames=121)
    text_tokens = 256

    def latent_channels(self, full: Mapping[str, Any]) -> int:
        """Return what the VAE makes."""
        return int(full["out_visual_dim"])

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return Qwen's states and CLIP's pooled text."""
        return (
            floats("encoder_hidden_states", shape[0], self.tokens(recipe), full["in_text_dim"]),
            floats("pooled_projections", shape[0], full["in_text_dim2"]),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with positions made from the shapes and an empty condition."""
        import torch

        states = noisy.movedim(1, -1)
        if settings(model).visual_cond:
            empty = torch.zeros_like(states)
            states = torch.cat((states, empty, empty[..., :1]), dim=-1)
        frames, height, width = noisy.shape[2:]
        places = [torch.arange(size, device=noisy.device) for size in (frames, height // 2, width // 2)]
        text = batch["encoder_hidden_states"]
        result: Tensor = model(
            hidden_states=states,
            encoder_hidden_states=text,
            pooled_projections=batch["pooled_projections"],
            timestep=self.steps(time),
            visual_rope_pos=places,
            text_rope_pos=torch.arange(text.shape[1], device=noisy.device),
        ).sample  # without return_dict diffusers 0.42 returns a bare tensor here
        return result.movedim(-1, 1)


class AceStep(Denoiser):
    """ACE-Step: music as 25 latent frames per second; ``batch.frames`` counts them."""

    exact_inputs = ()  # embeds times in the dtype they come in
    frames = 750
    text_tokens = 256

    def latent_shape(self, full: Mapping[str, Any], recipe: Recipe) -> tuple[int, ...]:
        """Return frames and channels.

        Raises:
            ConfigError: The frames do not fill patches.
        """
        count = recipe.batch.frames or self.frames
        if count % full["patch_size"]:
            raise ConfigError(
                f"batch.frames is {count}; {self.name} needs a multiple of {full['patch_size']}"
            )
        return (count, int(full["audio_acoustic_hidden_dim"]))

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return text and lyric states, and the context that rides beside the latents."""
        width = full.get("encoder_hidden_size") or full["hidden_size"]
        context = full["in_channels"] - shape[2]
        return (
            floats("encoder_hidden_states", shape[0], self.tokens(recipe), width),
            floats("context_latents", shape[0], shape[1], context),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with both ends of the step equal, as in training."""
        result: Tensor = model(
            hidden_states=noisy,
            timestep=time,
            timestep_r=time,
            encoder_hidden_states=batch["encoder_hidden_states"],
            context_latents=batch["context_latents"],
            return_dict=False,
        )[0]
        return result
