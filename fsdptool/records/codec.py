"""Frozen dataclasses to JSON and back, by their annotations.

Tuples become arrays, mappings objects, nested records objects. The way back refuses unknown
and missing fields by name, so a hand-edited document fails with one clear line.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fsdptool.errors import ConfigError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Return ``value`` as plain JSON data (dict, list, str, int, float, bool, None).

    A field called ``class_`` is the key ``class``: the underscore only keeps Python's keyword apart.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key_of(f): to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


def key_of(field: dataclasses.Field[Any]) -> str:
    """Return the JSON key of a record's field."""
    return field.name.rstrip("_")


def from_json(record: type[T], data: Any, *, where: str = "") -> T:
    """Build ``record`` from JSON data.

    Args:
        record: A frozen dataclass.
        data: What :func:`to_json` returned.
        where: Path of ``data`` in its document, for messages.

    Raises:
        ConfigError: A field is unknown, missing or of the wrong type; the message names it.
    """
    result = _convert(record, data, where or record.__name__)
    return result  # type: ignore[no-any-return]


@cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def _build(record: type, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: expected an object, got {type(data).__name__}")
    fields = {key_of(f): f for f in dataclasses.fields(record)}
    if unknown := sorted(set(data) - set(fields)):
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}")
    required = [
        name
        for name, f in fields.items()
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    ]
    if missing := [name for name in required if name not in data]:
        raise ConfigError(f"{where}: missing field {missing[0]!r}")
    hints = _hints(record)
    values = {
        field.name: _convert(hints[field.name], data[key], f"{where}.{key}")
        for key, field in fields.items()
        if key in data
    }
    return record(**values)


def _convert(hint: Any, data: Any, where: str) -> Any:
    origin = get_origin(hint)
    if hint is Any:
        return data
    if origin in (Union, types.UnionType):
        return _convert_union(hint, data, where)
    if origin is Literal:
        if data not in get_args(hint):
            raise ConfigError(f"{where}: {data!r} is not one of {', '.join(map(repr, get_args(hint)))}")
        return data
    if origin is tuple:
        return _convert_tuple(hint, data, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where}: expected an object, got {type(data).__name__}")
        item_hint = get_args(hint)[1] if get_args(hint) else Any
        return {key: _convert(item_hint, item, f"{where}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(hint):
        return _build(hint, data, where)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _convert_enum(hint, data, where)
    return _convert_scalar(hint, data, where)


def _convert_union(hint: Any, data: Any, where: str) -> Any:
    options = get_args(hint)
    if data is None and type(None) in options:
        return None
    failures = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _convert(option, data, where)
        except ConfigError as error:
            failures.append(error)
    raise failures[0]


def _convert_enum(hint: type[Enum], data: Any, where: str) -> Enum:
    values = [member.value for member in hint]
    if data not in values:
        raise ConfigError(f"{where}: {data!r} is not one of {', '.join(map(repr, values))}")
    return hint(data)


def _convert_tuple(hint: Any, data: Any, where: str) -> Any:
    if not isinstance(data, list | tuple):
        raise ConfigError(f"{where}: expected a list, got {type(data).__name__}")
    items = get_args(hint)
    if len(items) == 2 and items[1] is Ellipsis:
        if items[0] in (int, str) and all(type(item) is items[0] for item in data):
            return tuple(data)  # a trace holds a hundred thousand of them
        return tuple(_convert(items[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if len(items) != len(data):
        raise ConfigError(f"{where}: expected {len(items)} items, got {len(data)}")
    return tuple(
        _convert(h, item, f"{where}[{i}]") for i, (h, item) in enumerate(zip(items, data, strict=True))
    )


def _convert_scalar(hint: Any, data: Any, where: str) -> Any:
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, hint) or (hint in (int, float) and isinstance(data, bool)):
        raise ConfigError(f"{where}: expected {hint.__name__}, got {type(data).__name__} {data!r}")
    return data
