"""From a model on meta to one on fake tensors, ties kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from fsdptool.families.protocol import TensorSpec


def materialise(model: nn.Module, mode: Any, dtype: torch.dtype | None) -> None:
    """Swap every parameter and buffer for a fake CPU tensor, once per identity.

    ``to_empty`` would lose ties; building inside the fake mode fails on data-dependent
    initialisation (torch 2.13, transformers 5.23).

    Args:
        model: Built on meta, or partly on the CPU (some constructors ignore the device context).
        mode: The ``FakeTensorMode``.
        dtype: Floating parameters take it; None leaves each as built. Buffers keep theirs.
    """
    made: dict[int, Any] = {}

    def fake(tensor: torch.Tensor, to: torch.dtype | None) -> torch.Tensor:
        target = to if to is not None and tensor.is_floating_point() else tensor.dtype
        with mode:
            return torch.empty(tensor.shape, dtype=target, device="cpu")

    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = (
                        nn.Parameter(fake(parameter, dtype), requires_grad=parameter.requires_grad),
                        parameter,
                    )
                module._parameters[name] = made[id(parameter)][0]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = (fake(buffer, None), buffer)
                module._buffers[name] = made[id(buffer)][0]


def fake_batch(
    specs: Sequence[TensorSpec], mode: Any, compute: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """Return a micro-batch of fake tensors of the given shapes and dtypes."""
    batch: dict[str, torch.Tensor] = {}
    with mode:
        for spec in specs:
            dtype = getattr(torch, spec.dtype)
            if spec.compute and compute is not None:
                dtype = compute
            batch[spec.name] = torch.empty(spec.shape, dtype=dtype, device="cpu")
    return batch


def tensors_of(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors of a batch."""
    return [value for value in batch.values() if isinstance(value, torch.Tensor)]
