"""Video denoisers. Latents are [B, C, F, H, W]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.families.protocol import TensorSpec
from fsdptool_diffusion.base import Denoiser, Geometry, floats, mask, settings
from fsdptool_diffusion.image import MaskedTextDenoiser

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe

Specs = tuple[TensorSpec, ...]


class Wan(Denoiser):
    """Wan 2.1 and 2.2. Image-to-video takes the condition as further input channels, VACE a control."""

    geometry = Geometry(temporal=4, height=480, width=832, frames=81, rate=16)
    compact = Geometry(spatial=16, temporal=4, height=704, width=1280, frames=121, rate=24)

    def geometry_for(self, full: Mapping[str, Any]) -> Geometry:
        """Return the VAE's: Wan 2.2 5B has 48 channels of 16 pixels."""
        return self.compact if full["out_channels"] == 48 else self.geometry

    def latent_channels(self, full: Mapping[str, Any]) -> int:
        """Return what the VAE makes: the channels that come out."""
        return int(full["out_channels"])

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return text states; image-to-video adds condition channels and the image's states."""
        specs = [floats("encoder_hidden_states", shape[0], self.tokens(recipe), full["text_dim"])]
        extra = full["in_channels"] - shape[1]
        if extra > 0:
            specs.append(floats("condition", shape[0], extra, *shape[2:]))
        if full.get("image_dim"):
            specs.append(floats("encoder_hidden_states_image", shape[0], 257, full["image_dim"]))
        if full.get("vace_in_channels"):
            specs.append(floats("control_hidden_states", shape[0], full["vace_in_channels"], *shape[2:]))
        return tuple(specs)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with the condition's channels behind the latents'."""
        import torch

        arguments = {
            name: batch[name]
            for name in ("encoder_hidden_states_image", "control_hidden_states")
            if name in batch
        }
        if "control_hidden_states" in arguments:
            # Left out, diffusers 0.42 asks for the device of a None.
            arguments["control_hidden_states_scale"] = noisy.new_ones(len(settings(model).vace_layers))
        states = torch.cat((noisy, batch["condition"]), dim=1) if "condition" in batch else noisy
        result: Tensor = model(
            hidden_states=states,
            timestep=self.steps(time),
            encoder_hidden_states=batch["encoder_hidden_states"],
            return_dict=False,
            **arguments,
        )[0]
        return result


class HunyuanVideo(Denoiser):
    """HunyuanVideo: Llama states with a mask, pooled CLIP text, guidance."""

    geometry = Geometry(temporal=4, height=544, width=960, frames=61, rate=24)
    text_tokens = 256

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return text states, mask and pooled text."""
        count = self.tokens(recipe)
        return (
            floats("encoder_hidden_states", shape[0], count, full["text_embed_dim"]),
            mask("encoder_attention_mask", shape[0], count),
            floats("pooled_projections", shape[0], full["pooled_projection_dim"]),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call; distilled models take a guidance of 1 (times a thousand)."""
        guidance = noisy.new_full((noisy.shape[0],), 1000.0) if settings(model).guidance_embeds else None
        names = ("encoder_hidden_states", "encoder_attention_mask", "pooled_projections")
        result: Tensor = model(
            hidden_states=noisy,
            timestep=self.steps(time),
            guidance=guidance,
            return_dict=False,
            **{name: batch[name] for name in names},
        )[0]
        return result


class HunyuanVideo15(Denoiser):
    """HunyuanVideo 1.5: two texts and an image's states."""

    exact_inputs = ()  # embeds times in the dtype they come in
    geometry = Geometry(spatial=16, temporal=4, patch=1, height=480, width=848, frames=121, rate=24)
    text_tokens = 1000
    glyph_tokens = 256
    image_tokens = 729

    def latent_channels(self, full: Mapping[str, Any]) -> int:
        """Return what the VAE makes."""
        return int(full["out_channels"])

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return condition channels, both texts with masks, and the image's states."""
        count = self.tokens(recipe)
        glyphs = min(self.glyph_tokens, count)
        return (
            floats("condition", shape[0], full["in_channels"] - shape[1], *shape[2:]),
            floats("encoder_hidden_states", shape[0], count, full["text_embed_dim"]),
            mask("encoder_attention_mask", shape[0], count),
            floats("encoder_hidden_states_2", shape[0], glyphs, full["text_embed_2_dim"]),
            mask("encoder_attention_mask_2", shape[0], glyphs),
            # Zeros tell the model that there is no image: it is trained text to video.
            TensorSpec(
                "image_embeds",
                (shape[0], min(self.image_tokens, count), full["image_embed_dim"]),
                "float32",
                "constant",
                compute=True,
            ),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with the condition's channels behind the latents'."""
        import torch

        names = (
            *("encoder_hidden_states", "encoder_attention_mask", "encoder_hidden_states_2"),
            *("encoder_attention_mask_2", "image_embeds"),
        )
        result: Tensor = model(
            hidden_states=torch.cat((noisy, batch["condition"]), dim=1),
            timestep=self.steps(time),
            return_dict=False,
            **{name: batch[name] for name in names},
        )[0]
        return result


class LtxVideo(Denoiser):
    """LTX-Video: one token per latent of 32 pixels and 8 frames."""

    geometry = Geometry(spatial=32, temporal=8, patch=1, height=512, width=704, frames=121, rate=25)
    text_tokens = 128

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return T5 states and their mask."""
        count = self.tokens(recipe)
        return (
            floats("encoder_hidden_states", shape[0], count, full["caption_channels"]),
            mask("encoder_attention_mask", shape[0], count),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Flatten frames, rows and columns, call with positions in seconds and pixels, restore them."""
        frames, height, width = noisy.shape[2:]
        unit = self.geometry
        result: Tensor = model(
            hidden_states=noisy.flatten(2).transpose(1, 2),
            timestep=self.steps(time),
            encoder_hidden_states=batch["encoder_hidden_states"],
            encoder_attention_mask=batch["encoder_attention_mask"],
            num_frames=frames,
            height=height,
            width=width,
            rope_interpolation_scale=(unit.temporal / unit.rate, unit.spatial, unit.spatial),
            return_dict=False,
        )[0]
        return result.transpose(1, 2).reshape(noisy.shape)


class CogVideoX(Denoiser):
    """CogVideoX: frames before channels; v-prediction."""

    geometry = Geometry(temporal=4, height=480, width=720, frames=49, rate=8)
    text_tokens = 226

    def tokens(self, recipe: Recipe) -> int:
        """Return 226: the 2B model's positions are cut for that many."""
        return self.text_tokens

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return T5 states, as many tokens as the positions are made for."""
        return (
            floats("encoder_hidden_states", shape[0], full["max_text_seq_length"], full["text_embed_dim"]),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with frames before channels; the 5B model takes rotary positions."""
        config = settings(model)
        rotary = None
        if config.use_rotary_positional_embeddings:
            rotary = self._rotary(config, noisy)
        result: Tensor = model(
            hidden_states=noisy.transpose(1, 2),
            encoder_hidden_states=batch["encoder_hidden_states"],
            timestep=time,
            image_rotary_emb=rotary,
            return_dict=False,
        )[0]
        return result.transpose(1, 2)

    def _rotary(self, config: Any, noisy: Tensor) -> Any:
        from diffusers.models.embeddings import get_3d_rotary_pos_embed
        from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

        frames, height, width = noisy.shape[2:]
        size = (height // config.patch_size, width // config.patch_size)
        # Every size is laid over the grid the model was made for, so far as its aspect ratio allows.
        whole = (config.sample_width // config.patch_size, config.sample_height // config.patch_size)
        return get_3d_rotary_pos_embed(
            embed_dim=config.attention_head_dim,
            crops_coords=get_resize_crop_region_for_grid(size, *whole),
            grid_size=size,
            temporal_size=frames,
            device=noisy.device,
        )


class Mochi(Denoiser):
    """Mochi: time runs from noise to video."""

    geometry = Geometry(temporal=6, height=480, width=848, frames=85, rate=30)
    text_tokens = 256

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return T5 states and their mask."""
        count = self.tokens(recipe)
        return (
            floats("encoder_hidden_states", shape[0], count, full["text_embed_dim"]),
            mask("encoder_attention_mask", shape[0], count, dtype="bool"),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Turn time and the predicted velocity around."""
        result: Tensor = model(
            hidden_states=noisy,
            encoder_hidden_states=batch["encoder_hidden_states"],
            timestep=self.steps(1 - time),
            encoder_attention_mask=batch["encoder_attention_mask"],
            return_dict=False,
        )[0]
        return -result


class SanaVideo(MaskedTextDenoiser):
    """Sana-Video: Wan's latents, Sana's text."""

    geometry = Geometry(temporal=4, height=480, width=832, frames=81, rate=16)


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
