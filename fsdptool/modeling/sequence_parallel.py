"""Sequence parallelism: the ranks of a tensor-parallel group divide the hidden states between its regions.

A rank holds a part of every sequence from the input of the first block to the output of the final norm
(Megatron-LM, arXiv:2205.05198, section 4.2.2). A region gathers the sequence at its entry, where backward
reduces and scatters, and reduces and scatters at its exit, where backward gathers. The model's own code runs
in between: norms, dropout and residuals see fewer positions, attention sees them all. Masks and rotary
embeddings, which are computed in front of the first block, stay whole.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fsdptool.errors import ConfigError
from fsdptool.modeling.tensor_group import (
    TensorGroup,
    collect,
    divide,
    enter,
    enter_divided,
    leave,
    leave_divided,
)

if TYPE_CHECKING:
    from fsdptool.records.tensor_plan import SequenceSpan

_Hook = Callable[..., Any]

_SUPPORT = "leave sharding.sequence_parallel out: this model does not support it"


class SequenceParts:
    """How the hidden states of the current forward are divided.

    Args:
        group: This rank's group.
    """

    def __init__(self, group: TensorGroup) -> None:
        self._group = group
        # Samples and positions of the whole hidden states; None: this forward does not divide them.
        self._whole: tuple[int, int] | None = None
        self._dim: int = 1

    def begin(self, block: nn.Module) -> _Hook:
        """Return the hook of the first block, which takes this rank's part of its input."""
        first = _arguments(block)[0]

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            value = args[0] if args else kwargs[first]
            self._whole = self._measure(value)
            if self._whole is None:
                return args, kwargs
            part = divide(value, self._group, 1)
            return ((part, *args[1:]), kwargs) if args else (args, {**kwargs, first: part})

        return hook

    def _measure(self, value: Any) -> tuple[int, int] | None:
        if not isinstance(value, Tensor) or value.dim() != 3:
            raise ConfigError(
                "the hidden states of the first block are not [samples, positions, width]", help=_SUPPORT
            )
        samples, positions = value.shape[:2]
        if positions % self._group.size == 0:
            return samples, positions
        if torch.is_grad_enabled():
            raise ConfigError(
                f"sharding.sequence_parallel: {self._group.size} ranks cannot divide {positions} positions",
                help="give every sequence a length that is a multiple of the tensor-parallel size",
            )
        # Samples grow token by token. Without gradients the undivided forward is the same.
        return None

    def end(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        """Gather what the final norm returns."""
        return output if self._whole is None else collect(output, self._group, 1)

    def complete_routers(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Gather the routers' logits among a model's outputs: load is balanced over whole sequences."""
        logits = getattr(output, "router_logits", None)
        if self._whole is not None and logits:
            output.router_logits = tuple(collect(layer, self._group, layer.dim() - 2) for layer in logits)

    def entry(self, path: str, region: nn.Module) -> _Hook:
        """Return the hook that gathers the hidden states at the entry of a region.

        Raises:
            ConfigError: When it runs: an argument is not what is expected of hidden states.
        """
        names = _arguments(region)

        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # The hidden states come first; what else a region takes is told by them.
            if args:
                args = (self._hidden(path, args[0]), *args[1:])
            else:
                kwargs = {**kwargs, names[0]: self._hidden(path, kwargs[names[0]])}
            named = zip(chain(names, repeat("")), args, strict=False)
            return (
                tuple(v if at == 0 else self._other(path, n, v) for at, (n, v) in enumerate(named)),
                {n: v if n == names[0] else self._other(path, n, v) for n, v in kwargs.items()},
            )

        return hook

    def _hidden(self, path: str, value: Tensor) -> Tensor:
        if self._whole is None:
            return enter(value, self._group)
        samples, positions = self._whole
        positions //= self._group.size
        if value.dim() == 3 and value.shape[:2] == (samples, positions):
            self._dim = 1
        elif value.dim() == 2 and value.shape[0] == samples * positions:
            # Tokens of all samples: the group's ranks are one behind the other, in whatever order of samples.
            self._dim = 0
        else:
            raise ConfigError(
                f"sharding.sequence_parallel: {path} takes {list(value.shape)} for {samples} samples of"
                f" {positions} positions",
                help=_SUPPORT,
            )
        return enter_divided(value, self._group, self._dim)

    def _other(self, path: str, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if self._whole is None:
            return enter(value, self._group) if value.requires_grad else value
        samples, positions = self._whole
        if self._dim == 0 and value.shape[0] == samples * positions // self._group.size:
            if value.is_floating_point():
                return enter_divided(value, self._group, 0)
            return self._group.gather(value, 0)
        if value.requires_grad:
            raise ConfigError(
                f"sharding.sequence_parallel: argument {name} of {path} is part of what is trained",
                help=_SUPPORT,
            )
        return value

    def leave(self, value: Tensor) -> Tensor:
        """Sum what a row layer computed, and return this rank's part of the sequence."""
        if self._whole is None:
            return leave(value, self._group)
        samples, positions = self._whole
        whole = (samples, positions) if self._dim == 1 else (samples * positions,)
        if tuple(value.shape[:-1]) != whole:
            raise ConfigError(
                f"sharding.sequence_parallel: a divided layer returns {list(value.shape)} for {samples}"
                f" samples of {positions} positions",
                help=_SUPPORT,
            )
        return leave_divided(value, self._group, self._dim)


def divide_sequence(model: nn.Module, span: SequenceSpan, group: TensorGroup) -> SequenceParts:
    """Let a model divide its hidden states along the sequence.

    Args:
        model: Its regions gather by :meth:`SequenceParts.entry` and scatter by :meth:`SequenceParts.leave`.
        span: Where they are divided.
        group: This rank's group.
    """
    parts = SequenceParts(group)
    first = model.get_submodule(f"{span.blocks}.0")
    first.register_forward_pre_hook(parts.begin(first), with_kwargs=True, prepend=True)
    model.get_submodule(span.end).register_forward_hook(parts.end)
    model.get_submodule(span.blocks.rpartition(".")[0]).register_forward_hook(parts.complete_routers)
    return parts


def _arguments(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)
