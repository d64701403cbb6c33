"""Relative paths in recipes: where they are looked up, and how they are written into another folder.

A recipe's relative path is looked up in the folder of the recipe, so that the recipe means the same wherever
it is started from, and then in the working directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fsdptool.files.text import exists
from fsdptool.records.recipe import Data, ModelChoice, Recipe
from fsdptool.source.files import expanded

Change = Callable[[str], str]

_PATH_OPTIONS = ("pipeline", "latents")
"""Options of ``data`` that may name a folder."""


def locate(text: str, folder: Path | None) -> str:
    """Return a path that a file in ``folder`` names: as found in that folder, else as it is written.

    Texts that are not paths (``llama3:8b``, a Hub id) stay.
    """
    if folder is None or folder == Path() or not text or not exists(folder / expanded(text)):
        return text
    return str(folder / expanded(text))


def located(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe of ``folder`` with paths that work from the working directory."""
    return _change_data(
        _change_models(recipe, lambda text: locate(text, folder)), lambda t: locate(t, folder)
    )


def with_places(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe of ``folder`` with absolute paths of data, which a worker finds wherever it starts."""

    def absolute(text: str) -> str:
        place = expanded(locate(text, folder))
        return str(place.absolute()) if text and exists(place) else text

    return _change_data(recipe, absolute)


def rebased(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe whose paths work from the working directory as it is to be written into ``folder``.

    Absolute paths and texts that are not paths of anything that exists stay.
    """
    home = os.path.realpath(folder)
    if home == os.path.realpath("."):
        return recipe

    def relative(text: str) -> str:
        if not text or expanded(text).is_absolute() or not exists(Path(text)):
            return text
        path = os.path.relpath(text, home)
        # A model's name without a separator could be read as something other than a path.
        return path if path.startswith(os.pardir) else f"./{path}"

    return _change_data(_change_models(recipe, relative), relative)


def _change_models(recipe: Recipe, change: Change) -> Recipe:
    def changed(model: ModelChoice) -> ModelChoice:
        return replace(model, reference=change(model.reference))

    distillation = recipe.method.distillation
    if distillation is not None:
        distillation = replace(distillation, teacher=changed(distillation.teacher))
        recipe = replace(recipe, method=replace(recipe.method, distillation=distillation))
    return replace(recipe, model=changed(recipe.model))


def _change_data(recipe: Recipe, change: Change) -> Recipe:
    def changed(data: Data) -> Data:
        options = {
            name: change(value) if name in _PATH_OPTIONS and isinstance(value, str) else value
            for name, value in data.options.items()
        }
        bundled = data.source == "text" and data.path == "pydoc"
        return replace(
            data,
            path=data.path if data.path is None or bundled else change(data.path),
            tokenizer=data.tokenizer if data.tokenizer in ("auto", "bytes") else change(data.tokenizer),
            options=options,
        )

    evaluation = recipe.evaluation
    if evaluation.data is not None:
        evaluation = replace(evaluation, data=changed(evaluation.data))
    return replace(recipe, data=changed(recipe.data), evaluation=evaluation)
