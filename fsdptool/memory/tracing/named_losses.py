"""Stand-ins for losses that can be named: compiled, Liger's, cut cross-entropy and torchtitan's in chunks.

Each allocates, multiplies and reads what the original does, on the tensors of a trace. The numbers that they
return mean nothing, and fsdptool never trains with them. Every function has the arguments of
:data:`~fsdptool.families.objectives.fused_head.HeadLoss`: hidden states [batch, positions, width], weight
[vocabulary, width], bias [vocabulary] or None, targets [batch, positions], a chunk that is not read, and what
is done to the logits, which kernels do while they read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fsdptool.families.objectives.common import IGNORED, accumulation_dtype
from fsdptool.families.objectives.fused_head import HeadLoss
from fsdptool.records.anatomy import LogitTail
from fsdptool.records.fused_loss import NamedLoss

TITAN_CHUNKS = 8
"""Parts of each row whose loss torchtitan computes one by one (0.3.0 ``components/loss.py``)."""

_CUT_ROWS = 1024
"""Tokens that the stand-in for cut cross-entropy multiplies at a time; the kernel keeps no product at all."""


class _Compiled(torch.autograd.Function):
    """Cross-entropy of whole logits as Inductor compiles it (torch 2.13, on the CPU by allocator events).

    The logits stay in their dtype; the fp32 copy is part of the kernels. Forward keeps the maximum and the
    logarithm of the sum of each token, backward reads the logits once more and writes their gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        wide = accumulation_dtype(logits.dtype)
        top, sums = logits.amax(-1).to(wide), logits.amax(-1).to(wide)
        ctx.save_for_backward(logits, top, sums)
        return (top + sums).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Tensor:
        logits: Tensor = ctx.saved_tensors[0]
        return logits.mul(0.0)


class _Liger(torch.autograd.Function):
    """Liger's fused linear cross-entropy (0.8.5 ``ops/fused_linear_cross_entropy.py``).

    Forward computes the logits of one chunk of tokens in their own dtype, turns them into their gradient in
    place, and adds up both gradients in the dtypes of hidden states and weight; backward scales these.
    A chunk has the next power of two of ``tokens / (vocabulary / width)`` tokens.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        tokens, width = hidden.shape
        parts = -(-weight.shape[0] // width)
        rows = min(1 << (-(-tokens // parts) - 1).bit_length(), tokens)
        of_hidden = torch.zeros_like(hidden)
        trains = ctx.needs_input_grad[1]
        of_weight = torch.zeros_like(weight) if trains else None
        of_bias = torch.zeros_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        losses = hidden.new_zeros(tokens, dtype=torch.float32)
        storage = hidden.new_empty(rows, weight.shape[0])
        for first in range(0, tokens, rows):
            states = hidden[first : first + rows]
            logits = storage[: states.shape[0]]
            torch.mm(states, weight.t(), out=logits)
            # One kernel reads the logits twice and writes their gradient: in-place operators that read once.
            logits.mul_(1.0)
            torch.mm(logits, weight, out=of_hidden[first : first + rows])
            if of_weight is not None:
                of_weight.addmm_(logits.t(), states)
            if of_bias is not None:
                of_bias.add_(logits.sum(0))
        ctx.found = of_hidden, of_weight, of_bias
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        found = ctx.found
        del ctx.found
        return tuple(value if value is None else value.mul_(factor) for value in found)


class _Cut(torch.autograd.Function):
    """Cut cross-entropy (25.1.1 ``cce.py``, ``cce_lse_forward.py``, ``cce_backward.py``).

    Logits exist in registers alone. Forward keeps a normaliser of each token and a mean of each entry of the
    vocabulary; backward allocates both gradients in the dtype of the hidden states. It computes the logits
    again, and leaves out the blocks whose gradient rounds to zero, so that all of it takes as long as the
    three products of a compiled loss (Wijmans et al. 2025, Cut Your Losses in Large-Vocabulary Language
    Models, table 1). Three products are counted.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        tokens, vocabulary = hidden.shape[0], weight.shape[0]
        normalisers, chosen = (hidden.new_zeros(tokens, dtype=torch.float32) for _ in range(2))
        means = hidden.new_zeros(vocabulary, dtype=torch.float32)
        for first in range(0, tokens, _CUT_ROWS):
            rows = min(_CUT_ROWS, tokens - first)
            # As many operations as the logits of these tokens take, without a tensor of their size.
            torch.mm(_unheld(hidden, rows, vocabulary), weight)
        loss = chosen.add_(normalisers).sum()
        ctx.save_for_backward(hidden, weight, normalisers, means)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, weight, _normalisers, means = ctx.saved_tensors
        order = means.argsort().to(torch.int32)
        of_hidden = torch.zeros_like(hidden)
        of_weight = torch.zeros_like(weight, dtype=hidden.dtype) if ctx.needs_input_grad[1] else None
        logits = _unheld(hidden, hidden.shape[0], weight.shape[0])
        torch.mm(logits, weight, out=of_hidden)
        if of_weight is not None:
            torch.mm(logits.t(), hidden, out=of_weight)
        del order
        return of_hidden, of_weight


