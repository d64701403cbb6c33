"""Prepare what ``emit-config`` writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast


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

    Where nothing fits, ``unfit`` is the plan instead: nobody has chosen what to write.

    Args:
        progress: Takes texts of progress.
        plan: Document of a plan.
        plan_file: Absolute path of such a document instead.
        candidate: Candidate of the plan; None takes the chosen one.
        options: For a model or a preset: the keyword arguments of ``prepare_emission``.
        stamps: State of the files that are named, so that a changed file is another question.
    """
    from fsdptool.api.emit_config import prepare_emission
    from fsdptool.api.options import EmissionOptions
    from fsdptool.config.recipe import dump_recipe
    from fsdptool.planning.plan import plan_from, read_plan
    from fsdptool.records.codec import to_json

    progress("choosing the wrap classes")
    planned = None
    if plan_file is not None:
        planned = read_plan(Path(plan_file))
    elif plan is not None:
        planned = plan_from(plan, where="the plan")
    if planned is None:
        emission = prepare_emission(cast("EmissionOptions", options or {}))
    elif planned.chosen is None and candidate is None:
        return {"unfit": to_json(planned)}
    else:
        emission = prepare_emission(EmissionOptions(plan=planned, candidate=candidate))
    recipe = dump_recipe(emission.recipe) if planned is not None and emission.recipe is not None else None
    return {"document": emission.document(emission.text(), None), "recipe": recipe}
