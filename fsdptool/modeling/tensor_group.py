"""The ranks of a tensor-parallel group, and what they exchange at the borders of divided regions.

Each function is an operator of autograd with the collective of its gradient. A group without processes
computes alone with tensors of the same sizes, and says how many bytes it would have exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fsdptool.families.objectives.context import gather, reduce
from fsdptool.records.tensor_plan import Placement


class Listener(Protocol):
    """Is told the whole bytes of a collective: a sum, or a gather or a reduce-scatter."""

    def __call__(self, size: int, *, summed: bool) -> None:
        """Note a collective."""


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """The ranks that share one copy of every layer, or of all experts.

    Attributes:
        size: How many there are.
        rank: Which of them this is.
        process_group: Their process group; None computes alone, with the same tensors (the memory tracer).
        experts: The expert-parallel group beside it, or None.
        worst_routing: Whether this rank of an expert-parallel group without processes receives the tokens of
            all ranks: every token of the group chooses as many of its experts as it can, the most that any
            routing sends to one rank.
    """

    size: int
    rank: int = 0
    process_group: dist.ProcessGroup | None = None
    experts: TensorGroup | None = None
    worst_routing: bool = False

    def of(self, placement: Placement) -> TensorGroup:
        """Return the group over which a parameter is divided."""
        if not placement.experts:
            return self
        assert self.experts is not None
        return self.experts

    def sum(self, values: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce ``values`` over the group in place and return them."""
        if self.process_group is not None:
            dist.all_reduce(values, op=op, group=self.process_group)
        else:
            _notify(values, summed=True)
        return values

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks, one behind the other along ``dim``."""
        parts = gather(part.contiguous(), self.size, self.process_group)
        if self.process_group is None:
            _notify(parts, summed=False)
        if dim:
            return parts.movedim(0, dim).flatten(dim, dim + 1)
        return _no_view(parts, (-1, *part.shape[1:]))

    def scatter(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part along ``dim`` of the sum of all ranks' ``whole``."""
        if self.process_group is None:
            _notify(whole, summed=False)
        shape = (*whole.shape[:dim], self.size, -1, *whole.shape[dim + 1 :])
        parts = whole.reshape(shape).movedim(dim, 0).contiguous()
        return reduce(parts, self.process_group)

    def part(self, whole: Tensor, dim: int) -> Tensor:
        """Return a copy of this rank's part of ``whole`` along ``dim``."""
        length = whole.shape[dim] // self.size
        # A view would keep the whole tensor alive.
        return whole.narrow(dim, self.rank * length, length).clone(memory_format=torch.contiguous_format)


def _no_view(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Reshape ``values``, which nothing else uses, to a tensor that autograd does not take for a view.

    An operation in place on a view that an FSDP unit returns would drop the unit's hooks (torch 2.13,
    ``_fsdp_state.py``, ``_register_pre_backward_hook``).
    """
    result: Tensor = torch.ops.aten._unsafe_view(values, shape)
    return result


def _notify(values: Tensor, *, summed: bool) -> None:
    if not torch.compiler.is_compiling() and _listeners:
        _listeners[-1](values.numel() * values.itemsize, summed=summed)


_listeners: list[Listener] = []
"""Who is told what a group that computes alone exchanges. Backward may run on another thread."""


@contextmanager
def noticing(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of every collective of a group without processes."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


ALONE = TensorGroup(1)


class _Enter(torch.autograd.Function):
    """Identity in forward, sum over the group in backward: Megatron's *f*."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # A copy: another reader of the region's input may hold the same gradient tensor.
        return ctx.group.sum(gradient.clone(memory_format=torch.contiguous_format)), None


class _Leave(torch.autograd.Function):
    """Sum over the group in forward, identity in backward: Megatron's *g*.

    In place: the value is what a product has just written, and no backward needs it.
    """

    @staticmethod
    def forward(_ctx: Any, value: Tensor, group: TensorGroup) -> Tensor:
        return _no_view(group.sum(value.contiguous()), value.shape)

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Gather(torch.autograd.Function):
    """All-gather in forward, reduce-scatter in backward: Megatron's *g* of sequence parallelism."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.gather(value, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.scatter(gradient, ctx.dim), None, None


class _Scatter(torch.autograd.Function):
    """Reduce-scatter in forward, all-gather in backward: its conjugate."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.scatter(value, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.gather(gradient, ctx.dim), None, None


class _Divide(torch.autograd.Function):
    """Own part in forward, all-gather in backward: all ranks hold the same value before it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.part(value, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.gather(gradient, ctx.dim), None, None


class _Collect(torch.autograd.Function):
    """All-gather in forward, own part in backward: all ranks compute the same with the result."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: TensorGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return group.gather(value, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.part(gradient, ctx.dim), None, None


def enter(value: Tensor, group: TensorGroup) -> Tensor:
    """Return ``value`` as a divided region reads it: its gradient is summed over the group."""
    result: Tensor = _Enter.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def leave(value: Tensor, group: TensorGroup) -> Tensor:
    """Return the sum over the group of what each rank computed of ``value``, which is overwritten."""
    result: Tensor = _Leave.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def enter_divided(value: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return the whole of a value divided along ``dim``, as a divided region reads it."""
    result: Tensor = _Gather.apply(value, group, dim)  # type: ignore[no-untyped-call]
    return result


def leave_divided(value: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return this rank's part along ``dim`` of the sum over the group of ``value``."""
    result: Tensor = _Scatter.apply(value, group, dim)  # type: ignore[no-untyped-call]
    return result


def divide(value: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return this rank's part of a value that all ranks computed alike."""
    result: Tensor = _Divide.apply(value, group, dim)  # type: ignore[no-untyped-call]
    return result


def collect(value: Tensor, group: TensorGroup, dim: int) -> Tensor:
    """Return the whole of a divided value, with which all ranks compute alike."""
    result: Tensor = _Collect.apply(value, group, dim)  # type: ignore[no-untyped-call]
    return result
