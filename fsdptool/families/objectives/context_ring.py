"""Causal attention that passes keys and values round the ranks of a sequence (``alltoall``).

Each rank attends with its own queries to one rank's keys and values after the other and merges the
parts by their log-sum-exp (Liu et al. 2023, Ring Attention; Milakov and Gimelshein 2018 for the
merge), so no rank ever holds more than two ranks' keys and values. With chunks r and 2n-1-r on rank
r no part needs a mask: its own keys are causal as they lie, of an earlier rank's keys only the early
chunk is seen, and a later rank's keys are seen by the late queries only. Backward goes round again,
and gradients of keys and values travel with them until they are home.

The kernels are those behind torch's own attention, called by name because only they give and take the
log-sum-exp (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fsdptool.families.objectives.common import accumulation_dtype
from fsdptool.families.objectives.context import Context

_HALF = (torch.float16, torch.bfloat16)
_ALIGNED = 32
"""Rows to which the memory-efficient kernel fills up its log-sum-exp (torch 2.13)."""


class Kernel(Protocol):
    """An attention kernel that gives its log-sum-exp and takes it back."""

    groups: bool
    """Whether it takes fewer key heads than query heads."""
    width: int
    """What the head size has to be a multiple of."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Return [B, H, queries, D] and log-sum-exp [B, H, queries]."""
        ...

    def backward(
        self, gradient: Tensor, operands: tuple[Tensor, ...], causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients of query, key, value; ``operands`` are those, the output, log-sum-exp."""
        ...


class CpuFlash:
    """The CPU's flash kernel."""

    groups, width = False, 1

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attend."""
        result = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, scale=scale
        )
        return result[0], result[1]

    def backward(
        self, gradient: Tensor, operands: tuple[Tensor, ...], causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients."""
        result: tuple[Tensor, Tensor, Tensor] = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, *operands, 0.0, causal, scale=scale
            )
        )
        return result


class CudaFlash:
    """Flash attention: half precision, equal head sizes up to 256."""

    groups, width = True, 8

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attend."""
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return result[0], result[1]

    def backward(
        self, gradient: Tensor, operands: tuple[Tensor, ...], causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients."""
        # Without dropout the random state is not read; it has to be there.
        state = torch.empty(2, dtype=torch.uint64, device=gradient.device)
        result: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient, *operands, None, None, operands[0].shape[2], operands[1].shape[2], 0.0, causal,
            state, state[:0], scale=scale,
        )  # fmt: skip
        return result


