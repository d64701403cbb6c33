"""Image denoisers that take latents as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.families.protocol import TensorSpec, WrapHint
from fsdptool_diffusion.base import Denoiser, Geometry, floats, mask, settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe

Specs = tuple[TensorSpec, ...]


class StableDiffusion3(Denoiser):
    """Stable Diffusion 3 and 3.5."""

    text_tokens = 333  # 77 of CLIP and 256 of T5

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the joined text states and CLIP's pooled text."""
        return (
            floats("encoder_hidden_states", shape[0], self.tokens(recipe), full["joint_attention_dim"]),
            floats("pooled_projections", shape[0], full["pooled_projection_dim"]),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with pooled text."""
        result: Tensor = model(
            hidden_states=noisy,
            timestep=self.steps(time),
            encoder_hidden_states=batch["encoder_hidden_states"],
            pooled_projections=batch["pooled_projections"],
            return_dict=False,
        )[0]
        return result


class PixArt(Denoiser):
    """PixArt: predicts noise and a variance that is not trained here."""

    text_tokens = 300

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return T5 states, their mask, and PixArt-Alpha's sizes where the model takes them."""
        count = self.tokens(recipe)
        specs = [
            floats("encoder_hidden_states", shape[0], count, full["caption_channels"]),
            mask("encoder_attention_mask", shape[0], count),
        ]
        if sized(full):
            specs += [floats("resolution", shape[0], 2), floats("aspect_ratio", shape[0], 1)]
        return tuple(specs)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call, and keep the noise half of the output."""
        sizes = {key: batch.get(key) for key in ("resolution", "aspect_ratio")}
        result: Tensor = model(
            hidden_states=noisy,
            timestep=time,
            encoder_hidden_states=batch["encoder_hidden_states"],
            encoder_attention_mask=batch["encoder_attention_mask"],
            added_cond_kwargs=sizes,
            return_dict=False,
        )[0]
        return result[:, : noisy.shape[1]]


def sized(full: Mapping[str, Any]) -> bool:
    """Say whether a PixArt model is conditioned on sizes (its own default: at 1024 pixels)."""
    given = full.get("use_additional_conditions")
    return bool(full.get("sample_size") == 128) if given is None else bool(given)


class DiT(Denoiser):
    """DiT: conditioned on a class of ImageNet."""

    geometry = Geometry(height=256, width=256)

    def wrap_hint(self, config: Mapping[str, Any]) -> WrapHint:
        """Return the blocks and the embedding that the model calls from outside its first block."""
        return WrapHint(
            ("BasicTransformerBlock", "CombinedTimestepLabelEmbeddings"),
            "the model calls the first block's timestep and label embedding from outside the block (diffusers"
            " 0.42), where FSDP2 keeps it sharded; as a unit of its own it is gathered wherever it is called",
        )

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the class."""
        return (TensorSpec("class_labels", (shape[0],), "int64", "tokens", high=full["num_embeds_ada_norm"]),)

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with the class; keep the noise half of the output."""
        result: Tensor = model(
            hidden_states=noisy, timestep=time, class_labels=batch["class_labels"], return_dict=False
        )[0]
        return result[:, : noisy.shape[1]]


class MaskedTextDenoiser(Denoiser):
    """Denoisers that take text states and their mask: Sana and Lumina 2.

    Card option ``text``: the key that holds the width of the text states.
    """

    text_tokens = 300

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the text states and their mask."""
        count = self.tokens(recipe)
        width = full[self.options.get("text", "caption_channels")]
        return (
            floats("encoder_hidden_states", shape[0], count, width),
            mask("encoder_attention_mask", shape[0], count, dtype=self.options.get("mask", "int64")),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with the mask."""
        config, arguments = settings(model), dict[str, Any]()
        if getattr(config, "guidance_embeds", False):
            arguments["guidance"] = noisy.new_ones(noisy.shape[0])
        result: Tensor = model(
            hidden_states=noisy,
            timestep=self.steps(time) * getattr(config, "timestep_scale", 1.0),
            encoder_hidden_states=batch["encoder_hidden_states"],
            encoder_attention_mask=batch["encoder_attention_mask"],
            return_dict=False,
            **arguments,
        )[0]
        return result


class Sana(MaskedTextDenoiser):
    """Sana: 32 pixels per latent."""

    geometry = Geometry(spatial=32, patch=1)


class Lumina2(MaskedTextDenoiser):
    """Lumina 2: time runs from noise to image, so both time and velocity change sign."""

    text_tokens = 256

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Turn time and the predicted velocity around."""
        result: Tensor = model(
            hidden_states=noisy,
            timestep=1 - time,
            encoder_hidden_states=batch["encoder_hidden_states"],
            encoder_attention_mask=batch["encoder_attention_mask"].bool(),
            return_dict=False,
        )[0]
        return -result


class AuraFlow(Denoiser):
    """AuraFlow: time is a fraction."""

    text_tokens = 256
    native_key = None  # 64, though the pipeline's own size is 1024 pixels (diffusers 0.42.1)

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the text states."""
        return (floats("encoder_hidden_states", shape[0], self.tokens(recipe), full["joint_attention_dim"]),)

    def steps(self, time: Tensor) -> Tensor:
        """Return the fraction itself."""
        return time


class CogView4(Denoiser):
    """CogView 4: conditioned on sizes and crops, too."""

    text_tokens = 256

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return text states, original and target sizes in pixels, and the crop's corner."""
        unit = self.own_geometry(full).spatial
        pixels = (float(shape[2] * unit), float(shape[3] * unit))
        sizes = [
            TensorSpec(name, (shape[0], 2), "float32", "constant", values=pixels)
            for name in ("original_size", "target_size")
        ]
        return (
            floats("encoder_hidden_states", shape[0], self.tokens(recipe), full["text_embed_dim"]),
            *sizes,
            TensorSpec("crop_coords", (shape[0], 2), "float32", "constant"),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with the sizes."""
        names = ("encoder_hidden_states", "original_size", "target_size", "crop_coords")
        result: Tensor = model(
            hidden_states=noisy,
            timestep=self.steps(time),
            return_dict=False,
            **{name: batch[name] for name in names},
        )[0]
        return result


class HiDream(Denoiser):
    """HiDream-I1: T5 states, the states of every Llama layer, pooled CLIP text."""

    text_tokens = 128

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the three texts; Llama's layers come first among the feature dimensions."""
        count = self.tokens(recipe)
        widths = full["caption_channels"]
        layers = max(full["llama_layers"]) + 1
        return (
            floats("encoder_hidden_states_t5", shape[0], count, widths[0]),
            floats("encoder_hidden_states_llama3", shape[0], layers, count, widths[1]),
            floats("pooled_embeds", shape[0], full["text_emb_dim"]),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with layers leading; the model predicts from noise to image."""
        result: Tensor = model(
            hidden_states=noisy,
            timesteps=self.steps(time),
            encoder_hidden_states_t5=batch["encoder_hidden_states_t5"],
            encoder_hidden_states_llama3=batch["encoder_hidden_states_llama3"].transpose(0, 1),
            pooled_embeds=batch["pooled_embeds"],
            return_dict=False,
        )[0]
        if result.shape != noisy.shape:
            # In training mode diffusers 0.42 leaves patches apart: [B, C, patches, 4].
            count, channels, height, width = noisy.shape
            tiles = result.reshape(count, channels, height // 2, width // 2, 2, 2)
            result = tiles.permute(0, 1, 2, 4, 3, 5).reshape(noisy.shape)
        return -result


class ZImage(Denoiser):
    """Z-Image: lists of images and captions; time runs from noise to image."""

    exact_inputs = ("t",)
    text_tokens = 256

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the caption's features, and which of them are real."""
        count = self.tokens(recipe)
        return (
            floats("encoder_hidden_states", shape[0], count, full["cap_feat_dim"]),
            mask("encoder_attention_mask", shape[0], count),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with one list entry per sample, captions in their own lengths; turn the velocity around."""
        import torch

        lengths = batch["encoder_attention_mask"].sum(dim=1).tolist()
        captions = batch["encoder_hidden_states"].unbind(0)
        result = model(
            x=list(noisy.unsqueeze(2).unbind(0)),
            t=1 - time,
            cap_feats=[caption[:length] for caption, length in zip(captions, lengths, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(list(result)).squeeze(2)


class OmniGen(Denoiser):
    """OmniGen: one transformer over text, time and image tokens."""

    exact_inputs = ()  # embeds times in the dtype they come in
    text_tokens = 128

    def conditions(self, full: Mapping[str, Any], recipe: Recipe, shape: tuple[int, ...]) -> Specs:
        """Return the prompt's tokens."""
        return (
            TensorSpec(
                "input_ids", (shape[0], self.tokens(recipe)), "int64", "tokens", high=full["vocab_size"]
            ),
        )

    def denoise(self, model: nn.Module, noisy: Tensor, time: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Call with text causal and image tokens seeing everything; time runs from noise to image."""
        import torch

        ids = batch["input_ids"]
        text, image = ids.shape[1], noisy.shape[2] * noisy.shape[3] // 4
        size = text + 1 + image
        allowed = torch.ones(size, size, dtype=torch.bool, device=noisy.device).tril()
        allowed[text + 1 :, text + 1 :] = True
        result: Tensor = model(
            hidden_states=noisy,
            timestep=1 - time,
            input_ids=ids,
            input_img_latents=[],
            input_image_sizes={},
            attention_mask=allowed.to(noisy.dtype).expand(noisy.shape[0], -1, -1),
            position_ids=torch.arange(size, device=noisy.device).expand(noisy.shape[0], -1),
            return_dict=False,
        )[0]
        return -result
