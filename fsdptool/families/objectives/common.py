"""What objectives share. torch is imported inside functions; options are checked by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, dtype, nn

IGNORED = -100
"""The label of positions without a target, as transformers and torch use it."""

NOT_INPUTS = frozenset(
    {
        *("labels", "shift_labels", "target", "latents", "noise", "sigma", "sample_ids"),
        *("document_positions", "document_begins", "longest_document"),
    }
)
"""Batch keys an objective keeps from the model; every other tensor is an argument of its forward."""


def inputs(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the tensors of ``batch`` that are arguments of the model's forward."""
    return {name: tensor for name, tensor in batch.items() if name not in NOT_INPUTS}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model below a PEFT wrapper (its configuration and class are the base's)."""
    base = getattr(model, "base_model", None)
    inner = getattr(base, "model", None)
    if base is not None and hasattr(model, "peft_config") and inner is not None:
        return inner  # type: ignore[no-any-return]
    return model


def accumulation_dtype(given: dtype) -> dtype:
    """Return the dtype sums are kept in: fp32 for 16-bit floats, the dtype itself otherwise."""
    import torch

    return torch.float32 if given in (torch.float16, torch.bfloat16) else given


def require(batch: Mapping[str, Tensor], name: str, objective: str) -> Tensor:
    """Return ``batch[name]``.

    Raises:
        ConfigError: The batch has no such tensor.
    """
    if name not in batch:
        raise ConfigError(
            f"objective {objective} needs a tensor {name!r} in the batch",
            help=f"it has: {', '.join(sorted(batch))}",
        )
    return batch[name]
