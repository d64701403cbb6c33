"""Attention of packed documents without a mask: torch's variable-length kernel, told where documents begin.

SDPA needs a boolean mask of positions x positions to keep documents apart. No flash kernel takes one, and the
kernels that do compute all masked blocks. Here the loader's positions give the places where documents begin,
and each document attends to itself (``torch.nn.attention.varlen``, torch 2.13). What the kernel does not
support (fp32, large heads, dropout, attention sinks) gets the mask that transformers would have made.

transformers' own flash attention finds documents in ``position_ids`` for a batch of one sequence only, and
waits for the device in every layer to do so (5.23, ``modeling_flash_attention_utils.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from fsdptool.errors import ConfigError

BEGINS = "document_begins"
"""Batch key: where documents begin in the flattened micro-batch, and its length; int32 [documents + 1]."""

LONGEST = "longest_document"
"""Batch key: a tensor without elements, [tokens of the longest document, 0]: the host reads its shape."""

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_HEAD = 256
_CAPABILITY = (8, 0)
"""First compute capability that flash attention supports (Ampere)."""

_LEAST = 128
"""Lengths of longest documents are rounded to powers of two, at least this: blocks are compiled for each."""

_FURTHER = ("softcap", "s_aux", "position_bias")
"""Arguments of transformers' attention that the kernel does not have."""

_attended: set[type[nn.Module]] = set()
"""Classes, not modules: of blocks that share a compilation, Dynamo sees one."""

_complete: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclass(slots=True)
class Packed:
    """The documents of a micro-batch.

    Attributes:
        begins: As under :data:`BEGINS`.
        longest: Tokens of the longest document, or somewhat more.
        shape: Sequences and positions of the micro-batch.
        masks: Masks for what the kernel does not support, by window.
    """

    begins: Tensor
    longest: int
    shape: tuple[int, int]
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor:
        """Return who sees whom, boolean [sequences, 1, positions, positions]; equal layers share it.

        Args:
            window: How far a token sees back, itself included; None is to the beginning of its document.
        """
        if window not in self.masks:
            rows, length = self.shape
            places = torch.arange(length, device=self.begins.device)
            flat = torch.arange(rows * length, device=self.begins.device, dtype=self.begins.dtype)
            document = torch.searchsorted(self.begins, flat, right=True).view(rows, 1, length)
            distance = places[:, None] - places[None, :]
            seen = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            self.masks[window] = (document.transpose(1, 2) == document).logical_and_(seen).unsqueeze(1)
        return self.masks[window]


# Process-wide: recomputation in backward attends long after the forward that began it.
_current: Packed | None = None
_assumed = False
_allowed = True


@contextmanager
def under_masks() -> Iterator[None]:
    """Let documents be kept apart by masks meanwhile, as other programs' loops do it."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


@contextmanager
def assuming_cuda() -> Iterator[None]:
    """Let what is traced meanwhile take the kernel as a GPU would."""
    global _assumed
    before, _assumed = _assumed, True
    try:
        yield
    finally:
        _assumed = before


def _find_kernel() -> Callable[..., Any] | None:
    """Return torch's kernel, or None where this version has none for grouped queries and windows."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"enable_gqa", "window_size"} <= set(signature(varlen_attn).parameters) else None


_KERNEL = _find_kernel()


def with_documents(batch: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Tensor]:
    """Return a micro-batch with what the kernel wants to know, computed before it is copied to a GPU.

    Args:
        batch: On the CPU, perhaps with ``position_ids`` [B, S] that start again with every document.
        device: Where it will be.
    """
    positions = batch.get("position_ids")
    if device.type != "cuda" or positions is None or positions.dim() != 2 or positions.is_cuda:
        return batch
    return {**batch, **describe(positions)}


def describe(positions: Tensor) -> dict[str, Tensor]:
    """Return :data:`BEGINS` and :data:`LONGEST` of positions [B, S] on the CPU."""
    first = torch.ones_like(positions, dtype=torch.bool)
    first[:, 1:] = positions[:, 1:] != positions[:, :-1] + 1
    begins = first.reshape(-1).nonzero().reshape(-1)
    begins = torch.cat((begins, begins.new_tensor([positions.numel()]))).to(torch.int32)
    longest = int(begins.diff().max())
    longest = min(max(1 << (longest - 1).bit_length(), _LEAST), positions.shape[1])
    return {BEGINS: begins, LONGEST: torch.empty((longest, 0))}


