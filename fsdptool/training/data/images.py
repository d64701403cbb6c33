"""Images (and clips) with captions, from a folder: which there are, and what size each is trained at."""

from __future__ import annotations

import csv
import hashlib
import math
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError, read_csv, read_lines, read_source
from fsdptool.files.values import load_json
from fsdptool.records.recipe import Data, DataOptions
from fsdptool.training.data.sources import path_of
from fsdptool.training.data.videos import VIDEOS, read_video, spread, video_size

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

STILLS = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
CLIPS = (".gif", *VIDEOS)
"""Files with several frames; a folder of stills with a caption beside it is a clip, too."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One training size in pixels and frames (1 for stills)."""

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True, slots=True)
class Picture:
    """One image or clip.

    Attributes:
        name: Path below the data folder, with ``/``.
        files: The still itself, the file of a clip, or the stills of a clip in order.
        caption: What it shows; empty if nobody said.
        height, width: Original size in pixels.
        bucket: Number of its bucket.
    """

    name: str
    files: tuple[str, ...]
    caption: str
    height: int
    width: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Pixels:
    """A picture as the VAE takes it: ``[channels, frames, height, width]`` in [-1, 1], and its crop."""

    values: Tensor
    top: int
    left: int


def list_pictures(data: Data, buckets: Sequence[Bucket]) -> tuple[Picture, ...]:
    """Return the pictures below ``data.path``, sorted by name, each with its bucket.

    Captions: ``metadata.jsonl`` or ``metadata.csv`` (``file_name`` and ``data.text_column``) as the
    datasets library reads them, or a ``.txt`` file of the same name.

    Raises:
        ConfigError: The folder is missing or empty, a picture cannot be read or a caption is missing
            for all of them.
    """
    root = Path(path_of(data)).expanduser()
    if not root.is_dir():
        raise ConfigError(f"data.path {root} is not a folder", help="name the folder that holds the images")
    captions = _captions(root, data.text_column)
    video = any(bucket.frames > 1 for bucket in buckets)
    pictures = []
    for name, files in _files(root, video=video):
        caption = captions.get(name)
        if caption is None:
            stem = root / (name if video and (root / name).is_dir() else str(Path(name).with_suffix("")))
            text = stem.with_name(stem.name + ".txt")
            caption = _caption(text) if text.is_file() else ""
        height, width = picture_size(files[0])
        number = nearest(height / width, buckets)
        pictures.append(Picture(name, tuple(map(str, files)), caption, height, width, number))
    if not pictures:
        what = (
            f"clips ({', '.join(CLIPS)} or folders of stills)" if video else f"images ({', '.join(STILLS)})"
        )
        raise ConfigError(f"data.path {root} contains no {what}", help="check data.path")
    if not any(picture.caption for picture in pictures):
        raise ConfigError(
            f"data.path {root} has no captions",
            help="write NAME.txt next to each image, or metadata.jsonl with file_name and text",
        )
    return tuple(pictures)


def _files(root: Path, *, video: bool) -> Iterator[tuple[str, list[Path]]]:
    if not video:
        for file in sorted(root.rglob("*")):
            if file.suffix.lower() in STILLS and file.is_file():
                yield file.relative_to(root).as_posix(), [file]
        return
    for place in sorted(root.iterdir()):
        if place.is_dir():
            stills = sorted(file for file in place.iterdir() if file.suffix.lower() in STILLS)
            if stills:
                yield place.name, stills
        elif place.suffix.lower() in CLIPS:
            yield place.name, [place]


