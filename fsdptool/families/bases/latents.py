"""Micro-batches of denoisers from cached latents and text embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Sample = Mapping[str, "Tensor"]

SOURCES: Mapping[str, str] = {
    "encoder_hidden_states": "prompt_embeds",
    "encoder_hidden_states_t5": "prompt_embeds_t5",
    "encoder_hidden_states_llama3": "prompt_embeds_llama3",
    "pooled_embeds": "pooled_prompt_embeds",
    "pooled_projections": "pooled_prompt_embeds",
    "text_embeds": "pooled_prompt_embeds",
    "encoder_attention_mask": "prompt_attention_mask",
    "encoder_hidden_states_mask": "prompt_attention_mask",
}
"""Where a denoiser's argument comes from, by the names pipelines give what they encode."""

SAMPLINGS = ("uniform", "logit_normal")


def time(uniform: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return times in [0, 1) from numbers in [0, 1), monotonously.

    ``timestep_sampling`` ``uniform``, or ``logit_normal`` with ``logit_mean`` and ``logit_std`` (Esser
    et al. 2024, section 3.1); then ``shift`` s moves mass towards noise by s t / (1 + (s - 1) t) (their
    section 5.3.2).

    Args:
        uniform: Any shape, fp64.
        options: The objective's options.

    Raises:
        ConfigError: An option has a value that means nothing.
    """
    import torch

    sampling = options.get("timestep_sampling", "logit_normal")
    mean, deviation = float(options.get("logit_mean", 0.0)), float(options.get("logit_std", 1.0))
    shift = float(options.get("shift", 1.0))
    if sampling not in SAMPLINGS:
        raise ConfigError(f"timestep_sampling is {sampling!r}", help=f"choose {' or '.join(SAMPLINGS)}")
    if shift <= 0 or deviation <= 0:
        raise ConfigError("shift and logit_std must be positive")
    found = uniform.double()
    if sampling == "logit_normal":
        inner = found.clamp(1e-9, 1 - 1e-9)
        normal = torch.special.ndtri(inner)
        found = torch.sigmoid(mean + deviation * normal)
    return shift * found / (1 + (shift - 1) * found)


def stacked(samples: Sequence[Sample], name: str) -> Tensor:
    """Return one tensor of all samples; shorter texts are filled with zeros at their end.

    Raises:
        ConfigError: A sample has no such tensor.
    """
    import torch

    if missing := [number for number, sample in enumerate(samples) if name not in sample]:
        raise ConfigError(
            f"cached sample {missing[0]} has no {name}",
            help=f"it has: {', '.join(sorted(samples[missing[0]]))}; make the cache again",
        )
    tensors = [sample[name] for sample in samples]
    longest = max(tensor.shape[0] if tensor.dim() else 0 for tensor in tensors)
    return torch.stack([_filled(tensor, longest) for tensor in tensors])


def _filled(tensor: Tensor, length: int) -> Tensor:
    import torch

    if not tensor.dim() or tensor.shape[0] == length:
        return tensor
    return torch.cat((tensor, tensor.new_zeros(length - tensor.shape[0], *tensor.shape[1:])))
