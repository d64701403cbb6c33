"""dtypes by name, and the loss scaler of fp16 runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.utils import _apply_to_tensors

from fsdptool.errors import ConfigError

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def to_dtype(name: str | None) -> torch.dtype | None:
    """Return the torch dtype of ``name``; None stays None.

    Raises:
        ConfigError: It is not a training dtype.
    """
    if name is None:
        return None
    if name not in _DTYPES:
        raise ConfigError(f"{name!r} is not a training dtype", help=f"choose one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def cast_inputs(model: nn.Module, dtype: torch.dtype | None, exact: Collection[str]) -> None:
    """Cast ``model``'s floating inputs before each forward, but for the arguments named in ``exact``.

    Stands for ``cast_forward_inputs`` of FSDP2's root, which casts every floating tensor: a time of 999
    becomes 1000 in bfloat16, and a denoiser is told of another noise level than it is shown.

    Args:
        model: The root, after ``fully_shard``: inputs are cast before its parameters are gathered.
        dtype: None leaves all inputs as they come.
        exact: Names of keyword arguments.
    """
    if dtype is None:
        return

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        kept = {name: value for name, value in kwargs.items() if name in exact}
        return _apply_to_tensors(cast, args), {**_apply_to_tensors(cast, kwargs), **kept}

    model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


@dataclass(slots=True)
class LossScaler:
    """Dynamic loss scale for fp16: doubles after ``interval`` good steps, halves on overflow.

    The overflow verdict comes from the global gradient norm, which every rank computes from the
    same reduction, so ranks cannot disagree; ``torch.amp.GradScaler`` would ask each rank about its
    own shards. Constants are those of ``torch.amp.GradScaler`` (torch 2.13).
    """

    scale: float = 65536.0
    interval: int = 2000
    good_steps: int = 0

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step."""
        if overflow:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the count of good steps, as plain data."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved scale."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])
