"""Attention masks that depend on the batch's names, never on its contents.

transformers 5.23 looks at ``position_ids`` to find packed documents. It tests the values on real
tensors (one device synchronisation, and a mask only if there are several documents) but assumes
documents on fake ones, so a trace would hold S x S masks that training never makes. Here the
caller says whether documents are packed, and both do the same.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn


_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")


@contextmanager
def masks(model: nn.Module, positions: Tensor | None) -> Iterator[None]:
    """Let transformers build document masks from ``positions``, or plain ones without looking.

    Without documents SDPA runs with ``is_causal`` and no mask. With them SDPA and eager attention
    take one boolean mask per kind of layer, shared by all layers; flash attention needs none. OPT,
    Falcon and others take positions but do not hand them to the mask (5.23): they get them here.

    Args:
        model: What is about to run, below any PEFT wrapper.
        positions: [batch, positions], 0 where a document begins, of the whole sequence; None: no documents.
    """
    from transformers import masking_utils

    changed: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:
        changed.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    finder = _no_documents if positions is None else _documents
    change(masking_utils, "find_packed_sequence_indices", finder)
    traced = any(is_fake(parameter) for parameter in itertools.islice(model.parameters(), 1))
    for module in _modules(model):
        for name in _MAKERS if positions is not None else ():
            if hasattr(module, name):
                change(module, name, _with_positions(getattr(module, name), positions))
        # "As many image tokens as image features": true by the batch's making, unanswerable on fakes.
        if traced and hasattr(module, "torch_compilable_check"):
            change(module, "torch_compilable_check", _unchecked)
    try:
        yield
    finally:
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)


def _modules(model: nn.Module) -> list[Any]:
    found = {cls.__module__ for cls in type(model).__mro__}
    return [sys.modules[name] for name in sorted(found) if name.startswith("transformers.models.")]


def is_fake(tensor: Tensor) -> bool:
    """Say whether a tensor has no contents."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _unchecked(*arguments: Any, **named: Any) -> None:
    return None


def _no_documents(position_ids: Tensor) -> None:
    return None


def _documents(position_ids: Tensor) -> Tensor:
    import torch

    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def _with_positions(original: Callable[..., Any], positions: Tensor | None) -> Callable[..., Any]:
    def make(*arguments: Any, **named: Any) -> Any:
        # transformers calls its mask makers by keyword throughout (5.23).
        if not arguments and _missing(named.get("position_ids"), positions):
            named["position_ids"] = positions
        return original(*arguments, **named)

    return make


def _missing(given: Tensor | None, positions: Tensor | None) -> bool:
    """Say whether the mask would lack positions: the model's own, or those of the whole sequence."""
    return given is None or (positions is not None and given.shape[-1] != positions.shape[-1])
