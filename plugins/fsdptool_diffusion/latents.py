"""The folder of cached latents and text embeddings: its layout, samples read from it, and micro-batches.

``latents.json`` lists pictures, buckets and shards and is written last. Shard ``n`` is two files,
``text-n.safetensors`` and ``pixels-n.safetensors``, with tensors named ``PICTURE/NAME``;
``text-none.safetensors`` holds the embedding of the empty caption.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.bases.batches import SOURCES
from fsdptool.families.protocol import TensorSpec
from fsdptool.families.registry import family_of
from fsdptool.files.text import UnreadableError
from fsdptool.files.values import read_json
from fsdptool.inspection import micro_batch
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.recipe import Data, Recipe
from fsdptool.training.data.build import for_micro_batch
from fsdptool.training.data.images import Bucket, Picture, held_out
from fsdptool.training.data.loader import Opened, Sample
from fsdptool.training.data.order import BucketOrder, Order, PlainOrder, mix

if TYPE_CHECKING:
    from torch import Tensor


INDEX = "latents.json"
VERSION = 2
_NORMAL = ("latents", "latents_std")


@dataclass(frozen=True, slots=True)
class Index:
    """What ``latents.json`` says.

    Attributes:
        version: Of the layout.
        key: Digest of everything that decided the content.
        pipeline: Class of the pipeline whose encoders were used.
        shard_size: Pictures per shard.
        buckets: Training sizes.
        pictures: All pictures, in order.
        text_names, pixel_names: Tensors per picture.
    """

    version: int
    key: str
    pipeline: str
    shard_size: int
    buckets: tuple[Bucket, ...]
    pictures: tuple[Picture, ...]
    text_names: tuple[str, ...]
    pixel_names: tuple[str, ...]


def text_file(folder: Path, shard: int | None) -> Path:
    """Return the file of a shard's text embeddings; None is the empty caption's."""
    return folder / ("text-none.safetensors" if shard is None else f"text-{shard:05d}.safetensors")


def pixel_file(folder: Path, shard: int) -> Path:
    """Return the file of a shard's latents."""
    return folder / f"pixels-{shard:05d}.safetensors"


def read_index(folder: Path) -> Index:
    """Return the index of a finished folder.

    Raises:
        ConfigError: The folder is not finished, of another layout or damaged.
    """
    file = folder / INDEX
    if not file.exists():
        raise ConfigError(
            f"{folder} does not contain finished latents ({INDEX} is missing)",
            help="run fsdptool precompute RECIPE; it continues where it stopped",
        )
    try:
        data = read_json(file)
    except UnreadableError as error:
        raise ConfigError(f"{file} cannot be read: {error}", help="run fsdptool precompute again") from error
    if not isinstance(data, dict) or data.get("version") != VERSION:
        raise ConfigError(
            f"{file} has another version", help="remove the folder and run fsdptool precompute again"
        )
    return from_json(Index, data, where=str(file))


def index_json(index: Index) -> str:
    """Return the text of ``latents.json``."""
    return json.dumps(to_json(index), indent=1)


class Latents:
    """Samples for denoisers: latents, embeddings, and what is drawn for (seed, epoch, sample).

    A sample holds ``latents``, ``noise`` (standard normal, same shape), ``uniform`` (one number in
    [0, 1), from which the family makes the timestep), what else was made of its pixels (the first
    frame's condition), the text's tensors (those of the empty caption where the caption is dropped), and
    ``size`` (original height and width, crop top and left, target
    height and width).

    Args:
        folder: A finished folder.
        numbers: Numbers of the pictures used.
        seed: The run's seed.
        dropout: Share of captions that are dropped, drawn again each epoch.
        draw: Whether latents are drawn from the VAE's posterior, again each epoch, or its mean.
    """

    def __init__(
        self, folder: Path, numbers: Sequence[int], *, seed: int, dropout: float = 0.0, draw: bool = False
    ) -> None:
        if not 0.0 <= dropout <= 1.0:
            raise ConfigError(f"caption dropout is {dropout}", help="give a share between 0 and 1")
        self._folder = folder
        self._numbers = tuple(numbers)
        self._seed = seed
        self._dropout = dropout
        self._draw = draw
        self._index = read_index(folder)
        parts = (self._index.key, self._numbers, seed, dropout, draw)
        self.digest = hashlib.blake2b(repr(parts).encode(), digest_size=20).hexdigest()

    def __len__(self) -> int:
        return len(self._numbers)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "folder": self._folder,
            "numbers": self._numbers,
            "seed": self._seed,
            "dropout": self._dropout,
            "draw": self._draw,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def buckets(self) -> list[list[int]]:
        """Sample numbers by bucket."""
        members: list[list[int]] = [[] for _ in self._index.buckets]
        for position, number in enumerate(self._numbers):
            members[self._index.pictures[number].bucket].append(position)
        return members

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        """Return one sample, drawn as (seed, epoch, picture) says."""
        import torch

        number = self._numbers[index]
        picture = self._index.pictures[number]
        shard = number // self._index.shard_size
        pixels = _tensors(pixel_file(self._folder, shard), number, self._index.pixel_names)
        random = torch.Generator().manual_seed(mix(self._seed, epoch, number, 21))
        uniform = torch.rand((), generator=random, dtype=torch.float64)
        dropped = bool(torch.rand((), generator=random, dtype=torch.float64) < self._dropout)
        latents = pixels["latents"].float()
        noise = torch.randn(latents.shape, generator=random)
        if self._draw:
            latents = latents + pixels["latents_std"].float() * torch.randn(latents.shape, generator=random)
        caption = (None, 0) if dropped else (shard, number)
        text = _tensors(text_file(self._folder, caption[0]), caption[1], self._index.text_names)
        bucket = self._index.buckets[picture.bucket]
        return {
            "latents": latents,
            "noise": noise,
            "uniform": uniform,
            **{name: tensor for name, tensor in pixels.items() if name not in _NORMAL},
            **text,
            "size": torch.tensor(
                [picture.height, picture.width, *_crop(picture, bucket), bucket.height, bucket.width]
            ),
        }


