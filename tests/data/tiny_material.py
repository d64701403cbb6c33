"""Pictures and clips with captions, and the recipes that train on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fsdptool.records.codec import from_json
from fsdptool.records.recipe import Recipe


def pictures(folder: Path, sizes: list[tuple[int, int]]) -> Path:
    """Write images of (height, width) with captions beside them."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number, (height, width) in enumerate(sizes):
        noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(noise)
        image.save(folder / f"{number:03d}.png")
        word = ("cat", "dog", "mat", "sky")[number % 4]
        (folder / f"{number:03d}.txt").write_text(f"a red {word}\n", encoding="utf-8")
    return folder


def clips(folder: Path, count: int, frames: int, size: tuple[int, int], *, stills: bool = False) -> Path:
    """Write clips: every other one a GIF, the rest folders of stills; or stills alone."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 256, (frames, *size, 3), dtype=np.uint8)
        pictures = [Image.fromarray(frame) for frame in noise]
        if number % 2 and not stills:
            pictures[0].save(folder / f"{number}.gif", save_all=True, append_images=pictures[1:])
        else:
            (folder / str(number)).mkdir()
            for frame, still in enumerate(pictures):
                still.save(folder / str(number) / f"{frame:03d}.png")
        (folder / f"{number}.txt").write_text("the blue sky\n", encoding="utf-8")
    return folder


def recipe_of(
    pipeline: Path,
    images: Path,
    *,
    micro: int = 2,
    size: tuple[int, int] = (64, 64),
    frames: int | None = None,
    length: int = 16,
    objective: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
    seed: int = 0,
    global_batch: int | None = None,
    **options: Any,
) -> Recipe:
    """Return a recipe that trains a pipeline's denoiser on pictures."""
    document = {
        "model": {"reference": str(pipeline)},
        "objective": {"options": objective or {}},
        "data": {"source": "images", "path": str(images), "options": {"pipeline": str(pipeline), **options}},
        "batch": {
            "micro_batch": micro,
            "height": size[0],
            "width": size[1],
            "frames": frames,
            "sequence_length": length,
            "global_batch": global_batch,
        },
        "evaluation": evaluation or {},
        "seed": seed,
    }
    return from_json(Recipe, document)
