"""The names and forms a model's own checkpoints use, which other programs expect.

transformers 5 fuses experts and renames modules when it loads; ``save_pretrained`` reverts that
(``core_model_loading.revert_weight_conversion``, 5.23) on the whole state dict. Here it is applied
to one module at a time, with the shapes found on meta first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from fsdptool.files.safetensors_writer import Entry

if TYPE_CHECKING:
    import torch
    from torch import nn

Fetch = Callable[[str], "torch.Tensor"]


def original_entries(
    model: nn.Module, like: Mapping[str, torch.Tensor], fetch: Fetch, dtype: torch.dtype | None
) -> list[Entry]:
    """Return the entries of a transformers checkpoint.

    Args:
        model: On meta.
        like: Meta tensors by the names in ``model``, in order.
        fetch: Returns a tensor's value by that name.
        dtype: Convert floating tensors to this; None keeps each.
    """
    from transformers.core_model_loading import revert_weight_conversion

    def revert(part: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(revert_weight_conversion(model, dict(part)))

    whole = revert(like)
    groups = _by_module(like)
    reverted = [revert({name: like[name] for name in group}) for group in groups]
    found = {name: tensor for part in reverted for name, tensor in part.items()}
    if _shapes(found) != _shapes(whole):
        # A conversion reaches across modules: give it everything at once.
        groups, reverted = [list(like)], [whole]
    entries = []
    for group, part in zip(groups, reverted, strict=True):
        batch = _Batch(group, revert, fetch, dtype)
        for name, tensor in part.items():
            entries.append(
                Entry(name, cast(tensor.dtype, dtype), tuple(tensor.shape), partial(batch.get, name))
            )
    return entries


def plain_entries(like: Mapping[str, torch.Tensor], fetch: Fetch, dtype: torch.dtype | None) -> list[Entry]:
    """Return entries under the model's own names."""

    def value(name: str) -> torch.Tensor:
        tensor = fetch(name)
        return tensor.to(cast(tensor.dtype, dtype))

    return [
        Entry(name, cast(tensor.dtype, dtype), tuple(tensor.shape), partial(value, name))
        for name, tensor in like.items()
    ]


def cast(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype a tensor is written in."""
    return wanted if wanted is not None and own.is_floating_point else own


@dataclass(slots=True)
class _Batch:
    """The reverted tensors of one module, made when the first is asked for and dropped with the last."""

    names: list[str]
    revert: Callable[[Mapping[str, Any]], dict[str, Any]]
    fetch: Fetch
    dtype: torch.dtype | None
    made: dict[str, Any] | None = None

    def get(self, name: str) -> torch.Tensor:
        if self.made is None:
            self.made = self.revert({source: self.fetch(source) for source in self.names})
        value: torch.Tensor = self.made.pop(name)
        if not self.made:
            self.made = None
        return value.to(cast(value.dtype, self.dtype))


def _by_module(like: Mapping[str, Any]) -> list[list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in like:
        groups[name.rpartition(".")[0]].append(name)
    return list(groups.values())


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
