"""The JSON Schemas, in an installed wheel and in a source checkout alike, and the files they check."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError, FsdptoolError

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
        FsdptoolError: The schema does not exist; the message lists the schemas.
    """
    path = schema_folder() / f"{name}{_SUFFIX}"
    if not path.is_file():
        raise FsdptoolError(f"unknown schema {name!r}", help=f"choose one of: {', '.join(schema_names())}")
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded


def read_object(path: Path, schema: str | None = None) -> dict[str, Any]:
    """Return the object that a YAML or JSON file contains, checked against a schema if one is named.

    Raises:
        ConfigError: The file is missing, not a regular file, too large, not UTF-8, not parseable, not an
            object, or breaks the schema; the message names the place.
    """
    from fsdptool.files.text import UnreadableError
    from fsdptool.files.values import read_json, read_yaml

    try:
        data = read_json(path) if path.suffix == ".json" else read_yaml(path)
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error.message}", help="check the path and the file") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected an object at the top, got {type(data).__name__}")
    if schema is not None:
        check(data, schema, where=str(path))
    return data


def check(data: Any, schema: str, *, where: str) -> None:
    """Check ``data`` against ``schemas/<schema>.schema.json``.

    Raises:
        ConfigError: The first violation, by its place in the document.
    """
    import jsonschema

    validator = jsonschema.Draft202012Validator(load_schema(schema))
    errors = sorted(validator.iter_errors(data), key=lambda error: [str(part) for part in error.path])
    if errors:
        place = ".".join(str(part) for part in errors[0].path) or "the top"
        raise ConfigError(
            f"{where}: {place}: {errors[0].message}",
            help=f"fsdptool schema {schema} prints the schema of such a file",
        )