class CudaEfficient:
    """The memory-efficient kernel: fp32, and head sizes flash attention does not take."""

    groups, width = False, 1

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        """Attend."""
        result = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal, scale=scale
        )
        return result[0], result[1][:, :, : query.shape[2]]

    def backward(
        self, gradient: Tensor, operands: tuple[Tensor, ...], causal: bool, scale: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients."""
        query, key, value, out, sums = operands
        sums = nn.functional.pad(sums, (0, -sums.shape[2] % _ALIGNED), value=float("inf"))
        state = torch.empty((), dtype=torch.int64, device=gradient.device)
        result = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, None, out, sums, state, state, 0.0,
            [True, True, True, False], causal, scale=scale,
        )  # fmt: skip
        return result[0], result[1], result[2]


def kernel_for(query: Tensor, value: Tensor) -> Kernel:
    """Return the kernel torch's attention would take for these on their device (torch 2.13)."""
    if query.device.type == "cpu":
        return CpuFlash()
    return cuda_kernel(query, value)


def cuda_kernel(query: Tensor, value: Tensor) -> Kernel:
    """Return the kernel of a GPU."""
    same = query.shape[-1] == value.shape[-1] <= 256
    return CudaFlash() if same and query.dtype in _HALF else CudaEfficient()


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, context: Context, scale: float | None
    ) -> Tensor:
        kernel = kernel_for(query, value)
        heads = 1 if kernel.groups else query.shape[1] // key.shape[1]
        wide = accumulation_dtype(query.dtype)
        out = torch.empty(0, dtype=wide, device=query.device)
        sums = out
        half = query.shape[2] // 2
        for source, (keys, values) in _round(context, key, value):
            rows, seen, causal = _part(context.rank, source, half)
            seen_keys, seen_values = (_repeated(t[:, :, :seen], heads) for t in (keys, values))
            result, part = kernel.forward(query[:, :, rows], seen_keys, seen_values, causal, scale)
            del seen_keys, seen_values
            if causal:
                out, sums = result.to(wide), part.to(wide)
                continue
            _merge(out[:, :, rows], sums[:, :, rows], result, part)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.context, ctx.scale = context, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, sums = ctx.saved_tensors
        context: Context = ctx.context
        kernel = kernel_for(query, value)
        heads = 1 if kernel.groups else query.shape[1] // key.shape[1]
        wide = accumulation_dtype(query.dtype)
        half = query.shape[2] // 2
        of_query = torch.zeros_like(query, dtype=wide)
        travelling = _flat(key, value).new_zeros(key.numel() + value.numel(), dtype=wide)
        for source, (keys, values) in _round(context, key, value):
            rows, seen, causal = _part(context.rank, source, half)
            pair = (_repeated(tensor[:, :, :seen], heads) for tensor in (keys, values))
            kept = out[:, :, rows], sums[:, :, rows].contiguous()
            result = kernel.backward(
                gradient[:, :, rows], (query[:, :, rows], *pair, *kept), causal, ctx.scale
            )
            of_query[:, :, rows] += result[0]
            for whole, part in zip(_apart(travelling, key, value), result[1:], strict=True):
                whole[:, :, :seen] += _summed(part, heads)
            del result, pair, whole, part
            travelling = context.rotate(travelling)
        of_keys, of_values = _apart(travelling, key, value)
        return of_query.to(query.dtype), of_keys.to(key.dtype), of_values.to(value.dtype), None, None


def _round(context: Context, key: Tensor, value: Tensor) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
    """Yield each rank's keys and values and whose they are, this one's first, then those before it."""
    travelling = _flat(key, value)
    for step in range(context.size):
        yield (context.rank - step) % context.size, _apart(travelling, key, value)
        if step + 1 < context.size:
            travelling = context.rotate(travelling)


def _flat(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat((key.reshape(-1), value.reshape(-1)))


def _apart(flat: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return flat[: key.numel()].view(key.shape), flat[key.numel() :].view(value.shape)


def _part(rank: int, source: int, half: int) -> tuple[slice, int, bool]:
    """Return which of a rank's queries see how many of another's keys, and whether causally."""
    if source == rank:
        return slice(0, 2 * half), 2 * half, True
    if source < rank:
        return slice(0, 2 * half), half, False
    return slice(half, 2 * half), 2 * half, False


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    """Repeat key heads for a kernel that wants as many as query heads: they travelled once."""
    return tensor.repeat_interleave(heads, dim=1) if heads > 1 else tensor


def _summed(gradient: Tensor, heads: int) -> Tensor:
    if heads == 1:
        return gradient
    return gradient.reshape(gradient.shape[0], -1, heads, *gradient.shape[2:]).sum(2)


def _merge(out: Tensor, sums: Tensor, addition: Tensor, part: Tensor) -> None:
    """Add a part to what was attended to before, in place."""
    total = torch.logaddexp(sums, part.to(sums.dtype))
    out.mul_((sums - total).exp_().unsqueeze(-1))
    out.add_(addition * (part.to(sums.dtype) - total).exp_().unsqueeze(-1))
    sums.copy_(total)


def attend_round(query: Tensor, key: Tensor, value: Tensor, context: Context, scale: float | None) -> Tensor:
    """Attend to the whole sequence, causally.

    Args:
        query: [B, heads, own tokens, D].
        key, value: [B, key heads, own tokens, D].
        context: The ranks.
        scale: Of the scores; None is 1 / sqrt(D).

    Returns:
        [B, heads, own tokens, D].
    """
    size = query.shape[-1]
    missing = -size % kernel_for(query, value).width
    if missing:
        scale = scale if scale is not None else size**-0.5
        query, key, value = (nn.functional.pad(tensor, (0, missing)) for tensor in (query, key, value))
    output: Tensor = _Ring.apply(query, key, value, context, scale)  # type: ignore[no-untyped-call]
    return output[..., :size] if missing else output
