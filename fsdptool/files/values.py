"""JSON and YAML values that somebody else may have written, within bounds, and the schemas they follow."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.text import UnreadableError, exists, read_bytes, read_source
from fsdptool.files.tree import DEPTH_LIMIT, Node, ParseError, effective_entries
from fsdptool.files.yaml_tree import parse_yaml
from fsdptool.spelling import nearest

JSON_LIMIT = 64 << 20
"""Bytes of the largest document that is read: a plan with long timelines has some megabytes."""

DIGITS_LIMIT = 308
_BITS_LIMIT = 1023
"""Larger integers cannot become floats."""

_TOO_DEEP = f"nested deeper than {DEPTH_LIMIT} levels"
_TOO_LONG = f"a number has more than {DIGITS_LIMIT} digits"
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SCIENTIFIC = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+")


def read_json(path: Path, *, limit: int = JSON_LIMIT) -> Any:
    """Return the value of a JSON document that somebody else may have written.

    Raises:
        UnreadableError: As :func:`fsdptool.files.text.read_bytes`, or it is not JSON as :func:`load_json`
            takes it.
    """
    try:
        return load_json(read_bytes(path, limit=limit).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UnreadableError("FSD103", f"the file is not UTF-8 (offset {error.start})") from error
    except ValueError as error:
        raise UnreadableError("FSD104", f"not valid JSON: {error}") from error


def read_own_json(path: Path, folder_kind: str = "run folder") -> Any:
    """Return the JSON document that a folder of ours holds.

    Args:
        path: The file.
        folder_kind: What the folder is not if the file is missing.

    Raises:
        ConfigError: It is missing, unreadable or no JSON; the message is one line.
    """
    if not exists(path):
        raise ConfigError(
            f"{path.parent} is not a {folder_kind}: {path.name} is missing",
            help="use a folder that `fsdptool train` wrote",
        )
    try:
        return read_json(path)
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error.message}") from error


def load_json(text: str) -> Any:
    """Return a JSON value that any code of ours can walk, compute with and write again.

    Raises:
        ValueError: It is not JSON, is nested deeper than ``DEPTH_LIMIT`` levels, holds a number of more
            than ``DIGITS_LIMIT`` digits or half of a surrogate pair; the message is one line.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} (line {error.lineno}, column {error.colno})") from None
    except ValueError:  # Python's own limit, whose message is for programmers
        raise ValueError(_TOO_LONG) from None
    _check_values(value)
    if _ESCAPED_SURROGATE.search(text) is not None:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("a string holds half of a surrogate pair") from None
    return value


RECORD_LIMIT = 1 << 20
"""Bytes of one line of a log of records; a traceback has some thousand."""


