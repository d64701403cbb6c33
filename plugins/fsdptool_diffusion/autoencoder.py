"""A pipeline's VAE: from pixels to the space its denoiser works in, and back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.files.values import read_json
from fsdptool_diffusion.encoders import first_line, free, owned, pipeline_index, quiet

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor


class ImageEncoding:
    """The pipeline's VAE.

    Latents are normalised as the pipelines do it (diffusers 0.42.1): ``(x - shift_factor) *
    scaling_factor``; by mean and deviation per channel where the VAE has them, as settings (Wan,
    Qwen-Image, Mochi) or as buffers (LTX); by its batch norm's statistics over 2 x 2 latents (FLUX.2).

    Args:
        folder: The pipeline's folder.
        device: Where to encode.
    """

    def __init__(self, folder: Path, *, device: str) -> None:
        import diffusers
        import torch

        file = folder / "vae" / "config.json"
        try:
            config = read_json(file)
            cls = getattr(diffusers, str(config["_class_name"]))
            quiet()
            # VAEs overflow in fp16 and blur in bf16; they are small.
            vae = cls.from_pretrained(
                str(folder),
                subfolder="vae",
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
            )
        except Exception as error:
            raise ConfigError(
                f"the VAE in {folder / 'vae'} cannot be loaded: {first_line(error)}",
                help="a pipeline folder needs vae/config.json and safetensors weights",
            ) from error
        self.vae: Any = vae.to(device).eval()
        self.device = device
        self._config: Mapping[str, Any] = dict(vae.config)
        self._buffers = dict(vae.named_buffers())
        self.video = _takes_frames(vae)

    def move(self, device: str) -> None:
        """Work on another device from now on."""
        self.vae.to(device)
        self.device = device
        self._buffers = dict(self.vae.named_buffers())

    def encode(self, pixels: Tensor, *, frames: bool) -> dict[str, Tensor]:
        """Return ``latents`` (the posterior's mean) and ``latents_std``, normalised, on the CPU.

        Args:
            pixels: ``[channels, frames, height, width]`` in [-1, 1].
            frames: Whether the denoiser's latents have frames: Qwen-Image's do not, though its VAE's do.
        """
        import torch

        values = pixels.unsqueeze(0).to(self.device)
        with torch.no_grad():
            encoded = self.vae.encode(values if self.video else values.squeeze(2))
        if hasattr(encoded, "latent_dist"):
            mean, spread = encoded.latent_dist.mean, encoded.latent_dist.std
        else:
            mean = encoded.latent if hasattr(encoded, "latent") else encoded.latents
            spread = torch.zeros_like(mean)
        if self._folds:
            mean, spread = _folded(mean), _folded(spread)
        shift, scale = self._normalisation(mean)
        latents = {"latents": (mean - shift) * scale, "latents_std": spread * scale}
        if self.video and not frames:
            latents = {name: value.squeeze(2) for name, value in latents.items()}
        return {name: owned(value[0]) for name, value in latents.items()}

    def decode(self, latents: Tensor) -> list[Image]:
        """Return the pictures of normalised latents ``[channels, (frames,) height, width]``."""
        import torch

        values = latents.unsqueeze(0).to(self.device)
        if self.video and values.dim() == 4:
            values = values.unsqueeze(2)
        shift, scale = self._normalisation(values)
        values = values / scale + shift
        with torch.no_grad():
            pixels = self.vae.decode(_unfolded(values) if self._folds else values).sample[0].float().cpu()
        return as_images(pixels if self.video else pixels.unsqueeze(1))

    @property
    def _folds(self) -> bool:
        return "bn.running_mean" in self._buffers

    def _normalisation(self, like: Tensor) -> tuple[Any, Any]:
        """Return what is subtracted and what is multiplied with, per channel or as numbers."""
        import torch

        def per_channel(values: Any) -> Tensor:
            channels = torch.as_tensor(values, device=like.device, dtype=like.dtype)
            return channels.view(1, -1, *(1,) * (like.dim() - 2))

        if self._folds:
            variance = self._buffers["bn.running_var"] + self._config["batch_norm_eps"]
            return per_channel(self._buffers["bn.running_mean"]), per_channel(variance.rsqrt())
        means, spreads = (
            self._config.get(name, self._buffers.get(name)) for name in ("latents_mean", "latents_std")
        )
        scale = self._config.get("scaling_factor") or 1.0
        if means is not None and spreads is not None:
            return per_channel(means), scale / per_channel(spreads)
        return self._config.get("shift_factor") or 0.0, scale

    def unload(self) -> None:
        """Give the memory back."""
        self.vae = None
        self._buffers = {}
        free(self.device)


class FirstFrame:
    """What Wan's image-to-video models are told of a clip's first frame, by their pipeline's own methods.

    Args:
        folder: The pipeline's folder.
        images: The VAE, loaded.

    Raises:
        ConfigError: The pipeline cannot be loaded.
    """

    def __init__(self, folder: Path, images: ImageEncoding) -> None:
        import diffusers

        index = pipeline_index(folder)
        parts = (name for name, value in index.items() if isinstance(value, list))
        loaded: dict[str, Any] = {
            name: None for name in parts if name not in ("image_encoder", "image_processor", "scheduler")
        }
        loaded["vae"] = images.vae
        cls = getattr(diffusers, str(index["_class_name"]))
        try:
            pipeline = cls.from_pretrained(str(folder), local_files_only=True, use_safetensors=True, **loaded)
        except Exception as error:
            raise ConfigError(f"pipeline {folder} cannot be loaded: {first_line(error)}") from error
        self._pipeline: Any = pipeline.to(images.device)
        self._device = images.device

    def encode(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return ``condition`` (mask and latents of the first frame among empty ones) and CLIP's states.

        Args:
            pixels: ``[channels, frames, height, width]`` in [-1, 1].
        """
        import torch

        pipeline, first = self._pipeline, pixels[:, 0]
        with torch.no_grad():
            _, condition = pipeline.prepare_latents(
                first.unsqueeze(0).to(self._device),
                batch_size=1,
                num_channels_latents=pipeline.vae.config.z_dim,
                height=pixels.shape[2],
                width=pixels.shape[3],
                num_frames=pixels.shape[1],
                dtype=torch.float32,
                device=self._device,
            )
            encoded = {"condition": condition[0]}
            if pipeline.image_encoder is not None:
                image = as_images(first.unsqueeze(1))[0]
                encoded["encoder_hidden_states_image"] = pipeline.encode_image(image, self._device)[0]
        return {name: owned(value) for name, value in encoded.items()}


def as_images(frames: Tensor) -> list[Image]:
    """Return ``[channels, frames, height, width]`` in [-1, 1] as pictures."""
    import numpy as np
    from PIL import Image as images

    grey = ((frames.permute(1, 2, 3, 0) + 1) * 127.5).round().clamp(0, 255)
    return [images.fromarray(frame) for frame in grey.numpy().astype(np.uint8)]


def _takes_frames(vae: Any) -> bool:
    from torch import nn

    return any(isinstance(part, nn.Conv3d) for part in vae.encoder.modules())


def _folded(latents: Tensor) -> Tensor:
    """Fold 2 x 2 latents into channels: [B, C, H, W] to [B, 4 C, H/2, W/2]."""
    import torch

    return torch.nn.functional.pixel_unshuffle(latents, 2)


def _unfolded(latents: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.pixel_shuffle(latents, 2)
