"""Where a recipe's relative paths point."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fsdptool.records.recipe import Data, Recipe


def with_places(recipe: Recipe, recipe_path: Path) -> Recipe:
    """Return the recipe with data paths that are found wherever a worker starts.

    A relative path counts from the working directory, then from the recipe's folder, as the model's
    does. Names that are no path (``pydoc``, hub ids, ``bytes``) stay.
    """
    evaluation = recipe.evaluation
    if evaluation.data is not None:
        evaluation = dataclasses.replace(evaluation, data=_placed(evaluation.data, recipe_path.parent))
    return dataclasses.replace(recipe, data=_placed(recipe.data, recipe_path.parent), evaluation=evaluation)


def _placed(data: Data, beside: Path) -> Data:
    options = dict(data.options)
    for name in ("pipeline", "latents"):
        if name in options:
            options[name] = _place(options[name], beside)
    path = data.path if data.source == "text" and data.path == "pydoc" else _place(data.path, beside)
    return dataclasses.replace(data, path=path, tokenizer=_place(data.tokenizer, beside), options=options)


def _place(text: Any, beside: Path) -> Any:
    if not isinstance(text, str):
        return text
    for candidate in (Path(text).expanduser(), beside / text):
        if candidate.exists():
            return str(candidate.absolute())
    return text
