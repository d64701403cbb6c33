"""A pipeline's own text encoders and VAE, one after the other, never beside the denoiser."""

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.records.model import ModelSpec
from fsdptool.records.recipe import Recipe

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

_EMBEDS, _POOLED, _MASK = "prompt_embeds", "pooled_prompt_embeds", "prompt_attention_mask"
_PAIR = (_EMBEDS, None)
_MASKED = (_EMBEDS, _MASK, None, None)
_POOLED_PAIR = (_EMBEDS, None, _POOLED, None)

TEXT_OUTPUTS: Mapping[str, tuple[str | None, ...]] = {
    "FluxPipeline": (_EMBEDS, _POOLED, None),
    "Flux2Pipeline": _PAIR,
    "ChromaPipeline": (_EMBEDS, None, _MASK, None, None, None),
    "StableDiffusionPipeline": _PAIR,
    "StableDiffusionXLPipeline": _POOLED_PAIR,
    "StableDiffusion3Pipeline": _POOLED_PAIR,
    "KolorsPipeline": _POOLED_PAIR,
    "WanPipeline": _PAIR,
    "CogVideoXPipeline": _PAIR,
    "CogView4Pipeline": _PAIR,
    "PixArtAlphaPipeline": _MASKED,
    "PixArtSigmaPipeline": _MASKED,
    "SanaPipeline": _MASKED,
    "Lumina2Pipeline": _MASKED,
    "AuraFlowPipeline": _MASKED,
    "LTXPipeline": _MASKED,
    "MochiPipeline": _MASKED,
    "HunyuanVideoPipeline": (_EMBEDS, _POOLED, _MASK),
    "QwenImagePipeline": (_EMBEDS, _MASK),
}
"""What ``encode_prompt`` of a pipeline returns (diffusers 0.42.1), by the names its arguments have;
None is left out: unconditional halves and tables of positions."""

REFUSED: Mapping[str, str] = {
    "ZImagePipeline": "its captions differ in length and its transformer takes no mask to fill them up with",
    "HiDreamImagePipeline": "its four encoders' outputs are more than an embedding, a pooled one and a mask",
}
"""Pipelines of families we ship whose captions are not cached, and why."""

_DENOISERS = ("transformer", "transformer_2", "unet")


def pipeline_folder(recipe: Recipe, spec: ModelSpec) -> Path:
    """Return the pipeline's folder: ``data.options.pipeline``, or the one the model lies in.

    Raises:
        ConfigError: There is none, so there is no VAE and no text encoder.
    """
    given = recipe.data.options.get("pipeline")
    places = [Path(str(given)).expanduser()] if given else []
    if not given and spec.folder is not None:
        places = [Path(spec.folder), Path(spec.folder).parent]
    for place in places:
        if (place / "model_index.json").is_file():
            return place
    raise ConfigError(
        f"no pipeline folder with model_index.json is known for {given or spec.reference.id}",
        help="name a local diffusers pipeline under data.options.pipeline: its VAE and text encoders do it",
    )


