"""From cached latents and embeddings to the micro-batch a family of denoisers names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import TensorSpec
from fsdptool.training.data.collate import Sample

if TYPE_CHECKING:
    from torch import Tensor

TIME_SAMPLING = ("uniform", "logit_normal", "cosmap")
"""Densities of the noise level (Esser et al. 2024, section 3.1)."""

_TEXT = {
    "encoder_hidden_states": "prompt_embeds",
    "pooled_projections": "pooled_prompt_embeds",
    "text_embeds": "pooled_prompt_embeds",
    "encoder_attention_mask": "prompt_attention_mask",
    "encoder_hidden_states_mask": "prompt_attention_mask",
}
"""Argument of a denoiser to what its pipeline's ``encode_prompt`` calls it."""

_SIZES: Mapping[str, Callable[[Tensor], Tensor]] = {
    # ``size`` is original height and width, crop top and left, target height and width.
    "time_ids": lambda size: size,
    "resolution": lambda size: size[4:6],
    "aspect_ratio": lambda size: size[4:5] / size[5:6],
    "original_size": lambda size: size[0:2],
    "crop_coords": lambda size: size[2:4],
    "target_size": lambda size: size[4:6],
}


class TimeSampling:
    """Turns a uniform number into a noise level.

    Args:
        options: The objective's ``timestep_sampling`` (``uniform``, ``logit_normal``, ``cosmap``),
            ``logit_mean``, ``logit_std``, ``shift`` (Esser et al. 2024, equation 23) and
            ``num_train_timesteps``.
        fraction: Whether time is a fraction (flow matching: ``logit_normal`` by default) or one of
            the training timesteps (``uniform`` by default).
    """

    def __init__(self, options: Mapping[str, Any], *, fraction: bool) -> None:
        self.name = str(options.get("timestep_sampling", "logit_normal" if fraction else "uniform"))
        if self.name not in TIME_SAMPLING:
            raise ConfigError(
                f"objective.options.timestep_sampling {self.name!r} is not one of {', '.join(TIME_SAMPLING)}"
            )
        self.mean = float(options.get("logit_mean", 0.0))
        self.std = float(options.get("logit_std", 1.0))
        self.shift = float(options.get("shift", 1.0))
        self.steps = int(options.get("num_train_timesteps", 1000))
        if self.std <= 0 or self.shift <= 0 or self.steps < 1:
            raise ConfigError(
                f"objective.options: logit_std {self.std}, shift {self.shift} and num_train_timesteps "
                f"{self.steps} must be positive"
            )
        self.fraction = fraction

    def __call__(self, uniform: Tensor) -> Tensor:
        """Return noise levels in [0, 1] (float32), or timesteps (int64), of numbers in [0, 1)."""
        import torch

        level = uniform.double()
        if self.name == "logit_normal":
            edge = torch.finfo(torch.float64).eps
            level = torch.sigmoid(self.mean + self.std * torch.special.ndtri(level.clamp(edge, 1 - edge)))
        elif self.name == "cosmap":
            level = 1 - 1 / (torch.tan(level * (math.pi / 2)) + 1)
        level = self.shift * level / (1 + (self.shift - 1) * level)
        if self.fraction:
            return level.float()
        return (level * self.steps).long().clamp_(0, self.steps - 1)


class Denoising:
    """Collates cached samples into the tensors of a family's batch specification.

    Args:
        wanted: The specification by name, for a micro-batch of one sample.
        options: The objective's options (:class:`TimeSampling`).

    Raises:
        ConfigError: The family needs a tensor that is not cached.
    """

    def __init__(self, wanted: Mapping[str, TensorSpec], options: Mapping[str, Any]) -> None:
        self._wanted = dict(wanted)
        self._time = TimeSampling(options, fraction="sigma" in wanted)
        known = {"latents", "noise", "sigma", "timestep", *_TEXT, *_SIZES}
        if missing := sorted(set(wanted) - known):
            raise ConfigError(
                f"this model also takes {', '.join(missing)}, which precompute does not make",
                help="train it on data.source synthetic, or choose a text-to-image or text-to-video model",
            )

    def check(self, sample: Sample) -> None:
        """Hold one sample against the specification.

        Raises:
            ConfigError: The cached tensors do not suit the model.
        """
        channels, needed = sample["latents"].shape[0], self._wanted["latents"].shape[1]
        if channels != needed or sample["latents"].dim() + 1 != len(self._wanted["latents"].shape):
            raise ConfigError(
                f"the VAE's latents are {tuple(sample['latents'].shape)}, the model takes "
                f"{self._wanted['latents'].shape[1:]}",
                help="name the pipeline the model belongs to in data.options.pipeline",
            )
        if sample["latents"].numel() > math.prod(self._wanted["latents"].shape):
            raise ConfigError(
                f"the VAE's latents are {tuple(sample['latents'].shape)}, memory is planned for "
                f"{self._wanted['latents'].shape[1:]}",
                help="this VAE shrinks pixels less than the family's own; lower batch.height and batch.width",
            )
        for name, cached in _TEXT.items():
            item = self._wanted.get(name)
            if item is None:
                continue
            if cached not in sample:
                raise ConfigError(
                    f"the model takes {name}, the pipeline's text encoders make no {cached}",
                    help="name the pipeline the model belongs to in data.options.pipeline",
                )
            if item.fill != "mask" and sample[cached].shape[-1] != item.shape[-1]:
                raise ConfigError(
                    f"{cached} is {sample[cached].shape[-1]} wide, the model takes {item.shape[-1]}",
                    help="name the pipeline the model belongs to in data.options.pipeline",
                )

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        import torch

        found: dict[str, Tensor] = {}
        for name, item in self._wanted.items():
            dtype = getattr(torch, item.dtype)
            if name in ("sigma", "timestep"):
                found[name] = self._time(torch.stack([sample["uniform"] for sample in samples]))
                continue
            if name in _TEXT:
                parts = [_text(sample[_TEXT[name]], item) for sample in samples]
            elif name in _SIZES:
                parts = [_SIZES[name](sample["size"].double()) for sample in samples]
            else:
                parts = [sample[name] for sample in samples]
            found[name] = torch.stack(parts).to(dtype)
        return found


def _text(tensor: Tensor, item: TensorSpec) -> Tensor:
    """Cut or fill (with zeros) the tokens to the specification's number."""
    if len(item.shape) < 3 and item.fill != "mask":
        return tensor
    length = item.shape[1]
    if tensor.shape[0] >= length:
        return tensor[:length]
    filled = tensor.new_zeros(length, *tensor.shape[1:])
    filled[: tensor.shape[0]] = tensor
    return filled
