"""Draws synthetic micro-batches from a family's batch spec. torch is imported on use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fsdptool.families.protocol import TensorSpec

if TYPE_CHECKING:
    from torch import Generator, Tensor


def synthesise(
    specs: Iterable[TensorSpec], generator: Generator, *, compute_dtype: str | None = None
) -> dict[str, Tensor]:
    """Return one micro-batch on the CPU.

    Args:
        specs: What the family says a micro-batch is.
        generator: Every value comes from it, in the order of ``specs``.
        compute_dtype: dtype of floating tensors whose spec says ``compute``; None keeps the spec's.
    """
    return {spec.name: _draw(spec, generator, compute_dtype) for spec in specs}


def _draw(spec: TensorSpec, generator: Generator, compute_dtype: str | None) -> Tensor:
    import torch

    dtype = getattr(torch, compute_dtype if spec.compute and compute_dtype else spec.dtype)
    shape = spec.shape
    if spec.fill in ("tokens", "labels"):
        drawn = torch.randint(spec.low, spec.high or 2, shape, generator=generator)
    elif spec.fill == "timesteps" and not dtype.is_floating_point:
        drawn = torch.randint(0, spec.high or 1000, shape, generator=generator)
    elif spec.fill in ("uniform", "timesteps"):
        drawn = torch.rand(shape, generator=generator)
    elif spec.fill == "normal":
        drawn = torch.randn(shape, generator=generator)
    elif spec.fill == "mask":
        drawn = torch.ones(shape)
    elif spec.fill == "positions":
        drawn = torch.arange(shape[-1]).expand(shape).clone()
    else:
        drawn = torch.zeros(shape)
    drawn = drawn.to(dtype)
    if spec.values:
        _write(drawn, spec)
    return drawn


def _write(drawn: Tensor, spec: TensorSpec) -> None:
    import torch

    values = torch.tensor(spec.values, dtype=drawn.dtype)
    drawn.view(drawn.shape[0], -1)[:, : values.numel()] = values