class _Titan(torch.autograd.Function):
    """torchtitan's loss in chunks of each row (0.3.0 ``components/loss.py``, ``ChunkedLossWrapper``).

    Head, loss and their backward run chunk by chunk before the blocks' backward. Without compilation, a
    chunk's logits exist in the head's dtype and in fp32, beside their logarithms and both gradients. The
    head's gradient adds up unsharded, in the reduction's dtype (fp32), that of the hidden states in fp32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, compiled: bool
    ) -> Tensor:
        wide = accumulation_dtype(hidden.dtype)
        of_hidden = torch.zeros_like(hidden, dtype=wide)
        trained = tuple(
            value if value is not None and needed else None
            for value, needed in zip((weight, bias), ctx.needs_input_grad[1:3], strict=True)
        )
        sums: list[Tensor | None] = [None, None]
        start = 0
        with torch.enable_grad():
            leaves = [value.detach().requires_grad_() if value is not None else None for value in trained]
            for part, aims in zip(hidden.chunk(TITAN_CHUNKS, 1), targets.chunk(TITAN_CHUNKS, 1), strict=True):
                states = part.detach().contiguous().requires_grad_()
                own = [
                    leaf if leaf is not None else value
                    for leaf, value in zip(leaves, (weight, bias), strict=True)
                ]
                logits = functional.linear(states, own[0], own[1])  # type: ignore[arg-type]
                loss = _loss_of_chunk(logits, aims, compiled=compiled)
                del logits
                wanted = [states, *(leaf for leaf in leaves if leaf is not None)]
                found = list(torch.autograd.grad(loss, wanted))
                del loss
                of_hidden[:, start : start + part.shape[1]] = found.pop(0)
                start += part.shape[1]
                for place, leaf in enumerate(leaves):
                    if leaf is not None:
                        gradient, total = found.pop(0), sums[place]
                        sums[place] = gradient.to(wide) if total is None else total.add_(gradient)
                        del gradient
        ctx.found = (of_hidden.to(hidden.dtype), *sums)
        ctx.dtypes = hidden.dtype, weight.dtype
        return of_hidden.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_weight, of_bias = ctx.found
        del ctx.found
        dtype = ctx.dtypes[1]
        sums = (value if value is None else value.to(dtype) for value in (of_weight, of_bias))
        return (of_hidden, *sums, None, None)


def _unheld(like: Tensor, rows: int, columns: int) -> Tensor:
    """Return a matrix of which one number is stored."""
    return like.new_zeros(1, 1).expand(rows, columns)


def _loss_of_chunk(logits: Tensor, aims: Tensor, *, compiled: bool) -> Tensor:
    if compiled:
        result: Tensor = _Compiled.apply(logits)  # type: ignore[no-untyped-call]
        return result
    wide = logits.flatten(0, 1).to(accumulation_dtype(logits.dtype))
    return functional.cross_entropy(wide, aims.flatten(), ignore_index=IGNORED, reduction="sum")


def _compiled(hidden: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    logits = functional.linear(hidden, weight, bias)
    result: Tensor = _Compiled.apply(logits)  # type: ignore[no-untyped-call]
    return result


def _liger(hidden: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> Tensor:
    result: Tensor = _Liger.apply(hidden.flatten(0, -2), weight, bias)  # type: ignore[no-untyped-call]
    return result


def _cut(hidden: Tensor, weight: Tensor, _bias: Tensor | None, *_: Any) -> Tensor:
    result: Tensor = _Cut.apply(hidden.flatten(0, -2), weight)  # type: ignore[no-untyped-call]
    return result


def titan_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    _chunk: int = 0,
    _tail: LogitTail | None = None,
    *,
    compiled: bool = True,
) -> Tensor:
    """Stand in for torchtitan's loss, whose chunks are compiled by default (``compile.components``)."""
    result: Tensor = _Titan.apply(hidden, weight, bias, targets, compiled)  # type: ignore[no-untyped-call]
    return result


NAMED_LOSSES: Mapping[NamedLoss, HeadLoss] = {
    "compiled": _compiled,
    "liger": _liger,
    "cce": _cut,
    "torchtitan": titan_loss,
}
"""What stands in for each loss that can be named."""
