"""Pictures in a folder per class, for image classifiers: read and prepared as they are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import TensorSpec
from fsdptool.files.text import UnreadableError
from fsdptool.files.values import read_json
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Data
from fsdptool.training.data.images import STILLS, Bucket, held_out, read_still
from fsdptool.training.data.sources import identity_of, path_of

_HALF = (0.5, 0.5, 0.5)


class LabelledPictures:
    """Pictures with a class each, cut to the model's size and normalised by channel.

    Args:
        files: The pictures.
        labels: Their classes' numbers.
        size: Height and width in pixels.
        mean, deviation: Per channel, of values in [0, 1].
    """

    def __init__(
        self,
        files: Sequence[Path],
        labels: Sequence[int],
        *,
        size: tuple[int, int],
        mean: Sequence[float],
        deviation: Sequence[float],
    ) -> None:
        self._files = list(files)
        self._labels = list(labels)
        self._bucket = Bucket(*size)
        self._mean = np.asarray(mean, dtype=np.float32)[:, None, None]
        self._deviation = np.asarray(deviation, dtype=np.float32)[:, None, None]
        marks = (identity_of(self._files), self._labels, size, tuple(mean), tuple(deviation))
        self.digest = hashlib.blake2b(repr(marks).encode(), digest_size=20).hexdigest()

    def __len__(self) -> int:
        return len(self._files)

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        """Return ``pixel_values`` [3, height, width] and ``labels``; ``epoch`` changes nothing."""
        grey: NDArray[np.float32] = np.asarray(read_still(self._files[index], self._bucket), dtype=np.float32)
        values = (grey.transpose(2, 0, 1) / 255.0 - self._mean) / self._deviation
        return {"pixel_values": values, "labels": np.int64(self._labels[index])}


def open_labelled(
    data: Data, spec: ModelSpec, batch_spec: Mapping[str, TensorSpec], *, part: str, holdout: float
) -> LabelledPictures:
    """Return the pictures of one part (``train``, ``held_out``, ``all``).

    Folders below ``data.path`` are classes, numbered by ``data.options.labels`` or alphabetically. Mean and
    deviation are those of the model's ``preprocessor_config.json``, else 0.5.

    Raises:
        ConfigError: The folder is missing, has no classes or no pictures, or more classes than the model.
    """
    root = Path(path_of(data)).expanduser()
    if not root.is_dir():
        raise ConfigError(
            f"data.path {root} is not a folder", help="name the folder that holds one folder per class"
        )
    names = sorted(
        place.name for place in root.iterdir() if place.is_dir() and not place.name.startswith(".")
    )
    order = [str(name) for name in data.options.get("labels", names)]
    if strange := sorted(set(names) ^ set(order)):
        raise ConfigError(
            f"data.options.labels and the folders of {root} differ in {strange[0]}",
            help=f"the folders are {', '.join(names)}",
        )
    labelled = [
        (file, number)
        for number, name in enumerate(order)
        for file in sorted((root / name).rglob("*"))
        if file.suffix.lower() in STILLS and file.is_file()
    ]
    if not labelled:
        raise ConfigError(
            f"data.path {root} contains no images in folders ({', '.join(STILLS)})",
            help="put the images of each class in a folder named after the class",
        )
    known = batch_spec["labels"].high
    if known is not None and len(order) > known:
        raise ConfigError(
            f"data.path {root} has {len(order)} classes, {spec.reference.id} predicts {known}",
            help=f"set model.overrides.num_labels: {len(order)}",
        )
    if part != "all" and holdout > 0.0:
        hidden = part == "held_out"
        labelled = [
            item for item in labelled if held_out(item[0].relative_to(root).as_posix(), holdout) == hidden
        ]
        if not labelled:
            raise ConfigError(
                f"evaluation.holdout {holdout} of the images in {root} leaves none to "
                f"{'evaluate on' if hidden else 'train on'}",
                help="choose another share, or give evaluation.data",
            )
    height, width = batch_spec["pixel_values"].shape[-2:]
    mean, deviation = _normalisation(spec)
    files, labels = zip(*labelled, strict=True)
    return LabelledPictures(files, labels, size=(height, width), mean=mean, deviation=deviation)


def _normalisation(spec: ModelSpec) -> tuple[Sequence[float], Sequence[float]]:
    file = Path(spec.folder or "", "preprocessor_config.json")
    if not spec.folder or not file.is_file():
        return _HALF, _HALF
    try:
        config = read_json(file)
        return config.get("image_mean", _HALF), config.get("image_std", _HALF)
    except (UnreadableError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", help="repair or remove it") from error
