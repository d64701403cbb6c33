"""Make a recipe's latents and text embeddings: split over processes, resumable, whole or not at all.

The pictures are cut into shards. Process ``r`` of ``n`` makes the shards ``r``, ``r + n``, ...: first
all text with the text encoders, then, those unloaded, all pixels with the VAE. A shard's file is
written aside and renamed, so whatever was finished before a kill is kept. Who finds every shard
there writes the index.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError, StorageError
from fsdptool.families.bases.batches import SOURCES
from fsdptool.families.registry import family_of
from fsdptool.files.text import holds, private_folder
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Data, Recipe
from fsdptool.runs.work import Countdown, left_text
from fsdptool.source.vae import vae_factor
from fsdptool.training.data.build import for_micro_batch
from fsdptool.training.data.encoded import Done, Tell
from fsdptool.training.data.images import Bucket, Picture, buckets_of, list_pictures, read_pixels
from fsdptool.training.data.loader import Opened
from fsdptool.training.data.sources import path_of
from fsdptool_diffusion.autoencoder import FirstFrame, ImageEncoding
from fsdptool_diffusion.encoders import TextEncoding, caption_tokens, check_pipeline, pipeline_folder
from fsdptool_diffusion.latents import (
    INDEX,
    VERSION,
    Index,
    index_json,
    open_latents,
    pixel_file,
    read_index,
    text_file,
)

if TYPE_CHECKING:
    from torch import Tensor

_SHARD = 64


@dataclass(frozen=True, slots=True)
class DiffusionWork:
    """What is to be made, the same for every process.

    Attributes:
        folder: Where it goes.
        pipeline: Folder of the pipeline whose encoders are used.
        buckets, pictures: Sizes and pictures.
        shard_size: Pictures per shard.
        key: Digest of everything that decides the result.
        name: Class of the pipeline.
        length: Tokens of a caption, where the model takes captions of one length.
        frames: Whether the denoiser's latents have frames.
        rate: Frames a second that are taken of videos; None spreads them over the whole video.
        trust_remote_code: Whether code from the pipeline's folder may run.
    """

    folder: Path
    pipeline: Path
    buckets: tuple[Bucket, ...]
    pictures: tuple[Picture, ...]
    shard_size: int
    key: str
    name: str
    length: int | None
    frames: bool
    rate: float | None
    trust_remote_code: bool = False

    @property
    def shards(self) -> int:
        """Number of shards."""
        return math.ceil(len(self.pictures) / self.shard_size)

    def members(self, shard: int) -> range:
        """Return the numbers of a shard's pictures."""
        return range(shard * self.shard_size, min((shard + 1) * self.shard_size, len(self.pictures)))

    def run(self, *, rank: int, world: int, device: str, tell: Tell = lambda _: None) -> Done:
        """Make this process's shards that are not there yet, and the index once all are.

        Raises:
            ConfigError: A picture or an encoder cannot be read, or the folder holds something else.
            StorageError: The folder cannot be written.
        """
        return run_work(self, rank=rank, world=world, device=device, tell=tell)


def plan_work(recipe: Recipe, spec: ModelSpec, cache: Path) -> DiffusionWork:
    """Return what a recipe's ``precompute`` makes, and where.

    Raises:
        ConfigError: The recipe names no images, sizes or pipeline, or they do not fit together.
    """
    data, batch = recipe.data, recipe.batch
    if data.source != "images":
        raise ConfigError(
            f"data.source is {data.source}: there is nothing to precompute",
            help="only data.source images has pictures to encode",
        )
    if batch.height is None or batch.width is None:
        raise ConfigError("batch.height and batch.width are not set", help="give the training size in pixels")
    pipeline = pipeline_folder(recipe, spec)
    name = check_pipeline(pipeline)
    if not (pipeline / "vae" / "config.json").is_file():
        raise ConfigError(f"{pipeline} has no vae/config.json", help="name a whole pipeline's folder")
    family: Any = family_of(spec)
    step = family.pixel_step(spec.config) if hasattr(family, "pixel_step") else 1
    _check_vae(pipeline, spec)
    buckets = buckets_of(batch.height, batch.width, batch.frames or 1, data.options, step=step)
    _check_sizes(recipe, spec, buckets)
    specs = {item.name: item for item in family.batch_spec(spec.config, for_micro_batch(recipe, 1))}
    lengths = [specs[name].shape[1] for name in SOURCES if name in specs and len(specs[name].shape) == 3]
    _check_captions(pipeline, lengths[0] if lengths else None)
    work = DiffusionWork(
        folder=Path(),
        pipeline=pipeline,
        buckets=buckets,
        pictures=list_pictures(data, buckets),
        shard_size=data.options.get("shard_size", _SHARD),
        key="",
        name=name,
        length=lengths[0] if lengths else None,
        frames="latents" in specs and len(specs["latents"].shape) == 5,
        rate=_rate(recipe, spec),
        trust_remote_code=spec.trust_remote_code,
    )
    key = _key(work, Path(str(data.path)).expanduser().name)
    requested = data.options.get("latents")
    folder = Path(requested).expanduser() if requested else cache / "latents" / key
    return dataclasses.replace(work, key=key, folder=folder)


