"""Cross-entropy and KL divergence that never hold full fp32 logits.

Both keep the 16-bit logits and one fp32 number per token, and recompute the softmax chunk by
chunk in backward: per token and vocabulary entry 2 bytes kept and 2 for the gradient, where
transformers 5.23's ``ForCausalLMLoss`` peaks at 12 (bf16 logits, fp32 copy, fp32 log-softmax).
The mathematics is that of ``torch.nn.functional.cross_entropy(..., reduction="sum")``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdptool.families.objectives.common import IGNORED, accumulation_dtype


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, chunk: int) -> Tensor:
        wide = accumulation_dtype(logits.dtype)
        normalisers = torch.empty(targets.shape, dtype=wide, device=logits.device)
        total = torch.zeros((), dtype=wide, device=logits.device)
        for start in range(0, targets.shape[0], chunk):
            part = logits[start : start + chunk].to(wide)
            aims = targets[start : start + chunk]
            normaliser = torch.logsumexp(part, dim=-1)
            chosen = part.gather(1, aims.clamp(min=0).unsqueeze(1)).squeeze(1)
            total += ((normaliser - chosen) * (aims != IGNORED)).sum()
            normalisers[start : start + chunk] = normaliser
        ctx.save_for_backward(logits, targets, normalisers)
        ctx.chunk = chunk
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, normalisers = ctx.saved_tensors
        result = torch.empty_like(logits)
        for start in range(0, targets.shape[0], ctx.chunk):
            stop = start + ctx.chunk
            aims = targets[start:stop]
            part = (logits[start:stop].to(normalisers.dtype) - normalisers[start:stop].unsqueeze(1)).exp_()
            part.scatter_add_(1, aims.clamp(min=0).unsqueeze(1), part.new_full((aims.shape[0], 1), -1.0))
            result[start:stop] = part.mul_(((aims != IGNORED) * gradient).unsqueeze(1))
        return result, None, None


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, valid: Tensor, temperature: float, chunk: int
    ) -> Tensor:
        wide = accumulation_dtype(student.dtype)
        total = torch.zeros((), dtype=wide, device=student.device)
        for start in range(0, valid.shape[0], chunk):
            stop = start + chunk
            ours = torch.log_softmax(student[start:stop].to(wide) / temperature, dim=-1)
            theirs = torch.log_softmax(teacher[start:stop].to(wide) / temperature, dim=-1)
            total += ((theirs.exp() * (theirs - ours)).sum(-1) * valid[start:stop]).sum()
        ctx.save_for_backward(student, teacher, valid)
        ctx.temperature, ctx.chunk = temperature, chunk
        return total * temperature**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        student, teacher, valid = ctx.saved_tensors
        wide = accumulation_dtype(student.dtype)
        result = torch.empty_like(student)
        for start in range(0, valid.shape[0], ctx.chunk):
            stop = start + ctx.chunk
            part = torch.softmax(student[start:stop].to(wide) / ctx.temperature, dim=-1)
            part -= torch.softmax(teacher[start:stop].to(wide) / ctx.temperature, dim=-1)
            result[start:stop] = part.mul_((valid[start:stop] * gradient * ctx.temperature).unsqueeze(1))
        return result, None, None, None, None


def cross_entropy(logits: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return the summed cross-entropy.

    Args:
        logits: [..., classes], any floating dtype.
        targets: [...], int64; ``-100`` has no target.
        chunk: Tokens per chunk; 0 computes torch's own cross-entropy on the whole.

    Returns:
        Scalar in fp32, or fp64 for fp64 logits.
    """
    flat, aims = logits.flatten(0, -2), targets.flatten()
    if chunk <= 0:
        wide = flat.to(accumulation_dtype(flat.dtype))
        return torch.nn.functional.cross_entropy(wide, aims, ignore_index=IGNORED, reduction="sum")
    result: Tensor = _CrossEntropy.apply(flat, aims, chunk)  # type: ignore[no-untyped-call]
    return result


def divergence(student: Tensor, teacher: Tensor, valid: Tensor, temperature: float, chunk: int) -> Tensor:
    """Return the summed KL(teacher || student) of softened distributions, times temperature squared.

    The factor keeps gradients of the same size at every temperature (Hinton et al. 2015, section 2).

    Args:
        student, teacher: Logits [..., classes] of equal shape.
        valid: [...], true where a token counts.
        chunk: Tokens per chunk; 0 takes all at once.

    Returns:
        Scalar in fp32, or fp64 for fp64 logits.
    """
    flat = student.flatten(0, -2)
    size = chunk if chunk > 0 else max(flat.shape[0], 1)
    result: Tensor = _Divergence.apply(  # type: ignore[no-untyped-call]
        flat, teacher.detach().flatten(0, -2), valid.flatten(), temperature, size
    )
    return result
