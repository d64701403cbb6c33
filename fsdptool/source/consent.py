"""Whose word lets a model's own code run: the command line's or the call's, never a file's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fsdptool.errors import ConfigError
from fsdptool.records.model import ModelSpec
from fsdptool.records.recipe import Recipe

FLAG = "--trust-remote-code"


def consented(recipe: Recipe, where: str | Path, *, trust_remote_code: bool) -> Recipe:
    """Return a recipe whose models may run their own code if, and only if, the caller agreed to it.

    Args:
        recipe: From a file: a recipe, a plan, a run folder.
        where: The file or folder, for the message.
        trust_remote_code: What this command line or this call says.

    Raises:
        ConfigError: The file asks for it and the caller did not.
    """
    teacher = recipe.method.distillation.teacher if recipe.method.distillation is not None else None
    for choice in (recipe.model, teacher):
        if choice is not None and choice.trust_remote_code and not trust_remote_code:
            raise _refusal(where, choice.reference)
    if not trust_remote_code:
        return recipe
    return replace(recipe, model=replace(recipe.model, trust_remote_code=True))


def check_consent(spec: ModelSpec | None, where: str | Path, *, trust_remote_code: bool) -> None:
    """Refuse a resolved model from a file that asks to run its own code without the caller's agreement.

    Raises:
        ConfigError: As :func:`consented`.
    """
    if spec is not None and spec.trust_remote_code and not trust_remote_code:
        raise _refusal(where, spec.folder or spec.reference.id)


def _refusal(where: str | Path, model: str) -> ConfigError:
    return ConfigError(
        f"{where} asks to run the code that comes with the model {model}",
        help=f"read that code, then give {FLAG} (in Python: trust_remote_code=True) to run it",
    )