def split_pictures(index: Index, share: float) -> tuple[list[int], list[int]]:
    """Return the pictures' numbers split into training and validation by the hash of their names."""
    train: list[int] = []
    hidden: list[int] = []
    for number, picture in enumerate(index.pictures):
        (hidden if held_out(picture.name, share) else train).append(number)
    return train, hidden


def _crop(picture: Picture, bucket: Bucket) -> tuple[int, int]:
    """Top and left of the centre cut, in pixels of the resized picture (as ``images.read_pixels`` cuts)."""
    scale = max(bucket.height / picture.height, bucket.width / picture.width)
    height = max(round(picture.height * scale), bucket.height)
    width = max(round(picture.width * scale), bucket.width)
    return (height - bucket.height) // 2, (width - bucket.width) // 2


@lru_cache(maxsize=64)
def _opened(path: str) -> Any:
    from fsdptool.files.safetensors_writer import open_safetensors

    return open_safetensors(path)


def _tensors(path: Path, number: int, names: Sequence[str]) -> dict[str, Tensor]:
    try:
        file = _opened(str(path))
        return {name: file.get_tensor(f"{number}/{name}") for name in names}
    except Exception as error:  # safetensors raises its own kind, OSError and FileNotFoundError
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{path} cannot be read: {line}", help="remove it and run fsdptool precompute again"
        ) from error


_OTHER = "name the pipeline the model belongs to in data.options.pipeline"


class Denoising:
    """Collates cached samples by the family's ``assemble``.

    Texts that have a mask are filled with zeros up to the number of tokens memory was planned for.

    Args:
        spec: The model.
        recipe: The run's recipe.
        batch_spec: The family's batch specification by name.

    Raises:
        ConfigError: The family cannot be trained from a cache.
    """

    def __init__(self, spec: ModelSpec, recipe: Recipe, batch_spec: Mapping[str, TensorSpec]) -> None:
        self._spec = spec
        self._recipe = recipe
        self._wanted = dict(batch_spec)
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
                    f"the model takes {name}, the pipeline's text encoders do not produce {cached}",
                    help=_OTHER,
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
        batch: dict[str, Tensor] = family.assemble(self._spec.config, self._recipe, ready)
        return batch

    def _ready(self, sample: Sample) -> dict[str, Tensor]:
        ready = dict(sample)
        for name, cached in SOURCES.items():
            item = self._wanted.get(name)
            if item is not None and cached in ready:
                ready[cached] = self._filled(cached, ready[cached], item.shape[1:])
        size = ready["size"].double()
        # PixArt's micro-conditions (diffusers 0.42.1, pipeline_pixart_sigma.py).
        ready["resolution"], ready["aspect_ratio"] = size[4:6], size[4:5] / size[5:6]
        return ready

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


def open_latents(recipe: Recipe, spec: ModelSpec, data: Data, folder: Path, part: str) -> Opened:
    """Return the samples of a part of a finished folder of latents.

    Raises:
        ConfigError: The folder or the recipe cannot be used, or the part is empty.
    """
    batch_spec = micro_batch.batch_spec(spec, for_micro_batch(recipe, 1))
    if not any(item.name == "latents" for item in batch_spec):
        raise ConfigError(
            f"{spec.model_class} is not trained on latents", help="choose another data.source, or synthetic"
        )
    collate = Denoising(spec, recipe, {item.name: item for item in batch_spec})
    dropout = float(recipe.objective.options.get("caption_dropout", 0.0))
    posterior = data.options.get("posterior", "mean")
    seed, holdout = recipe.seed, recipe.evaluation.holdout
    train, hidden = split_pictures(read_index(folder), holdout)
    numbers = {"train": train, "held_out": hidden, "all": [*train, *hidden]}[part]
    if not numbers:
        raise ConfigError(
            f"evaluation.holdout {holdout} of {len(train) + len(hidden)} pictures leaves none to "
            f"{'evaluate on' if part == 'held_out' else 'train on'}",
            help="choose another share, or give evaluation.data",
        )
    # Captions are dropped to learn guidance; validation measures the loss with them.
    samples = Latents(
        folder,
        sorted(numbers),
        seed=seed,
        dropout=dropout if part == "train" else 0.0,
        draw=posterior == "draw",
    )
    collate.check(samples.sample(0, 0))
    buckets = [bucket for bucket in samples.buckets if bucket]
    order: Order
    if len(buckets) > 1:
        order = BucketOrder(buckets, chunk=recipe.batch.micro_batch, seed=seed, shuffle=data.shuffle)
    else:
        order = PlainOrder(len(samples), seed=seed, shuffle=data.shuffle)
    return Opened(samples, order, collate)