def _check_vae(pipeline: Path, spec: ModelSpec) -> None:
    """Another pipeline's VAE may shrink pixels more than the model's own, but not less: memory is planned."""
    family: Any = family_of(spec)
    own = vae_factor(pipeline)
    if own is None or not hasattr(family, "own_geometry"):
        return
    planned = family.own_geometry(family.full(spec.config)).spatial
    if own < planned:
        raise ConfigError(
            f"the VAE of {pipeline} makes a latent of {own} x {own} pixels, memory is planned for one of"
            f" {planned} x {planned}",
            help="name that pipeline's folder as model.reference, or another one in data.options.pipeline",
        )


def _check_captions(pipeline: Path, planned: int | None) -> None:
    """What the pipeline's tokenizer fills captions up to is known before anything is encoded."""
    own = caption_tokens(pipeline)
    if own is not None and planned is not None and own != planned:
        raise ConfigError(
            f"the tokenizer of {pipeline} makes captions of {own} tokens, memory is planned for {planned}",
            help=f"set batch.sequence_length to {own}",
        )


def _rate(recipe: Recipe, spec: ModelSpec) -> float | None:
    """``data.options.fps``, or what the family was trained at; ``spread`` is None."""
    family: Any = family_of(spec)
    requested = recipe.data.options.get("fps")
    if requested is None:
        known: float | None = family.frame_rate(spec.config) if hasattr(family, "frame_rate") else None
        return known
    return None if requested == "spread" else requested


def _check_sizes(recipe: Recipe, spec: ModelSpec, buckets: Iterable[Bucket]) -> None:
    """The family refuses sizes its model cannot take."""
    family = family_of(spec)
    for bucket in buckets:
        batch = dataclasses.replace(recipe.batch, height=bucket.height, width=bucket.width)
        family.batch_spec(spec.config, dataclasses.replace(recipe, batch=batch))


def _key(work: DiffusionWork, root: str) -> str:
    sizes = [dataclasses.astuple(item) for item in work.buckets]
    parts: list[Any] = [VERSION, work.name, work.shard_size, work.length, work.frames, work.rate, sizes]
    for picture in work.pictures:
        stat = [(Path(file).stat().st_size, Path(file).stat().st_mtime_ns) for file in picture.files]
        parts.append([Path(picture.name).as_posix(), picture.caption, picture.bucket, stat])
    for part in sorted(work.pipeline.iterdir()):
        if part.is_dir() and part.name.startswith(("image_", "text_encoder", "tokenizer", "vae")):
            for file in sorted(part.rglob("*")):
                if file.is_file():
                    parts.append([f"{part.name}/{file.name}", file.stat().st_size, file.stat().st_mtime_ns])
    parts.append(root)
    return hashlib.blake2b(json.dumps(parts, default=str).encode(), digest_size=16).hexdigest()


def run_work(work: DiffusionWork, *, rank: int, world: int, device: str, tell: Tell = lambda _: None) -> Done:
    """Do the part of ``work`` of one of ``world`` processes; errors as :meth:`DiffusionWork.run`."""
    if (work.folder / INDEX).exists():
        _check_same(work)
        return _done(work, 0)
    try:
        private_folder(work.folder)
        _claim(work)
        mine = range(rank, work.shards, world)
        shards = _make_text(work, mine, rank, device, tell)
        shards |= _make_pixels(work, mine, device, tell)
        _finish(work)
    except OSError as error:
        raise StorageError(
            f"{work.folder} cannot be written: {error.strerror or error}",
            help="free space there, or set data.options.latents to another folder; finished work is kept",
        ) from error
    return _done(work, len(shards))


def _claim(work: DiffusionWork) -> None:
    """A folder that somebody named serves one set of latents only."""
    mark = work.folder / "key"
    if not mark.exists():
        _write(mark, lambda path: path.write_text(work.key, encoding="utf-8"))
    if not holds(mark, work.key.encode()):
        _refuse(work)


def _check_same(work: DiffusionWork) -> None:
    if read_index(work.folder).key != work.key:
        _refuse(work)


def _refuse(work: DiffusionWork) -> None:
    raise ConfigError(
        f"{work.folder} contains latents of other images, captions, sizes or encoders",
        help="name another folder in data.options.latents, or remove this one",
    )


