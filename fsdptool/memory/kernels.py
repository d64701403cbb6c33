"""Whose attention kernel the trace assumes.

On fake CPU tensors torch's SDPA picks the CPU flash kernel. A GPU saves other tensors, so for the
``cuda`` profile SDPA is answered by the operator torch 2.13 would choose there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fsdptool.records.trace import Profile

_HALF = (torch.float16, torch.bfloat16)


class _CudaAttention(TorchFunctionMode):
    """Routes ``scaled_dot_product_attention`` as ``sdp_utils.cpp`` does on CUDA (torch 2.13).

    Flash for half precision without a mask, else the memory-efficient kernel, which takes masks
    and fp32; neither serves head sizes above 256 (flash).
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            return _attend(*args, **kwargs)
        return func(*args, **kwargs)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    if attn_mask is None and query.dtype in _HALF and max(query.shape[-1], value.shape[-1]) <= 256:
        return _flash(query, key, value, dropout_p, is_causal, scale)
    if enable_gqa and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, dim=1)
        value = value.repeat_interleave(repeats, dim=1)
    bias = attn_mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.where(bias, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
        shape = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        bias = bias.expand(shape)
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs, dropout_p, is_causal, scale=scale
    )[0]


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    size = query.shape[-1]
    extra = -size % 8
    if extra:
        # pad_last_dim in attention.cpp: flash wants multiples of 8.
        scale = scale if scale is not None else size**-0.5
        query, key, value = (torch.nn.functional.pad(t, (0, extra)) for t in (query, key, value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :size] if extra else out


@contextmanager
def _without_packing_search() -> Iterator[None]:
    # transformers 5.23 takes fake tensors for tracing, looks for packed sequences and builds an
    # S x S mask that a real run without packing never has.
    try:
        from transformers import masking_utils
    except ImportError:
        yield
        return
    original = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


@contextmanager
def kernels_of(profile: Profile, compute_dtype: torch.dtype | None) -> Iterator[None]:
    """Answer attention as the profile's device would, while entered."""
    with _without_packing_search(), _CudaAttention() if profile == "cuda" else nullcontext():
        yield