def pipeline_index(folder: Path) -> Mapping[str, Any]:
    """Return ``model_index.json``.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        found = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / 'model_index.json'} cannot be read: {error}") from error
    if not isinstance(found, Mapping) or not isinstance(found.get("_class_name"), str):
        raise ConfigError(f"{folder / 'model_index.json'} names no _class_name")
    return found


class TextEncoding:
    """The pipeline's ``encode_prompt`` without VAE and denoiser.

    Args:
        folder: The pipeline's folder.
        device: Where to encode.
        options: ``max_sequence_length`` of the encoders that take one.
        trust_remote_code: Whether code from the folder may run.
    """

    def __init__(
        self, folder: Path, *, device: str, options: Mapping[str, Any], trust_remote_code: bool = False
    ) -> None:
        import diffusers
        import torch

        index = pipeline_index(folder)
        name = str(index["_class_name"])
        if name not in TEXT_OUTPUTS:
            why = REFUSED.get(name, "what its encode_prompt returns is not known here")
            if "ImageToVideo" in name or "I2V" in name:
                why = "its condition, the first image's encodings, is not cached"
            raise ConfigError(
                f"captions cannot be encoded with {name}: {why}",
                help=f"known are {', '.join(sorted(TEXT_OUTPUTS))}; or train on data.source latents you made",
            )
        without: dict[str, Any] = {part: None for part in (*_DENOISERS, "vae") if part in index}
        cls = getattr(diffusers, name)
        _quiet()
        try:
            pipeline = cls.from_pretrained(
                str(folder),
                torch_dtype=torch.float32 if device == "cpu" else torch.bfloat16,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                use_safetensors=True,
                **without,
            )
        except Exception as error:  # diffusers raises anything from OSError to TypeError here
            line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(f"pipeline {folder} cannot be loaded: {line}") from error
        self._pipeline: Any = pipeline.to(device)
        self._device = device
        self._names = TEXT_OUTPUTS[name]
        self._arguments = self._chosen(options)

    def _chosen(self, options: Mapping[str, Any]) -> dict[str, Any]:
        known = inspect.signature(self._pipeline.encode_prompt).parameters
        wanted: dict[str, Any] = {"device": self._device, "do_classifier_free_guidance": False}
        # Some pipelines have no default for it.
        wanted |= dict.fromkeys(("num_images_per_prompt", "num_videos_per_prompt"), 1)
        for twin in ("prompt_2", "prompt_3"):
            if twin in known and known[twin].default is inspect.Parameter.empty:
                wanted[twin] = None
        if "max_sequence_length" in options:
            wanted["max_sequence_length"] = int(options["max_sequence_length"])
        return {name: value for name, value in wanted.items() if name in known}

    def encode(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """Return, per caption, its embeddings without a batch dimension, on the CPU.

        One caption at a time: what a caption becomes must not depend on its neighbours.
        """
        import torch

        found = []
        with torch.no_grad():
            for caption in captions:
                outputs = self._pipeline.encode_prompt(prompt=[caption], **self._arguments)
                outputs = outputs if isinstance(outputs, tuple) else (outputs,)
                pairs = zip(self._names, outputs, strict=True)
                # A copy: a view would keep (and save) the whole of a larger tensor.
                found.append({name: value[0].cpu().clone() for name, value in pairs if name is not None})
        return found

    def unload(self) -> None:
        """Give the memory back."""
        self._pipeline = None
        _collect(self._device)


class ImageEncoding:
    """The pipeline's VAE, from pixels to the space the denoiser works in.

    Latents are normalised as the pipeline does it: ``(x - shift_factor) * scaling_factor``, or by
    ``latents_mean`` and ``latents_std`` per channel where the VAE has them (Wan: diffusers 0.42.1,
    pipelines/wan/pipeline_wan_i2v.py).

    Args:
        folder: The pipeline's folder.
        device: Where to encode.
        subfolder: The VAE's folder within.
    """

    def __init__(self, folder: Path, *, device: str, subfolder: str = "vae") -> None:
        import diffusers
        import torch

        file = folder / subfolder / "config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
            cls = getattr(diffusers, str(config["_class_name"]))
            _quiet()
            # VAEs overflow in fp16 and blur in bf16; they are small.
            vae = cls.from_pretrained(
                str(folder),
                subfolder=subfolder,
                torch_dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
            )
        except Exception as error:
            line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise ConfigError(
                f"the VAE in {folder / subfolder} cannot be loaded: {line}",
                help="a pipeline folder needs vae/config.json and safetensors weights",
            ) from error
        self._vae: Any = vae.to(device).eval()
        self._device = device
        self._config: Mapping[str, Any] = dict(vae.config)
        self.video = vae_is_video(config)

    def encode(self, pixels: Tensor) -> dict[str, Tensor]:
        """Return ``latents`` (the posterior's mean) and ``latents_std``, normalised, on the CPU.

        Args:
            pixels: ``[channels, frames, height, width]`` in [-1, 1].
        """
        import torch

        values = pixels.unsqueeze(0).to(self._device)
        with torch.no_grad():
            encoded = self._vae.encode(values if self.video else values.squeeze(2))
        if hasattr(encoded, "latent_dist"):
            mean, spread = encoded.latent_dist.mean, encoded.latent_dist.std
        else:
            mean = encoded.latent if hasattr(encoded, "latent") else encoded.latents
            spread = torch.zeros_like(mean)
        shift, scale = self._normalisation(mean)
        return {
            "latents": ((mean - shift) * scale)[0].cpu().clone(),
            "latents_std": (spread * scale)[0].cpu().clone(),
        }

    def decode(self, latents: Tensor) -> list[Image]:
        """Return the pictures of normalised latents ``[channels, (frames,) height, width]``."""
        import numpy as np
        import torch
        from PIL import Image as images

        values = latents.unsqueeze(0).to(self._device)
        shift, scale = self._normalisation(values)
        with torch.no_grad():
            pixels = self._vae.decode(values / scale + shift).sample[0].float().cpu()
        frames = pixels if self.video else pixels.unsqueeze(1)
        grey = ((frames.permute(1, 2, 3, 0) + 1) * 127.5).round().clamp(0, 255)
        return [images.fromarray(frame) for frame in grey.numpy().astype(np.uint8)]

    def _normalisation(self, like: Tensor) -> tuple[Any, Any]:
        import torch

        means, spreads = self._config.get("latents_mean"), self._config.get("latents_std")
        scale = self._config.get("scaling_factor") or 1.0
        if means is not None and spreads is not None:
            shape = (1, -1, *(1,) * (like.dim() - 2))
            middle = torch.tensor(means, device=like.device, dtype=like.dtype).view(shape)
            width = torch.tensor(spreads, device=like.device, dtype=like.dtype).view(shape)
            return middle, scale / width
        return self._config.get("shift_factor") or 0.0, scale

    def unload(self) -> None:
        """Give the memory back."""
        self._vae = None
        _collect(self._device)


def vae_is_video(config: Mapping[str, Any]) -> bool:
    """Say whether a VAE takes frames, from its raw configuration."""
    name = str(config.get("_class_name", ""))
    return any(mark in name for mark in ("Wan", "Video", "CogVideoX", "LTX", "Mochi", "QwenImage", "Cosmos"))


def vae_step(config: Mapping[str, Any]) -> int:
    """Return how many pixels of a side make one latent, from a VAE's raw configuration."""
    for key in ("scale_factor_spatial", "spatial_compression_ratio"):
        if isinstance(config.get(key), int):
            return int(config[key])
    if isinstance(config.get("dim_mult"), Sequence):  # Wan, Qwen-Image
        return int(2 ** (len(config["dim_mult"]) - 1)) * int(config.get("patch_size") or 1)
    blocks = config.get("block_out_channels") or config.get("encoder_block_out_channels")
    return int(2 ** (len(blocks) - 1)) if isinstance(blocks, Sequence) else 8


def _quiet() -> None:
    """No progress bars of the libraries: ours is one line per shard."""
    import diffusers
    import transformers

    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()


def _collect(device: str) -> None:
    import torch

    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