def _make_text(work: DiffusionWork, shards: Iterable[int], rank: int, device: str, tell: Tell) -> set[int]:
    missing = [shard for shard in shards if not text_file(work.folder, shard).exists()]
    wants_none = rank == 0 and not text_file(work.folder, None).exists()
    if not missing and not wants_none:
        return set()
    encoding = TextEncoding(
        work.pipeline, device=device, length=work.length, trust_remote_code=work.trust_remote_code
    )
    if wants_none:
        nothing = encoding.encode_nothing()
        _save(text_file(work.folder, None), {f"0/{name}": tensor for name, tensor in nothing.items()})
    countdown = Countdown(len(missing))
    for position, shard in enumerate(missing, 1):
        members = work.members(shard)
        encoded = encoding.encode([work.pictures[number].caption for number in members])
        pairs = zip(members, encoded, strict=True)
        tensors = {f"{number}/{name}": tensor for number, item in pairs for name, tensor in item.items()}
        _save(text_file(work.folder, shard), tensors)
        tell(f"text: shard {position} of {len(missing)}{left_text(countdown.left(position))}")
    encoding.unload()
    return set(missing)


def _make_pixels(work: DiffusionWork, shards: Iterable[int], device: str, tell: Tell) -> set[int]:
    missing = [shard for shard in shards if not pixel_file(work.folder, shard).exists()]
    if not missing:
        return set()
    encoding = ImageEncoding(work.pipeline, device=device)
    first = FirstFrame(work.pipeline, encoding) if work.name == "WanImageToVideoPipeline" else None
    if not encoding.video and any(bucket.frames > 1 for bucket in work.buckets):
        raise ConfigError(
            f"the VAE of {work.pipeline} does not take frames, batch.frames is {work.buckets[0].frames}",
            help="leave batch.frames out, or name a video pipeline",
        )
    countdown = Countdown(len(missing))
    for position, shard in enumerate(missing, 1):
        tensors: dict[str, Tensor] = {}
        for number in work.members(shard):
            picture = work.pictures[number]
            pixels = read_pixels(picture, work.buckets[picture.bucket], rate=work.rate).values
            encoded = encoding.encode(pixels, frames=work.frames) | (
                first.encode(pixels) if first is not None else {}
            )
            tensors |= {f"{number}/{name}": tensor for name, tensor in encoded.items()}
        _save(pixel_file(work.folder, shard), tensors)
        tell(f"pixels: shard {position} of {len(missing)}{left_text(countdown.left(position))}")
    encoding.unload()
    return set(missing)


def _finish(work: DiffusionWork) -> None:
    files = [text_file(work.folder, None)]
    for shard in range(work.shards):
        files += [text_file(work.folder, shard), pixel_file(work.folder, shard)]
    if not all(file.exists() for file in files):
        return
    from fsdptool.files.safetensors_writer import open_safetensors

    names = []
    for file in (files[1], files[2]):
        with open_safetensors(file) as tensors:
            names.append(tuple(sorted({key.partition("/")[2] for key in tensors.keys()})))  # noqa: SIM118
    index = Index(
        version=VERSION,
        key=work.key,
        pipeline=work.name,
        shard_size=work.shard_size,
        buckets=work.buckets,
        pictures=tuple(dataclasses.replace(picture, files=()) for picture in work.pictures),
        text_names=names[0],
        pixel_names=names[1],
    )
    _write(work.folder / INDEX, lambda path: path.write_text(index_json(index), encoding="utf-8"))


def _save(file: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(path: Path) -> None:
        try:
            save_file(dict(tensors), str(path))
        except SafetensorError as error:
            raise OSError(0, str(error)) from error

    _write(file, write)


def _write(file: Path, write: Callable[[Path], Any]) -> None:
    aside = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        write(aside)
        with aside.open("rb") as stream:
            os.fsync(stream.fileno())
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)


def _done(work: DiffusionWork, made: int) -> Done:
    counts = [0] * len(work.buckets)
    for picture in work.pictures:
        counts[picture.bucket] += 1
    return Done(
        work.folder,
        len(work.pictures),
        tuple(zip(work.buckets, counts, strict=True)),
        work.shards,
        made,
        (work.folder / INDEX).exists(),
    )


class LatentData:
    """Pictures and captions, which a pipeline's VAE and text encoders encode once."""

    def plan(self, recipe: Recipe, spec: ModelSpec, cache: Path) -> DiffusionWork:
        """Return what is encoded; errors as :func:`plan_work`."""
        return plan_work(recipe, spec, cache)

    def open_samples(self, recipe: Recipe, spec: ModelSpec, data: Data, cache: Path, part: str) -> Opened:
        """Return the samples of a folder of latents: the one that the data names, or that ``plan`` makes."""
        if data.source == "latents":
            folder = Path(path_of(data)).expanduser()
        else:
            folder = plan_work(dataclasses.replace(recipe, data=data), spec, cache).folder
        return open_latents(recipe, spec, data, folder, part)

    def decoder(self, recipe: Recipe, spec: ModelSpec, device: str) -> ImageEncoding:
        """Return the VAE of the model's pipeline."""
        return ImageEncoding(pipeline_folder(recipe, spec), device=device)


LATENTS = LatentData()
"""What ``Family.encoded_data`` of denoisers names."""
