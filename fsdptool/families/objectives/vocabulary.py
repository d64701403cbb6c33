"""A vocabulary that the ranks of a group divide: cross-entropy over parts of the logits, which stay divided.

Each rank's head computes the logits of its part of the vocabulary (Megatron-LM, arXiv:1909.08053, section 3).
The greatest logit, the sum of exponentials and the logit of the target are reduced over the group: three
numbers a token. The gradient needs no communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fsdptool.families.objectives.common import IGNORED, accumulation_dtype, unwrapped


class VocabularyGroup(Protocol):
    """The ranks that divide the vocabulary."""

    def sum(self, values: Tensor, op: Any = ...) -> Tensor:
        """Reduce ``values`` over the group in place and return them."""

    def gather(self, part: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks, one behind the other along ``dim``."""


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The part of a vocabulary whose logits this rank computes.

    Attributes:
        group: The ranks that divide it.
        first: The part's first token.
    """

    group: VocabularyGroup
    first: int


PART = "vocabulary_part"
"""Attribute of a model whose head is divided, and key of its predictions: a :class:`VocabularyPart`."""


def divided_vocabulary(model: nn.Module) -> Mapping[str, Any]:
    """Return what a model's predictions must say of their logits: nothing where they are whole."""
    part = getattr(unwrapped(model), PART, None)
    return {} if part is None else {PART: part}


def whole_logits(model: nn.Module, logits: Tensor) -> Tensor:
    """Return the logits of the whole vocabulary: those of a model that computes only a part are gathered."""
    part = getattr(unwrapped(model), PART, None)
    return logits if part is None else part.group.gather(logits, logits.dim() - 1)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, chunk: int, part: VocabularyPart) -> Tensor:
        wide = accumulation_dtype(logits.dtype)
        greatest = torch.empty(targets.shape, dtype=wide, device=logits.device)
        sums = torch.empty((2, *targets.shape), dtype=wide, device=logits.device)
        for start in range(0, targets.shape[0], chunk):
            own = logits[start : start + chunk].to(wide)
            index, inside = _own(targets[start : start + chunk], part.first, logits.shape[1])
            top = own.amax(-1)
            greatest[start : start + chunk] = top
            sums[1, start : start + chunk] = own.gather(1, index).squeeze(1) * inside
            sums[0, start : start + chunk] = (own - top.unsqueeze(1)).exp_().sum(-1)
        highest = part.group.sum(greatest.clone(), torch.distributed.ReduceOp.MAX)
        sums[0] *= (greatest - highest).exp_()
        part.group.sum(sums)
        normalisers = highest.add_(sums[0].log())
        ctx.save_for_backward(logits, targets, normalisers)
        ctx.chunk, ctx.first = chunk, part.first
        return ((normalisers - sums[1]) * (targets != IGNORED)).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, normalisers = ctx.saved_tensors
        result = torch.empty_like(logits)
        for start in range(0, targets.shape[0], ctx.chunk):
            stop = start + ctx.chunk
            aims = targets[start:stop]
            index, inside = _own(aims, ctx.first, logits.shape[1])
            own = (logits[start:stop].to(normalisers.dtype) - normalisers[start:stop].unsqueeze(1)).exp_()
            own.scatter_add_(1, index, -inside.to(own.dtype).unsqueeze(1))
            result[start:stop] = own.mul_(((aims != IGNORED) * gradient).unsqueeze(1))
        return result, None, None, None


def _own(targets: Tensor, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Return where targets stand in a part, [tokens, 1], and whether they do, [tokens]."""
    local = targets - first
    inside = (local >= 0) & (local < length)
    return torch.where(inside, local, 0).unsqueeze(1), inside


def divided_cross_entropy(logits: Tensor, targets: Tensor, chunk: int, part: VocabularyPart) -> Tensor:
    """Return the summed cross-entropy, equal on all ranks of the group.

    Args:
        logits: [..., classes of this rank], any floating dtype, of one size on all ranks.
        targets: [...], int64, in the whole vocabulary; ``-100`` has no target.
        chunk: Tokens per chunk; 0 takes all at once.
        part: Which classes these are.

    Returns:
        Scalar in fp32, or fp64 for fp64 logits.
    """
    flat, aims = logits.flatten(0, -2), targets.flatten()
    size = chunk if chunk > 0 else max(flat.shape[0], 1)
    result: Tensor = _CrossEntropy.apply(flat, aims, size, part)  # type: ignore[no-untyped-call]
    return result
