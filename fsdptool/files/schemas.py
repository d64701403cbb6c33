"""Finds the JSON Schemas, in an installed wheel and in a source checkout alike."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from fsdptool.errors import FsdptoolError

_SUFFIX = ".schema.json"


@cache
def schema_folder() -> Path:
    """Return the folder that holds ``*.schema.json``.

    A wheel carries it inside the package; an editable install and a checkout have it
    beside the package.
    """
    package = Path(__file__).parent.parent
    for candidate in (package / "schemas", package.parent / "schemas"):
        if any(candidate.glob(f"*{_SUFFIX}")):
            return candidate
    raise FsdptoolError("the JSON Schemas are missing from this installation", help="reinstall fsdptool")


def schema_names() -> list[str]:
    """Return the names of all schemas, sorted, without their suffix."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in schema_folder().glob(f"*{_SUFFIX}"))


@cache
def load_schema(name: str) -> dict[str, Any]:
    """Return the schema called ``name`` (``detect``, ``plan``, ``recipe``, ...) as parsed JSON.

    Raises:
        FsdptoolError: There is no such schema; the message lists those there are.
    """
    path = schema_folder() / f"{name}{_SUFFIX}"
    if not path.is_file():
        raise FsdptoolError(
            f"there is no schema called {name!r}", help=f"choose one of: {', '.join(schema_names())}"
        )
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded
