"""Small tools for options: what was given, and which choice a word spells."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from fsdptool.errors import PlanError

R = TypeVar("R")


def given(record: R, **values: Any) -> R:
    """Return ``record`` with the values that are not None."""
    changed = {name: value for name, value in values.items() if value is not None}
    return replace(record, **changed) if changed else record  # type: ignore[type-var]


def choice(name: str, value: str | None, choices: tuple[str, ...]) -> Any:
    """Return what :func:`one_of` returns; None stays None.

    Raises:
        PlanError: The value is none of the choices.
    """
    return None if value is None else one_of(name, value, choices)


def one_of(name: str, value: str, choices: tuple[str, ...]) -> Any:
    """Return the choice ``value`` spells, forgiving case and dashes.

    Raises:
        PlanError: It is none of them.
    """
    spelled = {choice.replace("-", "_").lower(): choice for choice in choices}
    found = spelled.get(value.replace("-", "_").lower())
    if found is None:
        raise PlanError(f"{name} {value!r} is not known", help=f"choose one of: {', '.join(choices)}")
    return found