def window_mask(like: Tensor, window: int) -> Tensor:
    """Return what stands for the mask of a layer with a window: without elements, its shape says the window.

    A shape, because recomputation hands a layer other tensor objects than the first forward did.
    """
    return like.new_empty((0, window), dtype=torch.bool)


def packed(model: nn.Module, batch: Mapping[str, Tensor]) -> Packed | None:
    """Return the documents of a micro-batch if the model can attend to them by the kernel, else None.

    Args:
        model: What is about to run, below any PEFT wrapper.
        batch: On the device of the run.
    """
    positions = batch.get("position_ids")
    if not _allowed or positions is None or positions.dim() != 2 or not _supports(model):
        return None
    shape = (positions.shape[0], positions.shape[1])
    if BEGINS in batch:
        return Packed(batch[BEGINS], batch[LONGEST].shape[0], shape)
    if not _assumed:
        return None
    # A trace has no values: whole sequences, which is the most that attention can cost.
    return Packed(positions.new_zeros(shape[0] + 1, dtype=torch.int32), shape[1], shape)


def _supports(model: nn.Module) -> bool:
    """Say whether all layers attend through transformers' interface, by SDPA."""
    config = getattr(model, "config", None)
    return (
        _KERNEL is not None
        and getattr(config, "_attn_implementation", None) == "sdpa"
        and bool(getattr(model, "_supports_attention_backend", False))
        and (_assumed or not torch.cuda.is_available() or torch.cuda.get_device_capability() >= _CAPABILITY)
    )


@contextmanager
def attending(model: nn.Module, documents: Packed | None) -> Iterator[None]:
    """Let a model's layers attend within ``documents``, until :func:`leave`: backward runs them again.

    Raises:
        ConfigError: A block of the model attends in a way of its own, for which no mask was made.
    """
    global _current
    _current = documents
    if documents is None:
        yield
        return
    register()
    yield
    for block in _blocks(model) if model not in _complete else ():
        if not any(type(module) in _attended for module in block.modules()):
            raise ConfigError(
                f"{type(block).__name__} does not attend through transformers' interface, so packed documents"
                " cannot be kept apart without a mask",
                help="set data.packing: false, or model.attention: eager",
            )
    _complete.add(model)


def leave() -> None:
    """Attend to whole sequences from now on."""
    global _current
    _current = None


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost listed modules that contain a layer with a causal attention."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from (item for item in child if any(_attends(part) for part in item.modules()))
        else:
            yield from _blocks(child)


def _attends(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", False)) and type(module).__name__.endswith("Attention")


@cache
def register() -> None:
    """Let transformers' SDPA attend within documents, where a micro-batch has some."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("sdpa", partial(attend, sdpa_attention_forward))


def attend(
    original: Callable[..., tuple[Tensor, None]],
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
    """Attend as transformers' interface asks (5.23), within documents where there are some.

    Args:
        original: transformers' SDPA.
        module: The attention layer.
        query: [B, heads, S, D].
        key, value: [B, key heads, S, D].
        attention_mask: None where the layer's mask is causal, :func:`window_mask` where it has a window.
        dropout, scaling: As in torch's attention.
        is_causal: False where the layer looks both ways.
        others: Arguments of other implementations.

    Returns:
        [B, S, heads, D], and no attention weights.
    """
    documents = _current
    _mark(type(module))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    windowed = attention_mask is not None and attention_mask.dim() == 2
    if documents is None or (attention_mask is not None and not windowed) or not causal:
        return original(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    if documents.shape != (query.shape[0], query.shape[2]) or key.shape[2] != query.shape[2]:
        return original(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    window = attention_mask.shape[1] if attention_mask is not None else None
    if dropout or not _kernel_takes(query, key, value) or any(others.get(k) is not None for k in _FURTHER):
        mask = documents.mask(window)
        return original(module, query, key, value, mask, dropout, scaling, None, **others)
    assert _KERNEL is not None
    flat = [part.transpose(1, 2).flatten(0, 1) for part in (query, key, value)]
    result: Tensor = _KERNEL(
        *flat,
        documents.begins,
        documents.begins,
        documents.longest,
        documents.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return result.view(query.shape[0], query.shape[2], *result.shape[1:]), None


def _mark(kind: type[nn.Module]) -> None:
    _attended.add(kind)


# As ``torch.compiler.assume_constant_result`` does (torch 2.13), without importing Dynamo: it runs this once,
# while it traces a block.
_mark._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _kernel_takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    size = query.shape[-1]
    return (
        (query.is_cuda or _assumed)
        and query.dtype in _HALF
        and key.shape[-1] == value.shape[-1] == size <= _LARGEST_HEAD
        and size % 8 == 0
    )
