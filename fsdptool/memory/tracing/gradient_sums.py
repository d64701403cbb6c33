"""Tells where a real backward writes into memory that it has, and a traced one allocates.

The engine adds the gradients of a tensor that was used several times into the sum that it has if nothing
else refers to it (torch 2.13, ``torch/csrc/autograd/input_buffer.cpp``, ``can_accumulate_inplace``).
Derivatives of lookups write into zeros that they made (``FunctionsManual.cpp`` and ``derivatives.yaml``,
``areAnyTensorSubclassLike``). Neither happens while a dispatch mode watches or a tensor is of a subclass, so
that on fake tensors the old memory and the new one are alive together.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_ADD = torch.ops.aten.add.Tensor
_INTO_ZEROS = frozenset(
    {
        torch.ops.aten.scatter_add.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.index_add.default,
        torch.ops.aten.index_put.default,
        torch.ops.aten.put.default,
    }
)
"""What derivatives of ``gather``, ``topk``, ``index_select``, ``x[index]`` and ``take`` call on new zeros."""
_ENGINE = torch.autograd.graph._engine_run_backward.__name__


class GradientSums:
    """Recognises the engine's additions and what derivatives write into zeros, for one dispatch mode.

    A derivative formula may add, too, without Python in between. What it adds to was made by the node of
    the graph that is being evaluated; the engine adds to what an earlier node made, or to another gradient of
    the same node if both are for the same input.
    """

    def __init__(self) -> None:
        self._maker: dict[int, int] = {}

    def made(self, storage: torch.UntypedStorage) -> None:
        """Note the node of the graph that is being evaluated as the maker of new memory."""
        node = torch._C._current_autograd_node()
        self._maker[storage._cdata] = -1 if node is None else node._sequence_nr()

    def reusable(self, func: Any, args: Any) -> torch.Tensor | None:
        """Return the memory that a real backward would write into, if nothing else refers to it.

        Call it from ``__torch_dispatch__`` itself.

        Args:
            func: The operator.
            args: Its arguments.
        """
        if (func is not _ADD and func not in _INTO_ZEROS) or torch.is_grad_enabled():
            return None
        caller = sys._getframe(2)
        if caller.f_code.co_name != _ENGINE:
            return None
        before, other = args[:2]
        node = torch._C._current_autograd_node()
        if node is None or not isinstance(before, torch.Tensor):
            return None
        maker = self._maker.get(before.untyped_storage()._cdata)
        if func in _INTO_ZEROS:
            return before if maker == node._sequence_nr() else None
        if not isinstance(other, torch.Tensor):
            return None
        if maker is None or (maker == node._sequence_nr() and not _serves_one_input_twice(node)):
            return None
        # A view keeps its base, without grad mode too, so that its memory has two references.
        return before if not before._is_view() and _dense(before) else None


def _serves_one_input_twice(node: Any) -> bool:
    inputs = [pair for pair in node.next_functions if pair[0] is not None]
    return len(set(inputs)) < len(inputs)


def _dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements lie side by side in some order, none of them twice."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