def _captions(root: Path, column: str) -> Mapping[str, str]:
    rows: list[Mapping[str, Any]] = []
    for name in ("metadata.jsonl", "metadata.csv"):
        file = root / name
        if not file.is_file():
            continue
        try:
            if name.endswith(".csv"):
                rows = [row for _, row in read_csv(file)]
            else:
                rows = [load_json(line) for line in read_lines(file) if line.strip()]
            if not all(isinstance(row, Mapping) for row in rows):
                raise ValueError("a line is not a JSON object")
        except (OSError, ValueError, UnreadableError, csv.Error) as error:
            raise ConfigError(f"{file} cannot be read: {error}", help="repair or remove it") from error
        for row in rows:
            for needed in ("file_name", column):
                if needed not in row:
                    raise ConfigError(
                        f"{file} has no column {needed!r}; it has {', '.join(map(str, row))}",
                        help="set data.text_column to the captions' column",
                    )
        return {str(row["file_name"]): str(row[column]) for row in rows}
    return {}


def _caption(file: Path) -> str:
    try:
        return read_source(file).text.strip()
    except UnreadableError as error:
        raise ConfigError(f"{file}: {error.message}", help="repair it or remove it") from error


def _open(file: str | Path) -> Image:
    """Open an image by the formats of ``STILLS`` and GIF alone.

    Left to itself Pillow tries every format it knows, whatever the name says: a PostScript file named
    ``.png`` starts Ghostscript.
    """
    from PIL import Image

    try:
        if not Path(file).is_file():
            raise OSError("it is not a regular file")
        image = Image.open(file, formats=FORMATS)
    except (*_UNDECODABLE, Image.DecompressionBombError) as error:
        raise _no_image(file, error) from error
    width, height = image.size
    if width * height > PIXEL_LIMIT or max(width, height) > ASPECT_LIMIT * min(width, height):
        image.close()
        raise ConfigError(
            f"{file} has {width} x {height} pixels: more than {PIXEL_LIMIT:,} pixels, or one side more than"
            f" {ASPECT_LIMIT} times the other",
            help="resize it or take it out of data.path",
        )
    return image


FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""Pillow's names of the formats that are read."""

PIXEL_LIMIT = 1 << 27
"""Pixels of one image; Pillow itself refuses some more (179 million, ``Image.MAX_IMAGE_PIXELS``)."""

ASPECT_LIMIT = 64
"""A line of pixels would be resized to cover its bucket: to gigabytes."""

_UNDECODABLE = (OSError, ValueError, SyntaxError, EOFError, TypeError, struct.error, zlib.error)
"""What Pillow's decoders raise for damaged files (12.0)."""


def _no_image(file: str | Path, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()) or type(error).__name__
    if "cannot identify" in reason:
        reason = f"it is not one of {', '.join(FORMATS)}"
    return ConfigError(
        f"{file} cannot be read as an image: {reason}", help="repair it or take it out of data.path"
    )


def picture_size(file: Path) -> tuple[int, int]:
    """Return height and width of a picture as it is shown, or of a video.

    Raises:
        ConfigError: It cannot be read.
    """
    if file.suffix.lower() in VIDEOS:
        return video_size(file)
    with _open(file) as image:
        # A camera held upright writes the picture lying and notes how to turn it.
        lies = "exif" in image.info and image.getexif().get(_ORIENTATION, 1) > 4
        return (image.width, image.height) if lies else (image.height, image.width)


_ORIENTATION = 0x0112


def buckets_of(
    height: int, width: int, frames: int, options: DataOptions, *, step: int
) -> tuple[Bucket, ...]:
    """Return the training sizes of a recipe.

    ``data.options.buckets`` is a list of ``[height, width]``, or ``aspect``: every size whose sides
    are multiples of ``step`` pixels, whose area is the largest not above ``height x width`` for its
    height, and whose aspect ratio lies between 1/2 and 2. Without it there is one bucket. No bucket
    has more pixels than the recipe's size, for which memory was planned.

    Raises:
        ConfigError: A size is not a multiple of ``step``, or larger than the recipe's.
    """
    requested = options.get("buckets")
    if requested is None:
        sizes = [(height, width)]
    elif requested == "aspect":
        sizes = _aspects(height * width, step)
    else:
        sizes = list(requested)
    for tall, wide in sizes:
        if tall % step or wide % step or tall < 1 or wide < 1:
            raise ConfigError(
                f"size {tall} x {wide} is not a multiple of {step} pixels, the model's patch in pixels",
                help=f"for example {max(tall // step, 1) * step} x {max(wide // step, 1) * step}",
            )
        if tall * wide > height * width:
            raise ConfigError(
                f"bucket {tall} x {wide} has more pixels than batch.height x batch.width "
                f"({height} x {width}), for which memory is planned",
                help="raise batch.height and batch.width, or leave the bucket out",
            )
    return tuple(Bucket(tall, wide, frames) for tall, wide in sizes)


