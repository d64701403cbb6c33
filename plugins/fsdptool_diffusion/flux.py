"""Denoisers that take packed latents and positions: FLUX.1, FLUX.2, Chroma, Qwen-Image and kin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.families.protocol import TensorSpec
from fsdptool_diffusion.base import Denoiser, Geometry, floats, mask, settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe


def pack(latents: Tensor) -> Tensor:
    """Fold 2 x 2 latents into one token: [B, C, H, W] to [B, H/2 x W/2, 4 C]."""
    batch, channels, height, width = latents.shape
    folded = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return folded.permute(0, 2, 4, 1, 3, 5).reshape(batch, height * width // 4, channels * 4)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Undo :func:`pack`."""
    batch, _, channels = tokens.shape
    unfolded = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2)
    return unfolded.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height, width)


def grid(height: int, width: int, like: Tensor, axes: int = 3) -> Tensor:
    """Return positions [height x width, axes] with rows and columns on axes 1 and 2."""
    import torch

    ids = torch.zeros(height, width, axes, dtype=like.dtype, device=like.device)
    ids[..., 1] = torch.arange(height, dtype=like.dtype, device=like.device)[:, None]
    ids[..., 2] = torch.arange(width, dtype=like.dtype, device=like.device)[None, :]
    return ids.reshape(height * width, axes)


class Flux(Denoiser):
    """FLUX.1 and what is built on it. Time is a fraction; distilled models take a guidance of 1."""

    packing = 4
    pooled = True
    text_channels = "joint_attention_dim"

    def conditions(
        self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]
    ) -> tuple[TensorSpec, ...]:
        """Return T5 states, and CLIP's pooled text where the model takes it."""
        specs = [floats("encoder_hidden_states", shape[0], self.tokens(recipe), full[self.text_channels])]
        if self.pooled:
            specs.append(floats("pooled_projections", shape[0], full["pooled_projection_dim"]))
        return tuple(specs)

    def arguments(self, model: nn.Module, noisy: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the arguments that differ between FLUX's relatives."""
        states = batch["encoder_hidden_states"]
        arguments: dict[str, Any] = {
            "encoder_hidden_states": states,
            "txt_ids": states.new_zeros(states.shape[1], 3),
            "img_ids": grid(noisy.shape[2] // 2, noisy.shape[3] // 2, noisy),
        }
        if self.pooled:
            arguments["pooled_projections"] = batch["pooled_projections"]
        if getattr(settings(model), "guidance_embeds", False):
            arguments["guidance"] = noisy.new_ones(noisy.shape[0])
        return arguments

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Pack, call, unpack."""
        result = model(
            hidden_states=pack(noisy),
            timestep=time,
            return_dict=False,
            **self.arguments(model, noisy, batch),
        )[0]
        return unpack(result, noisy.shape[2], noisy.shape[3])


class Chroma(Flux):
    """Chroma: FLUX.1 without pooled text, with a mask over text and image tokens."""

    pooled = False

    def conditions(
        self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]
    ) -> tuple[TensorSpec, ...]:
        """Return T5 states and their mask."""
        count = self.tokens(recipe)
        return (
            floats("encoder_hidden_states", shape[0], count, full[self.text_channels]),
            mask("encoder_attention_mask", shape[0], count),
        )

    def arguments(self, model: nn.Module, noisy: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Add the mask, extended over the image's tokens."""
        import torch

        arguments = super().arguments(model, noisy, batch)
        text = batch["encoder_attention_mask"].bool()
        image = text.new_ones(text.shape[0], noisy.shape[2] * noisy.shape[3] // 4)
        arguments["attention_mask"] = torch.cat((text, image), dim=1)
        return arguments


class PlainFlux(Flux):
    """LongCat-Image and Ovis-Image: FLUX.1 without pooled text."""

    pooled = False


class Bria(PlainFlux):
    """Bria 3: time is a step of a thousand."""

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with steps instead of fractions."""
        return super().denoise(model, noisy, self.steps(time), batch)


class Flux2(Flux):
    """FLUX.2: latents of 16 pixels, one token each, and four axes of position."""

    geometry = Geometry(spatial=16, patch=1)
    packing = 1
    pooled = False

    def arguments(self, model: nn.Module, noisy: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return text positions on the last axis, image positions on the middle two."""
        import torch

        states = batch["encoder_hidden_states"]
        text = states.new_zeros(states.shape[1], 4)
        text[:, 3] = torch.arange(states.shape[1], dtype=states.dtype, device=states.device)
        count = noisy.shape[0]
        arguments: dict[str, Any] = {
            "encoder_hidden_states": states,
            "txt_ids": text.expand(count, -1, -1),
            "img_ids": grid(noisy.shape[2], noisy.shape[3], noisy, axes=4).expand(count, -1, -1),
        }
        if getattr(settings(model), "guidance_embeds", False):
            arguments["guidance"] = noisy.new_ones(count)
        return arguments

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Flatten rows and columns, call, restore them."""
        result: Tensor = model(
            hidden_states=noisy.flatten(2).transpose(1, 2),
            timestep=time,
            return_dict=False,
            **self.arguments(model, noisy, batch),
        )[0]
        return result.transpose(1, 2).reshape(noisy.shape)


class QwenImage(Flux):
    """Qwen-Image: packed like FLUX.1; positions come from the shapes."""

    pooled = False

    def conditions(
        self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]
    ) -> tuple[TensorSpec, ...]:
        """Return the language model's states and their mask."""
        count = self.tokens(recipe)
        return (
            floats("encoder_hidden_states", shape[0], count, full[self.text_channels]),
            mask("encoder_hidden_states_mask", shape[0], count),
        )

    def arguments(self, model: nn.Module, noisy: Tensor, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the shapes in place of positions."""
        return {
            "encoder_hidden_states": batch["encoder_hidden_states"],
            "encoder_hidden_states_mask": batch["encoder_hidden_states_mask"],
            "img_shapes": [[(1, noisy.shape[2] // 2, noisy.shape[3] // 2)]] * noisy.shape[0],
        }


class QwenImage21(Denoiser):
    """Qwen-Image 2.1, text to image: latents of 16 pixels behind the text; time is a fraction."""

    geometry = Geometry(spatial=16, patch=2)
    patch_key = None  # of one latent; the text's slots take two by two

    def conditions(
        self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]
    ) -> tuple[TensorSpec, ...]:
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
