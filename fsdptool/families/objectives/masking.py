"""Attention masks that depend on the batch's names, never on its contents.

transformers 5.23 looks at ``position_ids`` to find packed documents. It tests the values on real
tensors (one device synchronisation, and a mask only if there are several documents) but assumes
documents on fake ones, so a trace would hold S x S masks that training never makes. Here the
caller says whether documents are packed, and both do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def masks(*, documents: bool) -> Iterator[None]:
    """Let transformers build document masks from ``position_ids``, or plain ones without looking.

    Without documents SDPA runs with ``is_causal`` and no mask. With them SDPA and eager attention
    take one boolean mask per kind of layer, shared by all layers; flash attention needs none.
    """
    from transformers import masking_utils

    name = "find_packed_sequence_indices"
    original: Callable[..., Any] = getattr(masking_utils, name)
    setattr(masking_utils, name, _documents if documents else _no_documents)
    try:
        yield
    finally:
        setattr(masking_utils, name, original)


def _no_documents(position_ids: Tensor) -> None:
    return None


def _documents(position_ids: Tensor) -> Tensor:
    import torch

    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)
