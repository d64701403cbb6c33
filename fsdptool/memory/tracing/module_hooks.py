"""Module boundaries: the places where ``fully_shard`` would act, marked while a model is traced.

The order of marks is that of FSDP2's own hooks (torch 2.13, ``_fsdp_state.py`` and
``_fsdp_param_group.py``): inputs are cast, then parameters are needed; the gradient of an output
calls for them again; when the gradients of all inputs are complete the module is done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import _common_utils
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_leaves, tree_map

from fsdptool.memory.tracing.fake_tensors import MicroBatchConditions
from fsdptool.memory.tracing.recorder import SegmentRecorder

_LARGE_LINEAR = 100_000_000
_LEAF_SHARE = 0.05


class _Complete(torch.autograd.Function):
    """Identity whose backward runs once the gradients of all of a module's inputs are complete."""

    generate_vmap_rule = True

    @staticmethod
    def forward(_hooks: Any, _path: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], _output: Any) -> None:
        ctx.hooks, ctx.path = inputs[0], inputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.hooks.complete(ctx.path)
        return (None, None, *gradients)


class ModuleHooks:
    """Hooks on every module that can be (part of) an FSDP unit.

    Args:
        recorder: Where to mark.
        conditions: What floating inputs are cast to at the root (``distributed/shard.py:
            cast_inputs``) and at listed blocks (``MixedPrecisionPolicy.cast_forward_inputs``), and
            outputs at both.
        prefix: Put before every path.
    """

    def __init__(
        self, recorder: SegmentRecorder, conditions: MicroBatchConditions, *, prefix: str = ""
    ) -> None:
        self._recorder = recorder
        self._conditions = conditions
        self._prefix = prefix
        self._pending: set[str] = set()
        self.in_backward = False

    def attach(self, model: nn.Module, *, fine: bool = True, opaque: Collection[str] = ()) -> None:
        """Register the hooks.

        Args:
            model: What is traced.
            fine: False leaves out what is inside listed blocks.
            opaque: Modules that run as one, because they are compiled: what is inside is left out.
        """
        casting = cast_points(model)
        inside = tuple(f"{path}." for path in opaque)
        for path in boundary_paths(model, fine=fine):
            if path.startswith(inside):
                continue
            module = model.get_submodule(path)
            casts = path in casting
            module.register_forward_pre_hook(self._enter(path, casts), prepend=True, with_kwargs=True)
            module.register_forward_hook(self._leave(path, casts))

    def complete(self, path: str) -> None:
        """Mark that the gradients of a module's inputs are complete."""
        self._pending.discard(path)
        self._recorder.mark("grad_leave", self._prefix + path)

    def _enter(self, path: str, casts: bool) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> Any:
            if self.in_backward:
                return None
            if casts:
                args, kwargs = self._cast(path, args, kwargs)
            self._recorder.mark("enter", self._prefix + path)
            if not torch.is_grad_enabled():
                return args, kwargs
            tensors = grad_tensors((args, kwargs))
            if tensors:
                # FSDP2 replaces each argument of a unit by a tensor of its own. Elsewhere two arguments that
                # are one tensor stay one: nn.MultiheadAttention asks whether its key is its value.
                keys = range(len(tensors)) if casts else [id(tensor) for tensor in tensors]
                distinct = dict(zip(keys, tensors, strict=True))
                marked = _Complete.apply(self, path, *distinct.values())  # type: ignore[no-untyped-call]
                replaced = dict(zip(distinct, marked, strict=True))
                args, kwargs = with_grad_tensors((args, kwargs), iter([replaced[key] for key in keys]))
            return args, kwargs

        return hook

    def _cast(self, path: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        dtype = self._conditions.compute if path else self._conditions.inputs
        if dtype is None:
            return args, kwargs
        exact = () if path else self._conditions.exact
        kept = {name: value for name, value in kwargs.items() if name in exact}
        return _to(args, dtype), {**_to(kwargs, dtype), **kept}

    def _leave(self, path: str, casts: bool) -> Any:
        def arrived(_gradient: torch.Tensor) -> None:
            if path not in self._pending:
                self._pending.add(path)
                self._recorder.mark("grad_enter", self._prefix + path)

        def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
            if self.in_backward:
                return None
            self._recorder.mark("leave", self._prefix + path)
            if torch.is_grad_enabled():
                for tensor in grad_tensors(output):
                    tensor.register_hook(arrived)  # type: ignore[no-untyped-call]
            if casts and self._conditions.output is not None:
                return _to(output, self._conditions.output)
            return None

        return hook


def grad_tensors(tree: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a nested structure that require gradients, as FSDP2's hooks find them.

    torch 2.13 also looks into dataclasses (``_common_utils.py:collect_grad_tensors``); torch 2.11 flattens
    the structure as a pytree (``_fsdp_state.py:_register_pre_backward_hook``).
    """
    collect = getattr(_common_utils, "collect_grad_tensors", None)
    if collect is not None:
        return tuple(collect(tree))
    return tuple(leaf for leaf in tree_leaves(tree) if _requires_grad(leaf))


def with_grad_tensors(tree: Any, substitutes: Iterator[torch.Tensor]) -> Any:
    """Return a nested structure whose tensors that require gradients are replaced, in order.

    Args:
        tree: What :func:`grad_tensors` was called with.
        substitutes: One tensor for each that it returned.
    """
    replace = getattr(_common_utils, "replace_grad_tensors", None)
    if replace is not None:
        return replace(tree, substitutes)
    return tree_map(lambda leaf: next(substitutes) if _requires_grad(leaf) else leaf, tree)


def _requires_grad(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _to(values: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return _apply_to_tensors(cast, values)


def listed_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with parameters that are children of a ModuleList, by path."""
    blocks: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if isinstance(module, nn.ModuleList) and any(True for _ in child.parameters()):
                blocks[path] = child
            else:
                visit(child, f"{path}.")

    visit(model, "")
    return blocks


def cast_points(model: nn.Module) -> Collection[str]:
    """Return the paths where FSDP units usually begin: the root and listed blocks."""
    return {"", *listed_blocks(model)}


def boundary_paths(model: nn.Module, *, fine: bool = True) -> list[str]:
    """Return the paths to mark, in ``named_modules`` order.

    Everything with parameters outside listed blocks; inside them, what has children of its own and
    leaves that are worth a unit (fused experts, very large projections).
    """
    blocks = listed_blocks(model)
    weight = {path: sum(p.numel() for p in block.parameters()) for path, block in blocks.items()}
    chosen = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
            continue
        if not any(True for _ in module.parameters()):
            continue
        home = next((p for p in blocks if path.startswith(f"{p}.")), None)
        if home is None or (fine and _worth(module, weight[home])):
            chosen.append(path)
    return chosen


def _worth(module: nn.Module, block: int) -> bool:
    own = sum(p.numel() for p in module.parameters())
    if any(True for _ in module.children()):
        return True
    return own >= (_LARGE_LINEAR if isinstance(module, nn.Linear) else block * _LEAF_SHARE)
