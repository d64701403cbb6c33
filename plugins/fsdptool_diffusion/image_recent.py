"""Image denoisers of 2025 and later: Krea 2, Ideogram 4, ERNIE-Image, HunyuanImage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fsdptool.families.protocol import TensorSpec
from fsdptool_diffusion.base import Denoiser, Geometry, floats, mask, settings
from fsdptool_diffusion.flux import grid, pack, unpack

if TYPE_CHECKING:
    from typing import Any

    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe

Specs = tuple[TensorSpec, ...]


class Krea2(Denoiser):
    """Krea 2: the states of several layers of its text encoder for every token; time is a fraction."""

    packing = 4

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the layers' states and their mask."""
        count = self.tokens(recipe)
        layers = full["num_text_layers"]
        return (
            floats("encoder_hidden_states", shape[0], count, layers, full["text_hidden_dim"]),
            mask("encoder_attention_mask", shape[0], count, dtype="bool"),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Pack, call with text before the image in the positions, unpack."""
        import torch

        text = batch["encoder_hidden_states"]
        height, width = noisy.shape[2:]
        image = grid(height // 2, width // 2, noisy.float())
        result: Tensor = model(
            hidden_states=pack(noisy),
            encoder_hidden_states=text,
            timestep=time,
            position_ids=torch.cat((image.new_zeros(text.shape[1], 3), image)),
            encoder_attention_mask=batch["encoder_attention_mask"],
            return_dict=False,
        )[0]
        return unpack(result, height, width)


class Ideogram4(Denoiser):
    """Ideogram 4: one sequence of text and image; time runs from noise to image.

    Roles and the offset of image positions are constants of diffusers' class.
    """

    exact_inputs = ()  # embeds times in the dtype they come in
    packing = 4

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the text encoder's joined states."""
        return (floats("encoder_hidden_states", shape[0], self.tokens(recipe), full["llm_features_dim"]),)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with zeros where the other kind of token stands; turn time and velocity around."""
        import torch
        from diffusers.models.transformers import transformer_ideogram4 as constants

        count, channels, height, width = noisy.shape
        # Within a token this model keeps channels last.
        tiles = noisy.reshape(count, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 3, 5, 1)
        image = tiles.reshape(count, -1, 4 * channels)
        text = batch["encoder_hidden_states"]
        tokens = text.shape[1]
        indicator = torch.full(
            (count, tokens + image.shape[1]), constants.OUTPUT_IMAGE_INDICATOR, device=noisy.device
        )
        indicator[:, :tokens] = constants.LLM_TOKEN_INDICATOR
        places = torch.arange(tokens, device=noisy.device)[:, None].expand(tokens, 3)
        cells = grid(height // 2, width // 2, places) + constants.IMAGE_POSITION_OFFSET
        result: Tensor = model(
            hidden_states=torch.cat((image.new_zeros(count, tokens, image.shape[2]), image), dim=1),
            # The class embeds time in the dtype it comes in and lets all else follow (diffusers 0.42).
            timestep=(1 - time).to(noisy.dtype),
            encoder_hidden_states=torch.cat((text, text.new_zeros(*image.shape[:2], text.shape[2])), dim=1),
            position_ids=torch.cat((places, cells)).expand(count, -1, -1),
            segment_ids=torch.ones_like(indicator),
            indicator=indicator,
            return_dict=False,
        )[0][:, tokens:]
        tiles = result.reshape(count, height // 2, width // 2, 2, 2, channels).permute(0, 5, 1, 3, 2, 4)
        return -tiles.reshape(noisy.shape)


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
