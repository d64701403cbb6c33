"""Cached latents and embeddings, made ready for the family that assembles a micro-batch of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.bases.latents import SOURCES
from fsdptool.families.protocol import TensorSpec
from fsdptool.families.registry import family_of
from fsdptool.records.model import ModelSpec
from fsdptool.records.recipe import Recipe
from fsdptool.training.data.collate import Sample

if TYPE_CHECKING:
    from torch import Tensor

_OTHER = "name the pipeline the model belongs to in data.options.pipeline"


class Denoising:
    """Collates cached samples by the family's ``assemble``.

    Texts that have a mask are filled with zeros up to the number of tokens memory was planned for.

    Args:
        spec: The model.
        recipe: The run's recipe.
        wanted: The family's batch specification by name.

    Raises:
        ConfigError: The family cannot be trained from a cache.
    """

    def __init__(self, spec: ModelSpec, recipe: Recipe, wanted: Mapping[str, TensorSpec]) -> None:
        self._spec = spec
        self._recipe = recipe
        self._wanted = dict(wanted)
        if not callable(getattr(family_of(spec), "assemble", None)):
            raise ConfigError(
                f"family {spec.family} does not assemble batches from cached latents",
                help="train it on data.source synthetic, or give its family a method assemble",
            )

    def check(self, sample: Sample) -> None:
        """Hold one sample against the specification.

        Raises:
            ConfigError: The cached tensors do not suit the model.
        """
        shape, planned = tuple(sample["latents"].shape), self._wanted["latents"].shape[1:]
        if shape[0] != planned[0] or len(shape) != len(planned):
            raise ConfigError(f"the VAE's latents are {shape}, the model takes {planned}", help=_OTHER)
        if math.prod(shape) > math.prod(planned):
            raise ConfigError(
                f"the VAE's latents are {shape}, memory is planned for {planned}",
                help="this VAE shrinks pixels less than the family's own; lower batch.height and batch.width",
            )
        for name, cached in SOURCES.items():
            item = self._wanted.get(name)
            if item is None:
                continue
            if cached not in sample:
                raise ConfigError(
                    f"the model takes {name}, the pipeline's text encoders make no {cached}", help=_OTHER
                )
            if item.fill != "mask" and sample[cached].shape[-1] != item.shape[-1]:
                raise ConfigError(
                    f"{cached} is {sample[cached].shape[-1]} wide, the model takes {item.shape[-1]}",
                    help=_OTHER,
                )
        self._ready(sample)

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        family: Any = family_of(self._spec)
        ready = [self._ready(sample) for sample in samples]
        made: dict[str, Tensor] = family.assemble(self._spec.config, self._recipe, ready)
        return made

    def _ready(self, sample: Sample) -> dict[str, Tensor]:
        found = dict(sample)
        for name, cached in SOURCES.items():
            item = self._wanted.get(name)
            if item is not None and cached in found:
                found[cached] = self._filled(cached, found[cached], item.shape[1:])
        size = found["size"].double()
        # PixArt's micro-conditions (diffusers 0.42.1, pipeline_pixart_sigma.py).
        found["resolution"], found["aspect_ratio"] = size[4:6], size[4:5] / size[5:6]
        return found

    def _filled(self, name: str, tensor: Tensor, planned: tuple[int, ...]) -> Tensor:
        shape = tuple(tensor.shape)
        if shape == planned:
            return tensor
        masked = any(item.fill == "mask" for item in self._wanted.values())
        if not masked or shape[1:] != planned[1:] or shape[0] > planned[0]:
            raise ConfigError(
                f"{name} of a cached text is {shape}, memory is planned for {planned}",
                help=f"set batch.sequence_length to {shape[-2] if len(shape) > 1 else shape[0]}",
            )
        filled = tensor.new_zeros(planned)
        filled[: shape[0]] = tensor
        return filled
