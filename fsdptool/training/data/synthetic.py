"""Samples made from a family's batch specification: nothing to download, any model trains."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import TensorSpec
from fsdptool.training.data.order import mix

if TYPE_CHECKING:
    from torch import Generator, Tensor


class Synthetic:
    """``count`` different samples, each drawn from (seed, index) alone, again the same every epoch.

    Args:
        spec: The tensors of a micro-batch.
        micro_batch: Samples the specification's first dimension stands for.
        count: Samples of an epoch.
        seed: The run's seed.
    """

    def __init__(self, spec: Sequence[TensorSpec], *, micro_batch: int, count: int, seed: int) -> None:
        if count < 1:
            raise ConfigError(f"data.options.samples is {count}", help="give at least 1")
        self._spec = tuple(spec)
        self._micro_batch = micro_batch
        self._count = count
        self._seed = seed
        shapes = [(item.name, item.shape[1:], item.dtype, item.fill, item.high) for item in self._spec]
        self.digest = hashlib.blake2b(repr((shapes, count, seed)).encode(), digest_size=20).hexdigest()

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        """Return one sample; ``epoch`` changes nothing."""
        import torch

        found: dict[str, Tensor] = {}
        for number, item in enumerate(self._spec):
            # A tensor without a sample dimension (a table of image positions) is the same for all.
            shared = not item.shape or item.shape[0] != self._micro_batch
            shape = item.shape if shared else item.shape[1:]
            generator = torch.Generator().manual_seed(mix(self._seed, -1 if shared else index, number, 7))
            found[item.name] = draw(item, shape, generator, found)
        return found


def draw(
    item: TensorSpec, shape: tuple[int, ...], generator: Generator, before: Mapping[str, Tensor]
) -> Tensor:
    """Return one tensor as its ``fill`` says (docs/families.md).

    ``labels`` of the shape of tokens drawn before them repeat those tokens, so that there is
    something to learn.
    """
    import torch

    dtype = getattr(torch, item.dtype)
    if item.fill == "constant":
        values = item.values or (0,)
        return (
            torch.tensor(values, dtype=dtype).reshape(shape)
            if len(values) > 1
            else torch.full(shape, values[0], dtype=dtype)
        )
    if item.fill == "mask":
        made = torch.ones(shape, dtype=dtype)
    elif item.fill == "positions":
        made = torch.arange(shape[-1] if shape else 1).expand(shape).to(dtype).clone()
    elif item.fill == "normal":
        made = torch.randn(shape, generator=generator).to(dtype)
    elif item.fill == "uniform":
        made = torch.rand(shape, generator=generator).to(dtype)
    else:
        made = _integers(item, shape, generator, before).to(dtype)
    if item.values:
        made.view(-1)[: len(item.values)] = torch.tensor(item.values, dtype=dtype)
    return made


def _integers(
    item: TensorSpec, shape: tuple[int, ...], generator: Generator, before: Mapping[str, Tensor]
) -> Tensor:
    import torch

    tokens = before.get("input_ids")
    if item.fill == "labels" and tokens is not None and tuple(tokens.shape) == shape and shape:
        return tokens.clone() % item.high if item.high else tokens.clone()
    if not item.high:
        raise ConfigError(f"the family's batch says no upper bound for {item.name}", help="report it")
    return torch.randint(0, item.high, shape, generator=generator)
