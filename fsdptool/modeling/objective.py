"""Which objective a recipe means, and whether a teacher's is the same."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_of
from fsdptool.spelling import nearest

if TYPE_CHECKING:
    from fsdptool.families.protocol import Objective
    from fsdptool.records.model import ModelSpec
    from fsdptool.records.recipe import Recipe


def objective_for(recipe: Recipe, spec: ModelSpec) -> Objective:
    """Return the objective the recipe names, or the family's default for this model.

    Raises:
        ConfigError: The family does not train under it, or it has no such option.
    """
    family = family_of(spec)
    known = family.objectives()
    name = recipe.objective.name or _default(spec)
    if name not in known:
        near = nearest(name, list(known))
        raise ConfigError(
            f"family {family.name} has no objective {name!r}",
            help=f"did you mean {near}?" if near else f"it has: {', '.join(sorted(known))}",
        )
    options = dict(recipe.objective.options)
    taken = inspect.signature(known[name]).parameters
    # Those that are code, and not values, are the family's.
    offered = [
        key for key, item in taken.items() if item.kind is not item.VAR_KEYWORD and not callable(item.default)
    ]
    further = any(item.kind is item.VAR_KEYWORD for item in taken.values())
    for option in options:
        if option not in offered and (option in taken or not further):
            raise _unknown(name, option, offered)
    try:
        return known[name](**options)
    except TypeError as error:
        raise ConfigError(f"objective {name}: {error}", help="check objective.options") from error


def _unknown(name: str, option: str, offered: list[str]) -> ConfigError:
    near = nearest(option, offered)
    return ConfigError(
        f"objective {name} has no option {option!r}",
        help=f"did you mean {near}?" if near else f"it has: {', '.join(offered) or 'none'}",
    )


def check_teacher(student: ModelSpec, teacher: ModelSpec) -> None:
    """Refuse a teacher that was made for something else than its student.

    An encoder sees the token that a decoder is to predict, and their logits may well have one shape.

    Raises:
        ConfigError: Their families train them under different objectives.
    """
    wanted, found = _default(student), _default(teacher)
    if wanted != found:
        raise ConfigError(
            f"the teacher {teacher.reference.id} is a model for {found}, the student one for {wanted}",
            help="choose a teacher of the student's kind",
        )


def _default(spec: ModelSpec) -> str:
    return spec.objective or family_of(spec).objective_for(spec.config)
