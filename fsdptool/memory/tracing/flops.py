"""FLOPs and memory traffic of one operator, for the time model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_iter


@cache
def _formulas() -> dict[Any, Any]:
    from torch.utils.flop_counter import flop_registry

    return dict(flop_registry)


def operations(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> Iterable[tuple[str, float]]:
    """Yield the dtype and FLOPs of ``func``: torch's own formulas, and those it lacks in 2.13.

    torch has none for the CPU flash kernel and for grouped matrix products
    (``torch/utils/flop_counter.py``).
    """
    packet = func._overloadpacket
    name = packet.__name__
    if name in ("_grouped_mm", "_scaled_grouped_mm"):
        yield _dtype(args[0]), _grouped(args[0], args[1], out)
    elif name == "_scaled_dot_product_flash_attention_for_cpu":
        yield _dtype(args[0]), _attention(args[0], args[1], args[2])
    elif name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        yield _dtype(args[0]), 2.5 * _attention(args[1], args[2], args[3])
    elif (formula := _formulas().get(packet)) is not None:
        yield _dtype(args[0]), float(formula(*args, **kwargs, out_val=out))


def _grouped(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> float:
    """Every row meets one group's matrix; of two matrices (weight gradients) the rows are summed over."""
    if left.dim() == right.dim() == 2:
        return 2.0 * left.numel() * right.shape[-1]
    return 2.0 * out.numel() * left.shape[-1]


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> float:
    """Two products over heads x queries x keys (Dao et al. 2022)."""
    queries = prod(query.shape[:-1])
    return 2.0 * queries * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def traffic(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, outputs: Sequence[torch.Tensor]
) -> int:
    """Return the bytes read and written, each tensor's elements counted once."""
    total = sum(tensor.numel() * tensor.element_size() for tensor in outputs)
    for leaf in tree_iter((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            total += leaf.numel() * leaf.element_size()
    return total


def _dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else "float32"
