"""Samples to a micro-batch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

Sample = Mapping[str, Any]
"""Arrays, tensors or numbers by name."""
Array = Any
"""A numpy array or a torch tensor: text is loaded without torch, whose import costs seconds."""


class Stack:
    """Stacks equal samples.

    Args:
        shared: Names that are taken from the first sample, without a new dimension.
        only: Names that are kept; None keeps all.
    """

    def __init__(self, *, shared: Collection[str] = (), only: Collection[str] | None = None) -> None:
        self._shared = frozenset(shared)
        self._only = only

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Array]:
        names = [name for name in samples[0] if self._only is None or name in self._only]
        return {
            name: samples[0][name] if name in self._shared else stack([sample[name] for sample in samples])
            for name in names
        }


def stack(values: Sequence[Any]) -> Array:
    """Return arrays, numbers or tensors of one shape along a new first dimension."""
    if isinstance(values[0], np.ndarray | np.generic | int | float):
        return np.stack([np.asarray(value) for value in values])
    import torch

    return torch.stack(list(values))


def as_tensors(batch: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return a micro-batch whose arrays are tensors."""
    import torch

    return {
        name: value if isinstance(value, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        for name, value in batch.items()
    }