def load_record(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object on a line that somebody else may have written; None if it is damaged."""
    if len(line) > RECORD_LIMIT:
        return None
    try:
        value = load_json(line.decode("utf-8", errors="replace"))
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def number(value: object) -> float | None:
    """Return a number that somebody else may have written, or None: no truth value, none beyond float32."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST:
        return value
    return None


_LARGEST = 3.5e38
"""Figures of a run are smaller; sums and products of some of these are still finite."""


def count(value: object) -> int | None:
    """Return a number of things or of bytes that somebody else may have written, or None."""
    return value if type(value) is int and 0 <= value < 1 << 53 else None


def moment(value: object) -> float | None:
    """Return a time in seconds since 1970 that somebody else may have written, or None."""
    found = number(value)
    return found if found is not None and 0 <= found < _LAST_MOMENT else None


_LAST_MOMENT = 1e11
"""In the year 5138; what calendars can show ends some thousand years later."""


def _check_values(root: Any) -> None:
    """Refuse what is too deep to recurse over or too large to compute with, without recursing over it."""
    level = [root]
    for _ in range(DEPTH_LIMIT + 1):
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                below.extend(value.values())
            elif isinstance(value, list):
                below.extend(value)
            elif isinstance(value, int) and value.bit_length() > _BITS_LIMIT:
                raise ValueError(_TOO_LONG)
        if not below:
            return
        level = below
    raise ValueError(_TOO_DEEP)


def read_yaml(path: Path) -> Any:
    """Return the value of a YAML file that somebody else may have written.

    Raises:
        UnreadableError: It cannot be read, is not YAML, or is nested or repeated beyond what a
            configuration needs.
    """
    source = read_source(path)
    try:
        root = parse_yaml(source.text).root
    except ParseError as error:
        line = f" (line {source.place(error.index)[0]})" if error.index is not None else ""
        raise UnreadableError(
            error.code, f"{error.message.replace('not YAML', 'not valid YAML')}{line}"
        ) from error
    value = None if root is None else _plain(root)
    try:
        _check_values(value)
    except ValueError as error:
        raise UnreadableError("FSD104", f"not valid YAML: {error}") from None
    return value


def _plain(node: Node) -> Any:
    """Return a YAML node's value with numbers as people write them: YAML 1.1 takes ``1.0e13`` for text."""
    if node.error is not None:
        raise UnreadableError("FSD104", f"not valid YAML: {node.error}")
    if node.kind == "map":
        entries = effective_entries(node)
        if other := next((entry.key for entry in entries if not isinstance(entry.key, str)), None):
            raise UnreadableError("FSD104", f"not valid YAML: the key {other!r} is not text")
        return {entry.key: _plain(entry.node) for entry in entries}
    if node.kind == "list":
        return [_plain(item) for item in node.items]
    if isinstance(node.value, str) and not node.style and _SCIENTIFIC.fullmatch(node.value):
        return float(node.value)
    return node.value


_SUFFIX = ".schema.json"
PACKED = ".gz"
"""What a wheel appends to the names of what it compresses."""


@cache
def _schemas() -> dict[str, Any] | Path:
    """Return the schemas by name, which a wheel holds in one file, or a checkout's folder of them."""
    package = Path(__file__).parent.parent
    if (package / f"schemas.json{PACKED}").is_file():
        schemas: dict[str, Any] = read_data(package / "schemas.json")
        return schemas
    folder = package.parent / "schemas"
    if any(folder.glob(f"*{_SUFFIX}")):
        return folder
    raise FsdptoolError("the JSON Schemas are missing from this installation", help="reinstall fsdptool")


def schema_names() -> list[str]:
    """Return the names of all schemas, sorted, without their suffix."""
    schemas = _schemas()
    if isinstance(schemas, Path):
        return sorted(path.name.removesuffix(_SUFFIX) for path in schemas.glob(f"*{_SUFFIX}"))
    return sorted(schemas)


@cache
def load_schema(name: str) -> dict[str, Any]:
    """Return the schema called ``name`` (``detect``, ``plan``, ``recipe``, ...) as parsed JSON.

    Raises:
        FsdptoolError: The schema does not exist; the message lists the schemas.
    """
    if name not in schema_names():
        raise FsdptoolError(f"unknown schema {name!r}", help=f"choose one of: {', '.join(schema_names())}")
    schemas = _schemas()
    loaded: dict[str, Any] = (
        read_data(schemas / f"{name}{_SUFFIX}") if isinstance(schemas, Path) else schemas[name]
    )
    return loaded


def read_data(path: Path) -> Any:
    """Return a JSON document of this package, which a wheel holds compressed (``hatch_build.py``).

    Args:
        path: Where the sources have it.
    """
    packed = path.with_name(f"{path.name}{PACKED}")
    return json.loads(gzip.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes())


def read_object(path: Path, schema: str | None = None) -> dict[str, Any]:
    """Return the object that a YAML or JSON file contains, checked against a schema if one is named.

    Raises:
        ConfigError: The file is missing, not a regular file, too large, not UTF-8, not parseable, not an
            object, or breaks the schema, or a number that the schema takes is not finite; the message names
            the place.
    """
    try:
        data = read_json(path) if path.suffix == ".json" else read_yaml(path)
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error.message}", help="check the path and the file") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected an object at the top, got {type(data).__name__}")
    if schema is not None:
        check(data, schema, where=str(path))
        if place := _not_finite(data):
            raise ConfigError(f"{path}: {place} is not a finite number", help="give a number")
    return data


def _not_finite(data: Any, place: str = "") -> str | None:
    """Return where a document has NaN or an infinity, which a schema takes for numbers."""
    if isinstance(data, float) and not math.isfinite(data):
        return place
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return next(
        (found for key, item in items if (found := _not_finite(item, f"{place}.{key}".strip(".")))), None
    )


def check(data: Any, schema: str, *, where: str) -> None:
    """Check ``data`` against ``schemas/<schema>.schema.json``.

    Raises:
        ConfigError: The violations, by their places in the document.
    """
    import jsonschema

    validator = jsonschema.Draft202012Validator(load_schema(schema))
    errors = sorted(validator.iter_errors(data), key=lambda error: [str(part) for part in error.path])
    advice = f"fsdptool schema {schema} prints the schema of such a file"
    mistakes = [mistake for error in errors[:_SHOWN] for mistake in _mistakes(error, where, advice)]
    if mistakes:
        raise ConfigError(mistakes[0].message, help=mistakes[0].help, others=tuple(mistakes[1:]))


_SHOWN = 10
"""Violations of a schema that are reported: a file of another kind breaks every rule."""


def _mistakes(error: Any, where: str, advice: str) -> Iterator[ConfigError]:
    """Yield a violation in the words of a person: unknown keys with the nearest known one."""
    path = error.absolute_path
    place = ": ".join((where, *([".".join(map(str, path))] if path else ())))
    if error.validator == "anyOf" and (inner := _of_same_type(error)):
        for mistake in inner:
            yield from _mistakes(mistake, where, advice)
    elif error.validator == "additionalProperties" and isinstance(error.validator_value, bool):
        known = error.schema.get("properties", {})
        for key in error.instance:
            if key not in known:
                near = nearest(key, known, cutoff=0.6)
                yield ConfigError(
                    f"{place}: unknown key {key!r}", help=f"did you mean {near}?" if near else advice
                )
    elif error.validator == "required":
        missing = re.match(r"'(.+)' is a required property", error.message)
        yield ConfigError(
            f"{place}: {missing[1]} is missing" if missing else f"{place}: {error.message}", help=advice
        )
    else:
        yield ConfigError(f"{place}: {error.message}", help=advice)


def _of_same_type(error: Any) -> list[Any]:
    """Return the violations of the alternative whose type a value has; none unless it is exactly one."""
    wrong_type = {item.schema_path[0] for item in error.context if item.validator == "type" and not item.path}
    fits = {item.schema_path[0] for item in error.context} - wrong_type
    return [item for item in error.context if item.schema_path[0] in fits] if len(fits) == 1 else []
