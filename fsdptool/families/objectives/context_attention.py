"""Causal attention of a rank's own queries over a sequence that lies on several ranks.

Keys and values are gathered, queries stay. Each of a rank's two chunks attends to the sequence up to
its own end: one call of torch's attention with a mask aligned to the lower right, which flash
attention computes without holding it (``torch.nn.attention.bias``, torch 2.13). Gradients of keys
and values are summed over the ranks and each gets its own back. Works on every device and backend.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from fsdptool.errors import ConfigError
from fsdptool.families.objectives.context import Context, current
from fsdptool.families.objectives.context_ring import attend_round

NAME = "context_parallel"
"""What transformers calls this attention (``attn_implementation``)."""

_ELSEWHERE = {
    "softcap": "caps its attention scores",
    "s_aux": "has attention sinks",
    "position_bias": "adds position biases to its attention scores",
}
"""Arguments of other attention implementations that change the result."""

_HALF = (torch.float16, torch.bfloat16)
_complete: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_attended: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class _Prefixes(torch.autograd.Function):
    """Gathers [B, H, own tokens, D] and returns the sequence up to the end of either own chunk.

    Heads are repeated after they were gathered, so that copies never travel.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, context: Context, repeats: int) -> tuple[Tensor, Tensor]:
        ctx.context, ctx.shape, ctx.repeats = context, mine.shape, repeats
        size, (early, late) = context.size, context.chunks
        halves = _halves(context.gather(mine.contiguous()))
        parts = [halves[rank, :, :, half] for rank, half in (_place(c, size) for c in range(late + 1))]
        ordered = torch.cat(parts, dim=2)
        del halves, parts
        if repeats > 1:
            ordered = ordered.repeat_interleave(repeats, dim=1)
        return ordered[:, :, : (early + 1) * (mine.shape[2] // 2)], ordered

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, early: Tensor, late: Tensor) -> tuple[Tensor, None, None]:
        context: Context = ctx.context
        whole = late.new_zeros((context.size, *ctx.shape))
        halves = _halves(whole)
        for gradient in (late, early):
            if ctx.repeats > 1:
                gradient = gradient.view(whole.shape[1], -1, ctx.repeats, *gradient.shape[2:]).sum(2)
            for chunk, part in enumerate(torch.split(gradient, ctx.shape[2] // 2, dim=2)):
                rank, half = _place(chunk, context.size)
                halves[rank, :, :, half].add_(part)
        return context.reduce(whole), None, None


class _Everywhere(torch.autograd.Function):
    """Gathers rows [T, ...] of every rank: [size x T, ...]."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, context: Context) -> Tensor:
        ctx.context, ctx.shape = context, mine.shape
        return context.gather(mine.contiguous()).flatten(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context: Context = ctx.context
        return context.reduce(gradient.contiguous().view(context.size, *ctx.shape)), None


def _halves(whole: Tensor) -> Tensor:
    """Return [size, B, H, own tokens, D] with the two chunks of each rank apart: [.., 2, tokens, D]."""
    return whole.view(*whole.shape[:3], 2, -1, whole.shape[4])


def _place(chunk: int, size: int) -> tuple[int, int]:
    """Return the rank that holds a chunk, and which of its two it is."""
    return (chunk, 0) if chunk < size else (2 * size - 1 - chunk, 1)


def everywhere(rows: Tensor) -> Tensor:
    """Return the rows of all ranks that share the sequence (in no promised order); differentiable."""
    context = current()
    if context is None:
        return rows
    gathered: Tensor = _Everywhere.apply(rows, context)  # type: ignore[no-untyped-call]
    return gathered


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' interface asks (5.23); plain SDPA while sequences are whole.

    Args:
        module: The attention layer.
        query: [B, heads, own tokens, D].
        key, value: [B, key heads, own tokens, D].
        attention_mask: What :func:`mask` made: None, or boolean [B or 1, 1, own tokens, sequence].
        dropout, scaling: As in torch's attention.
        is_causal: False where the layer looks both ways.
        others: Arguments of other implementations.

    Returns:
        [B, own tokens, heads, D], and no attention weights.

    Raises:
        ConfigError: The layer attends in a way that cannot be split.
    """
    context = current()
    if context is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **others
        )
        return result
    _check(module, query, key, is_causal, others)
    _attended.add(module)
    if context.ring:
        reason = "has a mask" if attention_mask is not None else "drops attention" if dropout else None
        if reason is not None:
            raise ConfigError(
                f"cp_comm_strategy alltoall does not support {type(module).__name__}: it {reason}",
                help="write cp_comm_strategy: allgather",
            )
        return attend_round(query, key, value, context, scaling).transpose(1, 2), None
    shared = query.shape[1] // key.shape[1]
    grouped = shared > 1 and _keeps_groups(query, value, attention_mask)
    repeats = 1 if grouped else shared
    keys: tuple[Tensor, Tensor] = _Prefixes.apply(key, context, repeats)  # type: ignore[no-untyped-call]
    values: tuple[Tensor, Tensor] = _Prefixes.apply(value, context, repeats)  # type: ignore[no-untyped-call]
    length = query.shape[2] // 2
    parts = []
    for chunk in range(2):
        rows = slice(chunk * length, (chunk + 1) * length)
        seen = keys[chunk].shape[2]
        mask = attention_mask[:, :, rows, :seen] if attention_mask is not None else None
        part = nn.functional.scaled_dot_product_attention(
            query[:, :, rows],
            keys[chunk],
            values[chunk],
            attn_mask=mask if mask is not None else _lower_right(length, seen),
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=grouped,
        )
        parts.append(part.transpose(1, 2))
    return torch.cat(parts, dim=1), None


@cache
def _lower_right(queries: int, keys: int) -> Tensor:
    """Return the mask under which the last of ``queries`` sees all ``keys``; it holds no values."""
    # Its constructor fails under a dispatch mode (selective recomputation; torch 2.13).
    with _disable_current_modes():
        return causal_lower_right(queries, keys)


def _keeps_groups(query: Tensor, value: Tensor, attention_mask: Tensor | None) -> bool:
    """Say whether the kernel takes fewer key heads than query heads: flash attention on CUDA does."""
    sizes = (query.shape[-1], value.shape[-1])
    return attention_mask is None and query.dtype in _HALF and sizes[0] == sizes[1] <= 256


def _check(module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None, others: Any) -> None:
    name = type(module).__name__
    reason = next((why for key, why in _ELSEWHERE.items() if others.get(key) is not None), None)
    if query.shape[2] != key.shape[2]:
        reason = "attends to another sequence"
    elif not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        reason = "attends in both directions"
    if reason is not None:
        raise ConfigError(
            f"context parallelism cannot split {name}: it {reason}", help="set cp_size to 1 for this model"
        )


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    **others: Any,
) -> Tensor | None:
    """Make one kind of layer's mask as transformers' interface asks (5.23).

    Args:
        batch_size, q_length, kv_length: As transformers sees this rank's tokens.
        mask_function: Says of (batch, head, query, key) indices who sees whom.
        attention_mask: Refused upstream; padding on the right needs none.
        local_size: Window of the layer, or None.
        allow_is_causal_skip: Whether plain causal layers may go without a mask.
        device: Where to make it.
        others: Passed on to transformers' own while sequences are whole.

    Returns:
        None for plain causal attention, else boolean [B, 1, own tokens, sequence].

    Raises:
        ConfigError: The mask's function cannot be asked about the whole sequence.
    """
    context = current()
    if context is None:
        from transformers.masking_utils import sdpa_mask

        whole_mask: Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            device=device,
            **others,
        )
        return whole_mask
    if attention_mask is not None or others.get("use_vmap"):
        raise ConfigError(
            "context parallelism cannot split this model's mask, which depends on more than positions",
            help="set cp_size to 1 for this model",
        )
    whole = q_length * context.size
    if allow_is_causal_skip and (local_size is None or whole < local_size):
        return None
    result = mask_function(
        torch.arange(batch_size, device=device)[:, None, None, None],
        torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device),
        context.places(q_length, device)[None, None, :, None],
        torch.arange(whole, device=device)[None, None, None, :],
    )
    return result.expand(batch_size, -1, q_length, whole)


def register() -> str:
    """Make this attention known to transformers; returns its name there."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    return NAME


@contextmanager
def complete(model: nn.Module) -> Iterator[None]:
    """Let a model's first split forward through only if every block attended to the whole sequence.

    Whatever else mixes tokens (recurrent layers, convolutions, attention of the model's own) would
    see this rank's tokens only, without an error.

    Raises:
        ConfigError: A block of the model did not.
    """
    yield
    if current() is None or model in _complete:
        return
    for block in _blocks(model):
        if not any(module in _attended for module in block.modules()):
            raise ConfigError(
                f"context parallelism cannot split {type(block).__name__}: it does not mix tokens by"
                " attention over the whole sequence",
                help="set cp_size to 1 for this model",
            )
    _complete.add(model)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost listed modules that have parameters."""
    for child in module.children():
        listed = isinstance(module, nn.ModuleList) and any(True for _ in child.parameters())
        if listed:
            yield child
        else:
            yield from _blocks(child)
