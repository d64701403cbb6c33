"""Krea 2, Qwen-Image 2.1, Ideogram 4, FLUX.3 and MiniMax Music 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fsdptool.families.protocol import TensorSpec
from fsdptool_diffusion.base import Denoiser, Geometry, floats, mask, settings
from fsdptool_diffusion.flux import Flux, grid, pack, unpack

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


class QwenImage21(Denoiser):
    """Qwen-Image 2.1, text to image: latents of 16 pixels behind the text; time is a fraction."""

    geometry = Geometry(spatial=16, patch=2)

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the text encoder's states and their mask."""
        count = self.tokens(recipe)
        return (
            floats("encoder_hidden_states", shape[0], count, full["context_in_dim"]),
            mask("encoder_hidden_states_mask", shape[0], count, dtype="bool"),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with one slot per two by two latents behind the text; keep the image's tokens."""
        import torch

        count, _, height, width = noisy.shape
        text = batch["encoder_hidden_states"]
        slots = torch.arange(text.shape[1] + height * width // 4, device=noisy.device) >= text.shape[1]
        result: Tensor = model(
            hidden_states=noisy.flatten(2).transpose(1, 2),
            encoder_hidden_states=text,
            encoder_hidden_states_mask=batch["encoder_hidden_states_mask"],
            timestep=time,
            img_shapes=[[(1, height, width)]] * count,
            img_mask=slots.expand(count, -1),
            return_dict=False,
        )[0][:, -height * width :]
        return result.transpose(1, 2).reshape(noisy.shape)


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


class Flux3(Flux):
    """FLUX.3, text to image: the blocks for reference images stay idle. Time is a fraction."""

    pooled = False
    spread = 0.5
    """Distance of neighbouring tokens in the image's positions (diffusers' pipeline)."""

    def arguments(self, model: nn.Module, noisy: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return text positions on the last axis, image positions on the middle two."""
        import torch

        states = batch["encoder_hidden_states"]
        text = states.new_zeros(states.shape[1], 4, dtype=torch.float32)
        text[:, 3] = torch.arange(states.shape[1], dtype=text.dtype, device=text.device)
        image = grid(noisy.shape[2] // 2, noisy.shape[3] // 2, noisy.float(), axes=4) * self.spread
        return {"encoder_hidden_states": states, "txt_ids": text, "img_ids": image}

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Pack, call, unpack; a flow map is trained with both ends of its step equal."""
        target = {"target_timestep": time} if settings(model).flow_map else {}
        result = model(
            hidden_states=pack(noisy),
            timestep=time,
            return_dict=False,
            **target,
            **self.arguments(model, noisy, batch),
        )[0]
        return unpack(result, noisy.shape[2], noisy.shape[3])


class MiniMaxMusic3(Denoiser):
    """MiniMax Music 3: ``batch.frames`` counts latent frames; time runs from noise to music."""

    exact_inputs = ()  # embeds times in the dtype they come in
    frames = 512

    def latent_shape(self, full: Mapping[str, Any], recipe: Recipe) -> tuple[int, ...]:
        """Return channels and frames."""
        return (int(full["in_channels"]), recipe.batch.frames or self.frames)

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the condition of every frame."""
        return (floats("encoder_hidden_states", shape[0], shape[2], full["condition_dim"]),)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Turn time and the predicted velocity around."""
        result: Tensor = model(
            hidden_states=noisy,
            timestep=1 - time,
            encoder_hidden_states=batch["encoder_hidden_states"],
            return_dict=False,
        )[0]
        return -result
