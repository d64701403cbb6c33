"""Samples to a micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from fsdptool.training.data.loader import Sample

if TYPE_CHECKING:
    from torch import Tensor


class Stack:
    """Stacks equal samples; names in ``shared`` are taken from the first sample without a new dimension."""

    def __init__(self, shared: Collection[str] = ()) -> None:
        self._shared = frozenset(shared)

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        import torch

        first = samples[0]
        return {
            name: _tensor(first[name])
            if name in self._shared
            else torch.stack([_tensor(sample[name]) for sample in samples])
            for name in first
        }


def _tensor(value: Any) -> Tensor:
    import torch

    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
