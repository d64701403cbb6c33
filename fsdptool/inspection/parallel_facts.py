"""Reads what a live model says of dividing it: sizes its modules compute with, its library's plans."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from inspect import getsource, isfunction, signature
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch import nn

_FLAGS = frozenset({"is_concatenated", "is_transposed"})
"""How fused experts of transformers 5.23 store their weights (``integrations/moe.py``)."""
_CONFIG = re.compile(r"\bself\.config\.(\w+)")
_NUMBERS = ("layer_idx", "layer_id", "layer_number")
"""Attributes that number a module, not measure it."""


def sizes_of(module: nn.Module) -> tuple[tuple[str, int], ...]:
    """Return the integers a module computes with, sorted by name (``Module.sizes``)."""
    if type(module).__module__.startswith("torch."):
        return ()
    found = {
        name: int(value)
        for name, value in vars(module).items()
        if (type(value) is int and value > 0 and name not in _NUMBERS) or (name in _FLAGS)
    }
    config, kind = getattr(module, "config", None), cast(Any, type(module))
    for name in _config_reads(kind) if config is not None else ():
        value = getattr(config, name, None)
        if type(value) is int and value > 0:
            found[f"config.{name}"] = value
    return tuple(sorted(found.items()))


@cache
def arguments_of(kind: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a class's ``forward``."""
    try:
        return tuple(signature(kind.forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


@cache
def _config_reads(kind: Any) -> frozenset[str]:
    """Return the attributes of ``self.config`` that a class's methods read after it is built."""
    reads: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            break
        for name, method in vars(base).items():
            if isfunction(method) and name != "__init__" and "config" in method.__code__.co_names:
                try:
                    reads.update(_CONFIG.findall(getsource(method)))
                except (OSError, TypeError):
                    continue
    return frozenset(reads)


def library_plan(model: nn.Module, name: str) -> dict[str, str]:
    """Return a plan of the model's library, style by pattern; empty where it has none.

    transformers merges the plans of a model's parts and of their configurations into one, ``tp_plan`` and
    ``ep_plan``; diffusers declares ``_tp_plan`` on the class.

    Args:
        model: The model.
        name: ``tp_plan`` or ``ep_plan``.
    """
    try:
        plan = getattr(model, name, None) or getattr(model, f"_{name}", None)
    except Exception:
        return {}
    if not isinstance(plan, Mapping):
        return {}
    return {
        pattern: _style(model, pattern, style)
        for pattern, style in plan.items()
        if isinstance(pattern, str) and style is not None
    }


def _style(model: nn.Module, pattern: str, style: Any) -> str:
    if isinstance(style, str):
        return style
    # diffusers 0.42 marks fused layers with objects; the proportions are theirs or stored on the layer
    # (``hooks/tensor_parallel.py``).
    way = "col" if "Colwise" in type(style).__name__ else "row"
    blocks = getattr(style, "blocks", None)
    if not blocks:
        matching = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        marked = (module for path, module in model.named_modules() if matching.fullmatch(path))
        blocks = next(chain(marked), None)
        blocks = getattr(blocks, f"_tp_packed_{way}_blocks", None)
    return ":".join([f"packed_{way}wise", *(str(block) for block in blocks or ())])