def _aspects(area: int, step: int) -> list[tuple[int, int]]:
    sizes = []
    for tall in range(step, math.isqrt(2 * area) + 1, step):
        wide = area // tall // step * step
        if wide and 0.5 <= tall / wide <= 2.0:
            sizes.append((tall, wide))
    if not sizes:
        raise ConfigError(
            f"no size of at most {area} pixels has sides that are multiples of {step}",
            help="raise batch.height and batch.width",
        )
    return sizes


def nearest(aspect: float, buckets: Sequence[Bucket]) -> int:
    """Return the number of the bucket whose height over width is nearest, as a ratio."""
    return min(
        range(len(buckets)),
        key=lambda number: abs(math.log(aspect * buckets[number].width / buckets[number].height)),
    )


def read_pixels(picture: Picture, bucket: Bucket, *, rate: float | None = None) -> Pixels:
    """Return the picture resized to cover its bucket and cut at the centre.

    A video gives ``bucket.frames`` frames, ``rate`` a second from its beginning; a video without a rate,
    and a clip, as many evenly spread over its length.

    Raises:
        ConfigError: A file cannot be read, or a clip has too few frames.
    """
    import numpy as np
    import torch

    frames = [_fit(frame, bucket) for frame in _frames(picture, bucket.frames, rate)]
    values = torch.from_numpy(np.stack([np.asarray(image) for image, _, _ in frames]))
    scaled = values.permute(3, 0, 1, 2).to(torch.float32) / 127.5 - 1.0
    return Pixels(scaled.contiguous(), frames[0][1], frames[0][2])


def read_still(file: Path, bucket: Bucket) -> Image:
    """Return one image resized to cover its bucket and cut at the centre.

    Raises:
        ConfigError: It cannot be read.
    """
    return _fit(_open(file), bucket)[0]


def held_out(name: str, share: float) -> bool:
    """Say whether a picture is kept for validation, by the hash of its name."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 2) < int(share * _HALF)


_HALF = 1 << 62


def _frames(picture: Picture, count: int, rate: float | None) -> Iterator[Image]:
    if Path(picture.files[0]).suffix.lower() in VIDEOS:
        yield from read_video(Path(picture.files[0]), count, rate)
        return
    image = _open(picture.files[0]) if len(picture.files) == 1 else None
    length = getattr(image, "n_frames", 1) if image is not None and count > 1 else len(picture.files)
    for number in spread(picture.name, length, count):
        if image is None:
            yield _open(picture.files[number])
            continue
        try:
            image.seek(number)
        except _UNDECODABLE as error:
            raise ConfigError(
                f"clip {picture.name} cannot be read: {error}", help="repair it or take it out of data.path"
            ) from error
        yield image


def _fit(image: Image, bucket: Bucket) -> tuple[Image, int, int]:
    from PIL import Image as images
    from PIL import ImageOps

    try:
        image = ImageOps.exif_transpose(image)
        scale = max(bucket.height / image.height, bucket.width / image.width)
        size = (
            max(round(image.width * scale), bucket.width),
            max(round(image.height * scale), bucket.height),
        )
        resized = image.convert("RGB").resize(size, images.Resampling.LANCZOS)
    except _UNDECODABLE as error:
        raise _no_image(getattr(image, "filename", "an image"), error) from error
    top, left = (size[1] - bucket.height) // 2, (size[0] - bucket.width) // 2
    return resized.crop((left, top, left + bucket.width, top + bucket.height)), top, left
