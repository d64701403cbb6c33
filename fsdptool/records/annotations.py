"""The one reader of annotations: what a field, an option or a parameter may be, and within which bounds.

The JSON codec, the schemas, the recipe's reader, the forms of the web interface and the options of commands
are made from what :func:`read_annotation` and :func:`fields_of` return.
"""

from __future__ import annotations

import dataclasses
import operator
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)


class Keywords:
    """What a type cannot say, in JSON Schema's own words: ``Annotated[int, Keywords(minimum=1)]``."""

    def __init__(self, **keywords: Any) -> None:
        self.keywords = keywords


Count = Annotated[int, Keywords(minimum=0)]
Positive = Annotated[int, Keywords(minimum=1)]
Share = Annotated[float, Keywords(minimum=0, maximum=1.0000001)]
"""A fraction of a total; sums of rounded terms may exceed 1 by their last digit."""
Digest = Annotated[str, Keywords(pattern="^sha256:[0-9a-f]{64}$")]
Text = Annotated[str, Keywords(minLength=1)]


class Shape(Enum):
    """How a value is written in a document."""

    ANY = "any"
    SCALAR = "scalar"
    CHOICE = "choice"
    LIST = "list"
    """Any number of items of one kind."""
    TUPLE = "tuple"
    """A fixed number of items."""
    MAPPING = "mapping"
    RECORD = "record"
    """A dataclass, or a ``TypedDict`` of which every key may be left out."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """One of the things a value may be.

    Attributes:
        shape: How it is written.
        type: The class of a scalar, a record or an enumeration.
        choices: Of a choice: the value for each thing that may be written.
        items: Of a list its item, of a tuple each item, of a mapping its key and its value.
        keywords: What the annotation says of it in the words of JSON Schema.
    """

    shape: Shape
    type: Any = None
    choices: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    items: tuple[Annotation, ...] = ()
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_number(self) -> bool:
        """Whether it is a whole number or a float."""
        return self.type in (int, float)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Annotation:
    """What an annotation says.

    Attributes:
        kinds: What a value may be, besides None.
        optional: Whether it may be None.
        keywords: What is said of all kinds together.
        marks: What else stands in ``Annotated``.
    """

    kinds: tuple[Kind, ...]
    optional: bool = False
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    marks: tuple[Any, ...] = ()

    @property
    def record(self) -> type | None:
        """The record that a value may be, or None."""
        return next((kind.type for kind in self.kinds if kind.shape is Shape.RECORD), None)

    @property
    def choices(self) -> tuple[Any, ...]:
        """All that may be written; empty where it is not a choice alone."""
        if any(kind.shape is not Shape.CHOICE for kind in self.kinds):
            return ()
        return tuple(choice for kind in self.kinds for choice in kind.choices)

    @property
    def bounds(self) -> Mapping[str, Any]:
        """The keywords of the number that a value may be."""
        return next((kind.keywords for kind in self.kinds if kind.is_number), {})


def read_annotation(hint: Any) -> Annotation:
    """Return what an annotation says; forward references must be resolved."""
    # Not cached by the annotation: ``int | bool`` equals ``bool | int``, and their order counts.
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        inner = read_annotation(base)
        keywords = {
            key: v for mark in marks if isinstance(mark, Keywords) for key, v in mark.keywords.items()
        }
        others = (*inner.marks, *(mark for mark in marks if not isinstance(mark, Keywords)))
        if len(inner.kinds) == 1 and not inner.optional:
            (kind,) = inner.kinds
            kinds = (dataclasses.replace(kind, keywords={**kind.keywords, **keywords}),)
            return dataclasses.replace(inner, kinds=kinds, marks=others)
        return dataclasses.replace(inner, keywords={**inner.keywords, **keywords}, marks=others)
    if get_origin(hint) in (Union, types.UnionType):
        members = [read_annotation(item) for item in get_args(hint)]
        return Annotation(
            tuple(kind for member in members for kind in member.kinds),
            any(member.optional for member in members),
        )
    return Annotation((), optional=True) if hint in (None, type(None)) else Annotation((_kind(hint),))


def _kind(hint: Any) -> Kind:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return Kind(Shape.ANY)
    if origin is Literal:
        return Kind(Shape.CHOICE, choices={value: value for value in arguments})
    if origin is tuple and arguments[-1] is not Ellipsis:
        return Kind(Shape.TUPLE, items=tuple(map(read_annotation, arguments)))
    if origin is not None and issubclass(origin, Sequence):
        return Kind(Shape.LIST, items=(read_annotation(arguments[0]),))
    if origin is not None or hint is Mapping:
        return Kind(Shape.MAPPING, items=tuple(map(read_annotation, arguments or (str, Any))))
    if dataclasses.is_dataclass(hint) or is_typeddict(hint):
        return Kind(Shape.RECORD, hint)
    if issubclass(hint, Enum):
        return Kind(Shape.CHOICE, hint, choices={member.value: member for member in hint})
    return Kind(Shape.SCALAR, hint)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RecordField:
    """A field of a record.

    Attributes:
        name: Its name.
        key: Its key in JSON: ``class_`` is ``class``, whose underscore only keeps Python's keyword apart.
        annotation: What it may be.
        default: What it is unless given; ``dataclasses.MISSING`` where it is required or a factory makes it.
        required: Whether it must be given.
        sparse: Whether it is a key of a ``TypedDict``: left out where it is null or not given.
    """

    name: str
    key: str
    annotation: Annotation
    default: Any
    required: bool
    sparse: bool = False


def fields_of(record: type) -> Mapping[str, RecordField]:
    """Return the fields of a dataclass, or the keys of a ``TypedDict``, in order."""
    return _fields_of(cast("Any", record))


@cache
def _fields_of(record: Any) -> Mapping[str, RecordField]:
    hints = get_type_hints(record, include_extras=True)
    missing = dataclasses.MISSING
    if is_typeddict(record):
        return {
            name: RecordField(
                name,
                name,
                dataclasses.replace(read_annotation(hint), optional=True),
                missing,
                required=False,
                sparse=True,
            )
            for name, hint in hints.items()
        }
    return {
        key_of(field): RecordField(
            field.name,
            key_of(field),
            read_annotation(hints[field.name]),
            field.default,
            field.default is missing and field.default_factory is missing,
        )
        for field in dataclasses.fields(record)
    }


def key_of(field: dataclasses.Field[Any]) -> str:
    """Return the JSON key of a record's field."""
    return field.name.rstrip("_")


def annotation_at(record: type, path: Sequence[str]) -> Annotation:
    """Return what the field at a path of keys may be, as ``("batch", "micro_batch")`` of a recipe.

    Raises:
        KeyError: A record on the way has no such field.
    """
    first, *rest = path
    annotation = fields_of(record)[first].annotation
    if not rest:
        return annotation
    if annotation.record is None:
        raise KeyError(rest[0])
    return annotation_at(annotation.record, rest)


_CHECKS = {
    "minimum": operator.ge,
    "exclusiveMinimum": operator.gt,
    "maximum": operator.le,
    "exclusiveMaximum": operator.lt,
}


def permits(keywords: Mapping[str, Any], number: float) -> bool:
    """Whether a number is within the bounds of JSON Schema's keywords; NaN is within none."""
    return all(check(number, keywords[key]) for key, check in _CHECKS.items() if key in keywords)


def bounds_text(keywords: Mapping[str, Any]) -> str:
    """Return the bounds of JSON Schema's keywords in words, as ``at least 0 and below 1``."""
    if "minimum" in keywords and "maximum" in keywords:
        return f"from {keywords['minimum']} to {keywords['maximum']}"
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    return " and ".join(f"{word} {keywords[key]}" for key, word in words.items() if key in keywords)
