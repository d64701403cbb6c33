"""Text and latents from a sharded model. Every rank runs the same forwards, so no rank waits for another.

Nothing here looks at what was generated to decide how many forwards to run: a rank that stopped
early would leave the others in a collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

FLOW, VARIANCE = ("flow_matching",), ("epsilon", "v_prediction")


def continue_text(
    model: nn.Module, prompt: Tensor, *, new_tokens: int, temperature: float, generator: Any
) -> Tensor:
    """Return ``prompt`` [1, P] continued by ``new_tokens`` tokens, [1, P + new_tokens].

    Without a cache: the window is short, and a model under FSDP gathers its weights once per forward
    either way.
    """
    import torch

    length = prompt.shape[1]
    tokens = torch.nn.functional.pad(prompt, (0, new_tokens))
    for at in range(length, length + new_tokens):
        # Without a name for it, one position's view does not keep all logits until the next forward ends.
        tokens[:, at] = _choose(
            model(input_ids=tokens, use_cache=False).logits[:, at - 1], temperature, generator
        )
    return tokens


def translate(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    *,
    start: int,
    new_tokens: int,
    temperature: float,
    generator: Any,
) -> Tensor:
    """Return what a decoder says about the encoder's inputs, [1, new_tokens]."""
    import torch

    source = {name: tensor for name, tensor in batch.items() if name != "labels"}
    said = torch.full((1, new_tokens + 1), start, dtype=torch.int64, device=batch["input_ids"].device)
    for at in range(new_tokens):
        said[:, at + 1] = _choose(
            model(**source, decoder_input_ids=said[:, :-1], use_cache=False).logits[:, at],
            temperature,
            generator,
        )
    return said[:, 1:]


def _choose(logits: Tensor, temperature: float, generator: Any) -> Tensor:
    import torch

    if temperature <= 0:
        return logits.argmax(-1)
    shares = torch.softmax(logits.float().cpu() / temperature, -1)
    return torch.multinomial(shares, 1, generator=generator)[:, 0].to(logits.device)


def denoise(model: nn.Module, objective: Any, batch: Mapping[str, Tensor], *, steps: int) -> Tensor:
    """Return latents denoised from ``batch["noise"]`` in ``steps`` forwards, without guidance.

    Flow matching: Euler steps along the predicted velocity, levels shifted as in training. Noise and
    velocity prediction: DDIM (Song et al. 2021, equation 12, eta 0).
    """
    if objective.name in FLOW:
        return _euler(model, objective, batch, steps)
    return _ddim(model, objective, batch, steps)


def _euler(model: nn.Module, objective: Any, batch: Mapping[str, Tensor], steps: int) -> Tensor:
    import torch

    shift = float(objective.options.get("shift", 1.0))
    levels = torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64)
    levels = shift * levels / (1 + (shift - 1) * levels)
    latents = batch["noise"]
    for now, after in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        time = latents.new_full((latents.shape[0],), now)
        velocity = objective.denoise(model, latents, time, batch)
        latents = latents + (after - now) * velocity.to(latents.dtype)
    return latents


def _ddim(model: nn.Module, objective: Any, batch: Mapping[str, Tensor], steps: int) -> Tensor:
    import torch

    times = torch.linspace(objective.steps - 1, 0, steps).round().long().tolist()
    latents = batch["noise"]
    for number, now in enumerate(times):
        time = torch.full((latents.shape[0],), now, dtype=torch.int64, device=latents.device)
        signal, spread = objective.coefficients({**batch, "latents": latents, "timestep": time})
        found = objective.denoise(model, latents, time, batch).to(latents.dtype)
        if objective.name == "epsilon":
            clean, noise = (latents - spread * found) / signal, found
        else:
            clean, noise = signal * latents - spread * found, spread * latents + signal * found
        if number + 1 == len(times):
            latents = clean
            break
        later = torch.full_like(time, times[number + 1])
        signal, spread = objective.coefficients({**batch, "latents": latents, "timestep": later})
        latents = signal * clean + spread * noise
    return latents
