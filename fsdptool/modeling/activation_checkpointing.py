"""Activation checkpointing of the units a plan marks, without changing a module's name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from fsdptool.records.recipe import Checkpointing
    from fsdptool.records.sharding import UnitPlan

SAVED_OPERATORS = (
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten._grouped_mm.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
    "aten._scaled_dot_product_attention_math.default",
    "_c10d_functional.reduce_scatter_tensor.default",
)
"""What selective checkpointing keeps by default: matrix products and attention, the operators that
cost far more time to repeat than memory to keep."""


def checkpoint_units(
    model: nn.Module, plan: UnitPlan, options: Checkpointing | None, *, offload: bool = False
) -> int:
    """Make every checkpointed unit recompute its forward in backward; returns how many there are.

    The forward method is replaced rather than the module wrapped, so parameter names stay, and
    FSDP's hooks stay outside: a unit is gathered before it is recomputed.

    Args:
        model: Before ``fully_shard``.
        plan: Says which units (none, all or every n-th).
        options: ``selective`` and its operators; None is full.
        offload: Keep the saved inputs in host memory.

    Raises:
        ConfigError: An operator to save does not exist.
    """
    context = None
    if options is not None and options.mode == "selective":
        context = _selective(options.save_operators or SAVED_OPERATORS, strict=bool(options.save_operators))
    count = 0
    for unit in plan.units:
        if not unit.checkpointed:
            continue
        for path in unit.modules:
            module = model.get_submodule(path)
            module.forward = _recomputed(module.forward, context, offload)
            count += 1
    return count


def _recomputed(
    forward: Callable[..., Any], context: Callable[[], Any] | None, offload: bool
) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if context is not None:
        options["context_fn"] = context

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not offload:
            return checkpoint(forward, *args, **options, **kwargs)
        with save_on_cpu(pin_memory=torch.cuda.is_available()):
            return checkpoint(forward, *args, **options, **kwargs)

    return run


def _selective(
    names: tuple[str, ...], *, strict: bool
) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
    saved = {operator for name in names if (operator := _operator(name, strict)) is not None}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def _operator(name: str, strict: bool) -> Any:
    """Look up ``aten.mm.default`` under ``torch.ops``; ``torch.ops.`` and ``aten.`` may be left out."""
    parts = name.removeprefix("torch.ops.").split(".")
    if len(parts) == 1 or (parts[0] not in dir(torch.ops) and parts[-1] == "default" and len(parts) == 2):
        parts = ["aten", *parts]
    operator: Any = torch.ops
    try:
        for part in parts:
            operator = getattr(operator, part)
    except AttributeError:
        if strict:
            raise ConfigError(
                f"sharding.checkpointing.save_operators: torch has no operator {name!r}",
                help="name it as torch.ops does, for example aten.mm.default",
            ) from None
        return None
    return operator if isinstance(operator, torch._ops.OpOverload) else getattr(operator, "default", None)
