"""Prepare what ``emit-config`` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def emit(
    progress: Callable[[str], None],
    *,
    plan: Mapping[str, Any] | None = None,
    plan_file: str | None = None,
    candidate: str | None = None,
    options: Mapping[str, Any] | None = None,
    stamps: object = None,
) -> dict[str, Any]:
    """Return the document of ``emit-config``, and the recipe of a plan as text.

    Args:
        progress: Takes texts of progress.
        plan: Document of a plan.
        plan_file: Absolute path of such a document instead.
        candidate: Candidate of the plan; None takes the chosen one.
        options: For a model or a preset: the keyword arguments of ``prepare_emission``.
        stamps: State of the files that are named, so that a changed file is another question.
    """
    from fsdptool.api.emit_config import prepare_emission
    from fsdptool.config.recipe_writer import dump_recipe
    from fsdptool.planning.plan import plan_from, read_plan

    progress("choosing the wrap classes")
    if plan_file is not None:
        emission = prepare_emission(plan=read_plan(Path(plan_file)), candidate=candidate)
    elif plan is not None:
        emission = prepare_emission(plan=plan_from(plan, where="the plan"), candidate=candidate)
    else:
        emission = prepare_emission(**(options or {}))
    planned = plan is not None or plan_file is not None
    recipe = dump_recipe(emission.recipe) if planned and emission.recipe is not None else None
    return {"document": emission.document(emission.text(), None), "recipe": recipe}
