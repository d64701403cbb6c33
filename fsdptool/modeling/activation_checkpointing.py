"""Activation checkpointing of the units a plan marks, without changing a module's name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fsdptool.errors import ConfigError
from fsdptool.modeling.activation_offload import ActivationOffload
from fsdptool.records.checkpointing import (
    OPERATOR_CLASSES,
    SAVED_OPERATORS,
    Selector,
    read_selector,
)

if TYPE_CHECKING:
    from fsdptool.records.sharding import UnitPlan

_OPTIONAL = frozenset(SAVED_OPERATORS).union(*OPERATOR_CLASSES.values())
"""Operators that a torch version, or a machine without a package, may lack: none is then called."""

_Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint_units(model: nn.Module, plan: UnitPlan, *, offload: bool = False) -> int:
    """Make every checkpointed unit recompute its forward in backward; returns how many there are.

    The forward method is replaced rather than the module wrapped, so parameter names stay, and
    FSDP's hooks stay outside: a unit is gathered before it is recomputed.

    Args:
        model: Before ``fully_shard``.
        plan: Says which units, and what recomputation finds saved.
        offload: Keep the saved inputs in host memory.

    Raises:
        ConfigError: An operator to save does not exist.
    """
    count = 0
    host = ActivationOffload() if offload else None
    for unit in plan.units:
        if not unit.checkpointed:
            continue
        contexts = _selective(unit.save_operators) if unit.save_operators else None
        for path in unit.modules:
            module = model.get_submodule(path)
            module.forward = _recomputed(module.forward, contexts, host)
            # Blocks that keep different outputs are not alike (``memory/tracing/layer_extrapolation.py``).
            module.forward.saved = unit.save_operators  # type: ignore[attr-defined]
            count += 1
    return count


def _recomputed(
    forward: Callable[..., Any], contexts: _Contexts | None, host: ActivationOffload | None
) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False}
    if contexts is not None:
        options["context_fn"] = contexts

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    @functools.wraps(forward)
    def run_offloaded(*args: Any, **kwargs: Any) -> Any:
        if host is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # ``checkpoint`` saves the tensors among its arguments, and holds others, also in tuples, by itself.
        leaves, structure = tree_flatten((args, kwargs))

        def flat(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, structure)
            return forward(*args, **kwargs)

        with host.block(leaves):
            return checkpoint(flat, *leaves, **options)

    # A compiled block's graph contains its recomputation. It cannot contain copies on another stream.
    if host is None:
        return run
    return torch.compiler.disable(run_offloaded, recursive=False)  # type: ignore[no-untyped-call, no-any-return]


def _selective(texts: Sequence[str]) -> _Contexts:
    """Return what ``torch.utils.checkpoint`` calls before each forward of a block, counters included."""
    selectors: dict[str, list[Selector]] = {}
    for text in texts:
        selector = read_selector(text)
        selectors.setdefault(selector.operator, []).append(selector)
    watched: dict[Any, list[str]] = {}
    for name in selectors:
        members = OPERATOR_CLASSES.get(name, (name,))
        for operator in members:
            overload = _operator(operator, strict=operator not in _OPTIONAL)
            if overload is not None:
                watched.setdefault(overload, []).append(name)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        # torch 2.13 asks in forward only; earlier versions ask again in recomputation, which counts afresh.
        calls = {phase: dict.fromkeys(selectors, 0) for phase in (False, True)}

        def policy(
            context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
        ) -> CheckpointPolicy:
            kept = False
            counts = calls[context.is_recompute]
            for name in watched.get(operator, ()):
                counts[name] += 1
                kept |= any(selector.selects(counts[name]) for selector in selectors[name])
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call, no-any-return]

    return contexts


def _operator(name: str, *, strict: bool) -> Any:
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
