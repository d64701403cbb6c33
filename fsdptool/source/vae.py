"""What the VAE beside a denoiser says of itself, in the folder of their pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdptool.files.text import UnreadableError
from fsdptool.files.values import read_json
from fsdptool.records.anatomy import ModelSpec

_LEVELS = {
    "AutoencoderKL": ("block_out_channels", 1),
    "AutoencoderKLFlux2": ("block_out_channels", 2),
    "AutoencoderDC": ("encoder_block_out_channels", 1),
}
"""The key with an entry per level, and the latents that the pipeline folds into one, each way."""
_MOST_LEVELS = 10


def pixels_per_latent(spec: ModelSpec) -> int | None:
    """Return how many pixels the VAE of a denoiser's pipeline makes one latent of, each way.

    None: the model does not lie in a pipeline's folder, or the VAE is of another class or cannot be read.
    """
    if spec.library != "diffusers" or spec.folder is None:
        return None
    folder = Path(spec.folder).parent
    return vae_factor(folder) if (folder / "model_index.json").is_file() else None


def vae_factor(pipeline: Path) -> int | None:
    """Return the pixels per latent, each way, of the VAE in a pipeline's folder; None if that is unknown.

    Every level but the last halves the sides: ``vae_scale_factor`` of the pipelines (diffusers 0.42.1).
    """
    file = pipeline / "vae" / "config.json"
    try:
        stat = file.stat()
    except OSError:
        return None
    return _factor(file, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _factor(file: Path, _changed: int, _size: int) -> int | None:
    # Asked for every micro-batch, so a file is read once while it stays as it is.
    try:
        config: Any = read_json(file)
    except (OSError, UnreadableError):
        return None
    name = config.get("_class_name") if isinstance(config, Mapping) else None
    key, folded = _LEVELS.get(name, ("", 1)) if isinstance(name, str) else ("", 1)
    levels = config.get(key) if key else None
    if not isinstance(levels, list) or not 1 <= len(levels) <= _MOST_LEVELS:
        return None
    factor: int = 2 ** (len(levels) - 1) * folded
    return factor
