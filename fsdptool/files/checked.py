"""Reads the YAML and JSON files planning accepts, checked against their schemas, with one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdptool.errors import PlanError
from fsdptool.files.schemas import load_schema


def read_checked(path: Path, schema: str) -> dict[str, Any]:
    """Return the object in ``path`` (YAML or JSON) after checking it against a schema.

    Raises:
        PlanError: The file is missing, unreadable or breaks the schema; the message names the place.
    """
    data = read_data(path)
    check(data, schema, where=str(path))
    return data


def read_data(path: Path) -> dict[str, Any]:
    """Return the object a YAML or JSON file holds.

    Raises:
        PlanError: It is missing, not UTF-8, not parseable or not an object.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not UTF-8 text", help="save it as UTF-8") from error
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror or error}", help="check the path") from error
    try:
        data = json.loads(text) if path.suffix == ".json" else _load_yaml(text)
    except (json.JSONDecodeError, yaml.YAMLError, RecursionError) as error:
        line = " ".join(str(error).split())
        raise PlanError(f"{path} is not valid {path.suffix.lstrip('.') or 'YAML'}: {line}") from error
    if not isinstance(data, dict):
        raise PlanError(f"{path}: expected an object at the top, got {type(data).__name__}")
    return data


def _load_yaml(text: str) -> Any:
    """Read YAML with numbers as people write them: PyYAML (YAML 1.1) takes ``1.0e13`` for text."""
    import re

    import yaml

    class Loader(yaml.SafeLoader):
        pass

    number = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+.0123456789"))
    return yaml.load(text, Loader=Loader)


def check(data: Any, schema: str, *, where: str) -> None:
    """Check ``data`` against ``schemas/<schema>.schema.json``.

    Raises:
        PlanError: The first violation, by its place in the document.
    """
    import jsonschema

    validator = jsonschema.Draft202012Validator(load_schema(schema))
    errors = sorted(validator.iter_errors(data), key=lambda error: [str(part) for part in error.path])
    if errors:
        place = ".".join(str(part) for part in errors[0].path) or "the top"
        raise PlanError(
            f"{where}: {place}: {errors[0].message}",
            help=f"fsdptool schema {schema} prints what such a file may hold",
        )
