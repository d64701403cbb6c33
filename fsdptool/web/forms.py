"""Forms from what is declared elsewhere: the options of ``plan``, and the fields of records.

A form is a list of fields with values and errors; labels, choices and help texts come from the declaration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypeVar

from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.options import declared
from fsdptool.records.annotations import Annotation, Shape, fields_of
from fsdptool.records.codec import from_json
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


def option_fields(
    names: Iterable[str], values: Mapping[str, str], *, of: type | None = None
) -> tuple[Field, ...]:
    """Return fields for options of a declaration.

    Args:
        names: The options, in order.
        values: Texts by option, for example the parameters of an address.
        of: The declaration (:mod:`fsdptool.options`); None is that of ``plan``.
    """
    from fsdptool.planning.request.options import Options

    fields = []
    for name in names:
        item = declared(of or Options)[name]
        kind, bounds = _kind(item.annotation), item.option.bounds()
        choices = ("yes", "no") if kind is FieldKind.SWITCH else item.option.allowed()
        fields.append(
            Field(
                name=name,
                label=label_of(name),
                kind=kind,
                help=item.option.help.removesuffix(".") + ".",
                choices=choices,
                value=values.get(name, ""),
                minimum=bounds.get("minimum"),
                maximum=bounds.get("maximum"),
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
    documented = field_documentation(record)
    fields = []
    for key, field in fields_of(record).items():
        if field.name in leave_out:
            continue
        kind = _kind(field.annotation)
        choices = ("yes", "no") if kind is FieldKind.SWITCH else tuple(map(str, field.annotation.choices))
        shown = field.default if isinstance(field.default, str | int | float) else None
        fields.append(
            Field(
                name=key,
                label=label_of(key),
                kind=kind,
                help=documented.get(field.name, ""),
                choices=choices,
                value=values.get(key, ""),
                minimum=field.annotation.bounds.get("minimum"),
                required=field.required,
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


def _kind(annotation: Annotation) -> FieldKind:
    """Return how a value is entered; text where it may be one."""
    shapes = {kind.shape for kind in annotation.kinds}
    types = {kind.type for kind in annotation.kinds}
    if shapes & {Shape.LIST, Shape.TUPLE}:
        return FieldKind.LIST
    if str in types or Shape.CHOICE in shapes:
        return FieldKind.TEXT
    for entered, plain in ((FieldKind.DECIMAL, float), (FieldKind.WHOLE, int), (FieldKind.SWITCH, bool)):
        if plain in types:
            return entered
    return FieldKind.TEXT


def _text(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
