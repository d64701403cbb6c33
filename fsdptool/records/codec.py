"""Frozen dataclasses to JSON and back, by their annotations.

Tuples become arrays, mappings objects, nested records objects. The way back refuses unknown
and missing fields by name, so a hand-edited document fails with one clear line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any, TypeVar, cast

from fsdptool.errors import ConfigError
from fsdptool.records.annotations import Annotation, Kind, Shape, fields_of, key_of

T = TypeVar("T")

_PLAIN = frozenset((str, int, float, bool, type(None)))


def to_json(value: Any) -> Any:
    """Return ``value`` as plain JSON data (dict, list, str, int, float, bool, None).

    A field called ``class_`` is the key ``class``: the underscore only keeps Python's keyword apart.
    """
    kind: type = type(value)
    if kind in _PLAIN:
        return value
    if kind in (tuple, list):
        # A trace has a million numbers: no call for each.
        return [item if type(item) in _PLAIN else to_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key: to_json(getattr(value, name)) for key, name in _keys(kind)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


@cache
def _keys(record: type) -> tuple[tuple[str, str], ...]:
    return tuple((key_of(field), field.name) for field in dataclasses.fields(record))


def from_json(record: type[T], data: Any, *, where: str = "") -> T:
    """Build ``record`` from JSON data.

    Args:
        record: A frozen dataclass, or a ``TypedDict``.
        data: What :func:`to_json` returned.
        where: Path of ``data`` in its document, for messages.

    Raises:
        ConfigError: A field is unknown, missing or of the wrong type; the message names it.
    """
    result = _record(cast("Any", record))(data, (where or record.__name__,))
    return result  # type: ignore[no-any-return]


_Path = tuple[Any, ...]
"""Where data lie in a document: a name, or the path of what holds them with a key or an index.

It becomes text in messages only: a trace has a hundred thousand places."""

_Converter = Callable[[Any, _Path], Any]


def _where(path: _Path) -> str:
    if len(path) == 1:
        return str(path[0])
    parent, part = path
    return f"{_where(parent)}[{part}]" if isinstance(part, int) else f"{_where(parent)}.{part}"


def _converter(annotation: Annotation) -> _Converter:
    """Return what makes a value of an annotation of data, raising ConfigError."""
    converters = [_of_kind(kind) for kind in annotation.kinds]
    return (
        converters[0] if len(converters) == 1 and not annotation.optional else _union(annotation, converters)
    )


def _of_kind(kind: Kind) -> _Converter:
    match kind.shape:
        case Shape.ANY:
            return lambda data, _path: data
        case Shape.CHOICE:
            return _one_of(kind.choices)
        case Shape.LIST | Shape.TUPLE:
            return _items(kind)
        case Shape.MAPPING:
            return _mapping(kind.items[1])
        case Shape.RECORD:
            return _record(kind.type)
        case Shape.SCALAR:
            return _scalar(kind.type)


@cache
def _record(record: type) -> _Converter:
    converters: dict[str, tuple[str, _Converter]] = {}
    required: list[str] = []
    sparse: set[str] = set()

    def convert(data: Any, path: _Path) -> Any:
        if not isinstance(data, Mapping):
            raise ConfigError(f"{_where(path)}: expected an object, got {type(data).__name__}")
        if not converters:
            # Only now: a record may hold others of its own kind.
            fields = fields_of(record)
            required.extend(key for key, field in fields.items() if field.required)
            sparse.update(key for key, field in fields.items() if field.sparse)
            converters.update({key: (f.name, _converter(f.annotation)) for key, f in fields.items()})
        if unknown := data.keys() - converters.keys():
            raise ConfigError(f"{_where(path)}: unknown field {min(unknown)!r}")
        if missing := [key for key in required if key not in data]:
            raise ConfigError(f"{_where(path)}: missing field {missing[0]!r}")
        values = {}
        for key, item in data.items():
            name, converter = converters[key]
            if item is not None or key not in sparse:
                values[name] = converter(item, (path, key))
        return record(**values)

    return convert


def _mapping(values: Annotation) -> _Converter:
    item = _converter(values)

    def convert(data: Any, path: _Path) -> Any:
        if not isinstance(data, Mapping):
            raise ConfigError(f"{_where(path)}: expected an object, got {type(data).__name__}")
        return {key: item(value, (path, key)) for key, value in data.items()}

    return convert


def _union(annotation: Annotation, converters: Sequence[_Converter]) -> _Converter:
    def convert(data: Any, path: _Path) -> Any:
        if data is None and annotation.optional:
            return None
        failures = []
        for converter in converters:
            try:
                return converter(data, path)
            except ConfigError as error:
                failures.append(error)
        raise failures[0]

    return convert


def _one_of(values: Mapping[Any, Any]) -> _Converter:
    def convert(data: Any, path: _Path) -> Any:
        if not isinstance(data, Hashable) or data not in values:
            known = ", ".join(map(repr, values))
            raise ConfigError(f"{_where(path)}: {data!r} is not one of {known}")
        return values[data]

    return convert


def _items(kind: Kind) -> _Converter:
    repeated = kind.shape is Shape.LIST
    converters = [_converter(item) for item in kind.items]
    plain = {part.type for item in kind.items for part in item.kinds} & {int, str}

    def convert(data: Any, path: _Path) -> Any:
        if not isinstance(data, list | tuple):
            raise ConfigError(f"{_where(path)}: expected a list, got {type(data).__name__}")
        if repeated:
            if plain and {type(item) for item in data} <= plain:
                return tuple(data)  # a trace holds a hundred thousand of them
            return tuple([converters[0](item, (path, i)) for i, item in enumerate(data)])
        if len(converters) != len(data):
            raise ConfigError(f"{_where(path)}: expected {len(converters)} items, got {len(data)}")
        return tuple([c(item, (path, i)) for i, (c, item) in enumerate(zip(converters, data, strict=True))])

    return convert


def _scalar(hint: type) -> _Converter:
    number = hint in (int, float)

    def convert(data: Any, path: _Path) -> Any:
        if type(data) is hint:
            return data
        if hint is float and isinstance(data, int) and not isinstance(data, bool):
            return float(data)
        if not isinstance(data, hint) or (number and isinstance(data, bool)):
            raise ConfigError(f"{_where(path)}: expected {hint.__name__}, got {type(data).__name__} {data!r}")
        return data

    return convert
