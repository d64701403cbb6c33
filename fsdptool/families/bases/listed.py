"""Tensors of a micro-batch that a recipe lists (``objective.options.inputs``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import Fill, TensorSpec

_KEYS = frozenset({"shape", "dtype", "high", "low", "values", "flat"})


def listed_inputs(listed: Any, micro_batch: int) -> tuple[TensorSpec, ...]:
    """Return the tensors that ``objective.options.inputs`` lists.

    Each name has the ``shape`` of one sample and a ``dtype``; integers ``high`` and ``low``, between which
    they are drawn; ``values``, the first entries of each sample; and ``flat``, which makes the samples follow
    one another along the first dimension.

    Raises:
        ConfigError: The list is not one of tensors.
    """
    if not isinstance(listed, Mapping) or not listed:
        raise ConfigError("objective.options.inputs must map names to tensors", help=_EXAMPLE)
    specs = []
    for name, item in listed.items():
        known = isinstance(item, Mapping) and set(item) <= _KEYS and "shape" in item
        shape = item["shape"] if known else None
        if not isinstance(shape, Sequence) or not all(isinstance(size, int) and size > 0 for size in shape):
            raise ConfigError(f"objective.options.inputs.{name} is not a tensor", help=_EXAMPLE)
        dtype = str(item.get("dtype", "float32"))
        spec = described(str(name), (micro_batch, *shape), dtype, item.get("high"))
        values = item.get("values", ())
        numbers = isinstance(values, Sequence) and not isinstance(values, str)
        if not numbers or not all(isinstance(value, int | float) for value in values):
            raise ConfigError(
                f"objective.options.inputs.{name}.values is not a list of numbers", help=_EXAMPLE
            )
        low = item.get("low", 0)
        # Without a bound to draw below, integers are zero behind the values that are given.
        fill: Fill = "constant" if spec.fill == "tokens" and spec.high is None and values else spec.fill
        specs.append(replace(spec, values=tuple(values), low=low, fill=fill))
    return tuple(specs)


_EXAMPLE = "for example inputs: {x: {shape: [3, 32, 32]}, labels: {shape: [], dtype: int64, high: 10}}"


def described(name: str, shape: tuple[int, ...], dtype: str, high: int | None) -> TensorSpec:
    """Return a tensor's description; integers are drawn below ``high``, floats from a normal distribution.

    Raises:
        ConfigError: torch has no such dtype.
    """
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"{name}: torch has no dtype {dtype!r}", help="for example float32 or int64")
    if kind is torch.bool:
        return TensorSpec(name, shape, dtype, "mask")
    if kind.is_floating_point:
        return TensorSpec(name, shape, dtype, "normal", compute=True)
    return TensorSpec(name, shape, dtype, "labels" if name == "labels" else "tokens", high=high)
