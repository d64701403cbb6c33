"""Exponential moving average of the trained parameters, sharded as they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fsdptool.distributed.rows import sharded_like
from fsdptool.distributed.shard import local


class Ema:
    """Keeps ``average = decay x average + (1 - decay) x parameter`` in fp32 (fp64 for fp64).

    Args:
        named: Trained parameters, materialised.
        decay: Between 0 and 1.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self.decay = decay
        self._parameters = {name: p for name, p in named if p.requires_grad}
        self._averages = {name: _wide_copy(p) for name, p in self._parameters.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averages by parameter name, live; DTensors where the parameters are."""
        return dict(self._averages)

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters after an optimizer step."""
        averages = [local(tensor) for tensor in self._averages.values()]
        current = [local(p).to(a.dtype) for p, a in zip(self._parameters.values(), averages, strict=True)]
        torch._foreach_lerp_(averages, current, 1.0 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the model hold the averages for the time of an evaluation or an export."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            shard, average = local(parameter), local(self._averages[name])
            kept = shard.to(average.dtype, copy=True)
            shard.copy_(average)
            average.copy_(kept)


def _wide_copy(parameter: torch.Tensor) -> torch.Tensor:
    shard = local(parameter).detach()
    dtype = torch.float64 if shard.dtype == torch.float64 else torch.float32
    return sharded_like(shard.to(dtype, copy=True), parameter)
