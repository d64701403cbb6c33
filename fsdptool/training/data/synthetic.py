"""Samples made from a family's batch specification: nothing to download, any model trains."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import TensorSpec
from fsdptool.training.data.order import mix


class Synthetic:
    """``count`` different samples, each drawn from (seed, index) alone, again the same every epoch.

    Labels of the shape of the tokens repeat the tokens, so that there is something to learn.

    Args:
        spec: The tensors of a micro-batch of one sample.
        shared: Names of those without a sample dimension (a table of image positions).
        count: Samples of an epoch.
        seed: The run's seed.
    """

    def __init__(self, spec: Sequence[TensorSpec], *, shared: frozenset[str], count: int, seed: int) -> None:
        if count < 1:
            raise ConfigError(f"data.options.samples is {count}", help="give at least 1")
        self._own = tuple(item for item in spec if item.name not in shared)
        self._common = tuple(item for item in spec if item.name in shared)
        self._count = count
        self._seed = seed
        self.digest = hashlib.blake2b(repr((tuple(spec), count, seed)).encode(), digest_size=20).hexdigest()

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        """Return one sample; ``epoch`` changes nothing."""
        import torch

        from fsdptool.families.synthetic import synthesise

        own = synthesise(self._own, torch.Generator().manual_seed(mix(self._seed, index, 7)))
        found = {name: tensor[0] for name, tensor in own.items()}
        tokens, labels = found.get("input_ids"), found.get("labels")
        if tokens is not None and labels is not None and tokens.shape == labels.shape:
            high = next(item.high for item in self._own if item.name == "labels")
            found["labels"] = tokens % high if high else tokens.clone()
        found |= synthesise(self._common, torch.Generator().manual_seed(mix(self._seed, 8)))
        return found


def split_spec(one: Sequence[TensorSpec], two: Sequence[TensorSpec]) -> frozenset[str]:
    """Return the tensors that do not grow with the micro-batch, given the specs for one sample and two."""
    sizes = {item.name: item.shape for item in two}
    return frozenset(item.name for item in one if sizes.get(item.name) == item.shape)


def for_micro_batch(recipe: Any, size: int) -> Any:
    """Return the recipe with another micro-batch."""
    return dataclasses.replace(recipe, batch=dataclasses.replace(recipe.batch, micro_batch=size))
