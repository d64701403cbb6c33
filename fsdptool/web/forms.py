"""Forms from what is declared elsewhere: the options of ``plan``, and the fields of records.

A form is a list of fields with values and errors; labels, choices and help texts come from the declaration.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.records.codec import from_json, key_of
from fsdptool.records.mesh import PLANNED
from fsdptool.records.schema import field_documentation

Record = TypeVar("Record")


class FieldKind(StrEnum):
    """How a field is entered."""

    TEXT = "text"
    WHOLE = "whole"
    DECIMAL = "decimal"
    SWITCH = "switch"
    """Yes, no or not given, as a choice."""
    LIST = "list"
    """Values separated by commas."""

    @property
    def input_type(self) -> str:
        """The ``type`` of its input element."""
        return "number" if self in (FieldKind.WHOLE, FieldKind.DECIMAL) else "text"

    @property
    def step(self) -> str:
        """The ``step`` of a number's input element."""
        return "1" if self is FieldKind.WHOLE else "any"

    @property
    def keyboard(self) -> str:
        """The ``inputmode`` of a number's input element."""
        return "numeric" if self is FieldKind.WHOLE else "decimal"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a form.

    Attributes:
        name: Key in the address and in the form.
        label: What it is called.
        kind: How it is entered.
        help: What it means.
        choices: All values it may have; empty where it is not a choice.
        value: As text; empty is not given.
        error: What is wrong with the value.
        minimum, maximum: Least and largest number.
        required: Whether it must be given.
        empty: How the choice "not given" reads.
        placeholder: Shown while the field is empty.
        suggestions: Values that the browser offers.
        steps: Positions of a slider that a script adds; the field takes other values, too.
        panel: The group of fields it belongs to.
    """

    name: str
    label: str
    kind: FieldKind = FieldKind.TEXT
    help: str = ""
    choices: tuple[str, ...] = ()
    value: str = ""
    error: str = ""
    minimum: float | None = None
    maximum: float | None = None
    required: bool = False
    empty: str = "(default)"
    placeholder: str = ""
    suggestions: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    panel: str = ""

    @property
    def input_type(self) -> str:
        """The ``type`` of its input element; a browser would not show a number that is none."""
        return "text" if self.error else self.kind.input_type

    @property
    def id(self) -> str:
        """Its id on the page."""
        return f"field-{self.name.replace('.', '-')}"

    def parse(self) -> Any:
        """Return the value: text, number, True or False, list; None is not given.

        Raises:
            ConfigError: The text is not a value of this kind.
        """
        text = self.value.strip()
        if not text:
            if self.required:
                raise ConfigError("a value is required")
            return None
        if self.choices and text not in self.choices:
            raise ConfigError(f"choose one of: {', '.join(self.choices)}")
        if self.kind is FieldKind.SWITCH:
            return text == "yes"
        if self.kind is FieldKind.LIST:
            return [part.strip() for part in text.split(",") if part.strip()]
        if self.kind in (FieldKind.WHOLE, FieldKind.DECIMAL):
            return self._number(text)
        return text

    def _number(self, text: str) -> float:
        try:
            number = int(text) if self.kind is FieldKind.WHOLE else float(text)
        except ValueError:
            kind = "a whole number" if self.kind is FieldKind.WHOLE else "a number"
            raise ConfigError(f"{text!r} is not {kind}") from None
        if number != number or number in (float("inf"), float("-inf")):
            raise ConfigError(f"{text!r} is not a number")
        if self.kind is FieldKind.WHOLE and abs(number) >= 1 << 63:
            raise ConfigError("the number is too large")
        if self.minimum is not None and number < self.minimum:
            raise ConfigError(f"must be at least {self.minimum:g}")
        if self.maximum is not None and number > self.maximum:
            raise ConfigError(f"must be at most {self.maximum:g}")
        return number


def label_of(name: str) -> str:
    """Return the label of a name: ``sequence_length`` becomes ``Sequence length``."""
    name = name.replace("micro_batch", "micro-batch").replace("inter_node", "inter-node")
    words = [_SPELLINGS.get(word, word) for word in name.split("_")]
    words[0] = words[0] if words[0] != words[0].lower() else words[0].capitalize()
    return " ".join(words)


_SPELLINGS = {
    "cpu": "CPU",
    "dtype": "dtype",
    "ema": "EMA",
    "gpu": "GPU",
    "gpus": "GPUs",
    "hsdp": "HSDP",
    "lora": "LoRA",
    "pp": "pipeline",
    **{item.name: item.ranks for item in PLANNED},
}


def option_fields(names: Iterable[str], values: Mapping[str, str]) -> tuple[Field, ...]:
    """Return fields for options of ``plan`` (:class:`fsdptool.planning.options.Options`).

    Args:
        names: The options, in order.
        values: Texts by option, for example the parameters of an address.
    """
    from fsdptool.planning.options import declared

    fields = []
    for name in names:
        item = declared()[name]
        kind = _kind(item.types)
        choices = ("yes", "no") if kind is FieldKind.SWITCH else item.option.allowed()
        fields.append(
            Field(
                name=name,
                label=label_of(name),
                kind=kind,
                help=item.option.help.removesuffix(".") + ".",
                choices=choices,
                value=values.get(name, ""),
                minimum=item.option.minimum,
                panel=item.option.panel or "Model",
            )
        )
    return tuple(fields)


def record_fields(
    record: type, values: Mapping[str, str], *, leave_out: Sequence[str] = ()
) -> tuple[Field, ...]:
    """Return fields for a record whose fields are plain values: choices from types, help from docstrings.

    Args:
        record: A frozen dataclass.
        values: Texts by key.
        leave_out: Fields that the form does not have, such as nested records.
    """
    hints = get_type_hints(record, include_extras=True)
    documented = field_documentation(record)
    fields = []
    for field in dataclasses.fields(record):
        if field.name in leave_out:
            continue
        members = _members(hints[field.name])
        kind, key = _kind(members), key_of(field)
        choices = ("yes", "no") if kind is FieldKind.SWITCH else _choices(members)
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        shown = field.default if isinstance(field.default, str | int | float) else None
        fields.append(
            Field(
                name=key,
                label=label_of(key),
                kind=kind,
                help=documented.get(field.name, ""),
                choices=choices,
                value=values.get(key, ""),
                minimum=_keyword(hints[field.name], "minimum"),
                required=required,
                empty="(not given)" if shown is None else f"({_text(shown)})",
                placeholder="" if shown is None else _text(shown),
            )
        )
    return tuple(fields)


def parse(fields: Iterable[Field]) -> tuple[dict[str, Any], tuple[Field, ...]]:
    """Return the given values by name, and the fields with what is wrong beside them."""
    values: dict[str, Any] = {}
    checked = []
    for field in fields:
        try:
            value = field.parse()
        except FsdptoolError as error:
            checked.append(replace(field, error=error.message))
            continue
        if value is not None:
            values[field.name] = value
        checked.append(field)
    return values, tuple(checked)


def parse_record(record: type[Record], fields: Iterable[Field]) -> tuple[Record | None, tuple[Field, ...]]:
    """Return the record that a form describes, or None, and the fields with what is wrong beside them."""
    values, checked = parse(fields)
    if any(field.error for field in checked):
        return None, checked
    try:
        return from_json(record, values), checked
    except FsdptoolError as error:
        # The message begins with the field's path: "ClusterFile.nodes: ...".
        path, _, text = error.message.partition(": ")
        name = path.rpartition(".")[2]
        if not any(field.name == name for field in checked):
            raise
        return None, tuple(replace(f, error=text) if f.name == name else f for f in checked)


def with_error(fields: Iterable[Field], error: FsdptoolError) -> tuple[tuple[Field, ...], bool]:
    """Return the fields with an error beside the one that it is about, and whether there is one.

    A message is about a field if it names it, as ``--micro-batch``, ``micro_batch`` or ``GPU``.
    """
    listed = tuple(fields)
    text = error.message.replace("--", "").replace("-", "_").lower()
    words = text.replace(":", " ").replace(",", " ").split()
    name = next((field.name for field in listed if field.name in words), None)
    if name is None:
        return listed, False
    message = error.message + (f"; {error.help}" if error.help else "")
    return tuple(replace(f, error=message) if f.name == name else f for f in listed), True


def _members(hint: Any) -> tuple[Any, ...]:
    """Return what a value may be: members of unions, without None and annotations."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(inner for item in get_args(hint) for inner in _members(item))
    return () if hint is type(None) else (hint,)


def _kind(members: Sequence[Any]) -> FieldKind:
    """Return how a value of these types is entered; text where it may be one."""
    if any(get_origin(hint) in (Sequence, tuple, list) for hint in members):
        return FieldKind.LIST
    if any(hint is str or get_origin(hint) is Literal or _is_enum(hint) for hint in members):
        return FieldKind.TEXT
    for kind, hint in ((FieldKind.DECIMAL, float), (FieldKind.WHOLE, int), (FieldKind.SWITCH, bool)):
        if hint in members:
            return kind
    return FieldKind.TEXT


def _choices(members: Sequence[Any]) -> tuple[str, ...]:
    values: list[str] = []
    for hint in members:
        if get_origin(hint) is Literal:
            values += [str(value) for value in get_args(hint)]
        elif _is_enum(hint):
            values += [str(member.value) for member in hint]
        else:
            return ()
    return tuple(values)


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _keyword(hint: Any, name: str) -> Any:
    """Return what an annotation says in JSON Schema's words, or None."""
    for mark in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        if name in getattr(mark, "keywords", {}):
            return mark.keywords[name]
    inner = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else ()
    return next((found for item in inner if (found := _keyword(item, name)) is not None), None)


def _text(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
