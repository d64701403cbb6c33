"""Causal attention of a rank's own queries over a sequence that lies on several ranks, in two ways.

``allgather``: keys and values are gathered, queries stay. Each of a rank's two chunks attends to the sequence
up to its own end: one call of torch's attention with a mask aligned to the lower right, which flash
attention computes without holding it (``torch.nn.attention.bias``, torch 2.13). Gradients of keys
and values are summed over the ranks and each gets its own back. Works on every device and backend.

``alltoall``: keys and values are passed round the ranks. Each rank attends with its own queries to one rank's
keys and values after the other and merges the parts by their log-sum-exp (Liu et al. 2023, Ring Attention;
Milakov and Gimelshein 2018 for the merge), so no rank ever holds more than two ranks' keys and values. With
chunks r and 2n-1-r on rank r no part needs a mask: a rank's own keys are causal as they are, of an earlier
rank's keys only the early chunk is seen, and a later rank's keys are seen by the late queries only. Backward
goes round again, and gradients of keys and values travel with them until they are home. The kernels are those
behind torch's own attention, called by name because only they give and take the log-sum-exp (torch 2.13).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from fsdptool.errors import ConfigError
from fsdptool.families.objectives.common import accumulation_dtype
from fsdptool.families.objectives.context import Context, current

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
