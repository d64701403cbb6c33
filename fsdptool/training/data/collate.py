"""Samples to a micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from fsdptool.training.data.loader import Sample

if TYPE_CHECKING:
    from torch import Tensor


class Stack:
    """Stacks equal samples.

    Args:
        shared: Names that are taken from the first sample, without a new dimension.
        only: Names that are kept; None keeps all.
    """

    def __init__(self, *, shared: Collection[str] = (), only: Collection[str] | None = None) -> None:
        self._shared = frozenset(shared)
        self._only = only

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        import torch

        names = [name for name in samples[0] if self._only is None or name in self._only]
        return {
            name: _tensor(samples[0][name])
            if name in self._shared
            else torch.stack([_tensor(sample[name]) for sample in samples])
            for name in names
        }


def _tensor(value: Any) -> Tensor:
    import torch

    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
