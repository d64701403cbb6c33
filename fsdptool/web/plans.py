"""Questions to ``plan`` as pages ask them: fields, options, the command, and the job that answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from urllib.parse import urlencode

from fsdptool.errors import FsdptoolError
from fsdptool.planning.candidate.point import point_flags
from fsdptool.planning.request.options import declared
from fsdptool.records.advice import Suggestion
from fsdptool.records.cluster import EXPANDABLE
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.mesh import GROUPS
from fsdptool.records.plan import SearchPoint
from fsdptool.web import references
from fsdptool.web.forms import Field, FieldKind, option_fields, parse
from fsdptool.web.jobs import WebJob
from fsdptool.web.offers import gpu_names
from fsdptool.web.page import Services

PANELS: Mapping[str, tuple[str, ...]] = {
    "Model": ("reference",),
    "Hardware": ("gpu", "gpus", "nodes"),
    "Batch": ("sequence_length", "micro_batch"),
    "Training": ("method", "precision", "checkpointing", "reshard", "offload"),
    "Mesh": ("hsdp", *GROUPS),
}
"""Fields that are always shown; every other option is under "More"."""

_NEVER = frozenset({"trust_remote_code", "overrides"})
"""Options that a page does not have: code runs only by a flag of the command line, and values of a
configuration need more than a field."""
_FILES = ("recipe", "config", "machine", "gpus_file", "lengths", "clusters")
_REFERENCES = ("reference", "model", "teacher")

_POWERS = {
    "sequence_length": (512, 131072),
    "micro_batch": (1, 64),
    "gpus": (1, 16),
    "nodes": (1, 64),
    **dict.fromkeys(GROUPS, (1, 64)),
    "cp": (1, 16),
    "tp": (1, 8),
    "height": (256, 2048),
    "width": (256, 2048),
}
"""Least and largest position of a slider in powers of two. The field itself takes any number."""
_SUGGESTED: Mapping[str, tuple[str, ...]] = {
    "checkpointing": ("none", "selective", "every_2", "full", "optimal"),
    "reshard": ("true", "false"),
}
_SETTINGS = frozenset(item.name for item in fields(SearchPoint))
_START = {"gpus": "8", "sequence_length": "4096"}
"""What a form begins with."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question to ``plan``.

    Attributes:
        fields: Its fields with what is wrong beside them.
        options: The options that are given, as the pages name files.
        resolved: The same with files as absolute paths.
        error: What is wrong besides the fields.
    """

    fields: tuple[Field, ...]
    options: Mapping[str, Any]
    resolved: Mapping[str, Any]
    error: FsdptoolError | None = None

    @property
    def complete(self) -> bool:
        """Whether the question can be asked."""
        return bool(self.options) and self.error is None and not any(field.error for field in self.fields)

    @property
    def query(self) -> dict[str, str]:
        """The parameters of an address that asks it."""
        return {field.name: field.value for field in self.fields if field.value}

    @property
    def command(self) -> list[str]:
        """The command that answers it."""
        words = ["fsdptool", "plan"]
        for name, value in self.resolved.items():
            flags = declared()[name].flags[0].split("/")
            if name == "reference":
                words.append(str(value))
            elif isinstance(value, bool):
                words.append(flags[0] if value else flags[-1])
            else:
                several = value if isinstance(value, list) else [value]
                words += [word for item in several for word in (flags[0], str(item))]
        return words

    def panels(self) -> dict[str, list[Field]]:
        """Return the fields by panel; ``More`` has those that are not always shown."""
        by_name = {field.name: field for field in self.fields}
        shown = {panel: [by_name.pop(name) for name in names] for panel, names in PANELS.items()}
        return {**shown, "More": list(by_name.values())}


def read_question(shared: Services, values: Mapping[str, str]) -> Question:
    """Return the question that the parameters of an address ask.

    Args:
        shared: What pages share.
        values: Texts by option; others are ignored.
    """
    names = [*(name for panel in PANELS.values() for name in panel), *_more()]
    texts = {name: values[name].strip() for name in names if name in values}
    if not texts:
        texts = dict(_START)
    elif "clusters" in texts:
        texts = {name: text for name, text in texts.items() if name not in ("gpu", "gpus", "nodes") or text}
    fields = tuple(_field(field) for field in option_fields(names, texts))
    options, fields = parse(fields)
    options = {name: value for name, value in options.items() if value is not False or _pair(name)}
    if "reference" not in options and "recipe" not in options:
        return Question(fields, {}, {})
    resolved = dict(options)
    for name in (*_FILES, *_REFERENCES):
        if name not in options:
            continue
        try:
            resolved[name] = _resolved(shared, name, options[name])
        except FsdptoolError as error:
            fields = tuple(replace(f, error=error.message) if f.name == name else f for f in fields)
            if not any(field.name == name for field in fields):
                return Question(fields, options, resolved, error)
    return Question(fields, options, resolved)


def first_fields() -> tuple[Field, ...]:
    """Return the fields of the shortest question: model, GPUs and length."""
    fields = (
        _field(field) for field in option_fields(("reference", "gpu", "gpus", "sequence_length"), _START)
    )
    shown = {"reference": "llama3:8b", "gpu": "H100-80GB-SXM"}
    labels = {"reference": "Model or training file", "sequence_length": "Tokens per sample"}
    return tuple(
        replace(
            field,
            label=labels.get(field.name, field.label),
            required=field.name in shown,
            placeholder=shown.get(field.name, ""),
            steps=(),
            help="",
        )
        for field in fields
    )


def submit(shared: Services, question: Question, *, group: str | None) -> WebJob:
    """Return the job that answers a question; its result is the document of ``plan``.

    Raises:
        BusyError: Too many questions wait.
    """
    named = [question.resolved[name] for name in (*_FILES, *_REFERENCES) if name in question.resolved]
    paths = [str(path) for item in named for path in (item if isinstance(item, list) else [item])]
    stamps = [[path, references.stamp(path)] for path in paths]
    return shared.jobs.submit(
        "make_plan", {"options": dict(question.resolved), "stamps": stamps}, group=group
    )


def point_values(point: SearchPoint) -> dict[str, str]:
    """Return the parameters of an address that ask for one configuration."""
    values = {}
    for name, (flag, *rest) in point_flags(point).items():
        if name == "wrap":
            values[name] = ",".join(point.wrap_classes)
        else:
            values[name] = rest[0] if rest else "no" if flag.startswith("--no-") else "yes"
    values["reduce_dtype"] = point.reduce_dtype or "param"
    return values


def changed_values(base: SearchPoint, suggestion: Suggestion) -> dict[str, str] | None:
    """Return the parameters of a configuration with a suggestion; None where options cannot say it.

    Args:
        base: Settings of the candidate that the suggestion starts from.
        suggestion: One of ``next_steps``.
    """
    changes = {**suggestion.settings, **suggestion.hardware}
    options = {name: str(value) for name, value in changes.items() if name not in _SETTINGS}
    variables = dict(suggestion.environment)
    if variables == EXPANDABLE:
        variables, options["expandable_segments"] = {}, "yes"
    if not (changes or options) or variables or not set(options) <= set(declared()):
        return None
    point = {**to_json(base), **{name: value for name, value in changes.items() if name in _SETTINGS}}
    return {**point_values(from_json(SearchPoint, point)), **options}


def address(values: Mapping[str, str], **more: str) -> str:
    """Return the address of the plan page that asks a question."""
    return f"/plan?{urlencode({**values, **more})}"


def _more() -> list[str]:
    always = {name for names in PANELS.values() for name in names} | _NEVER
    return [name for name, item in declared().items() if item.option.panel and name not in always]


def _field(field: Field) -> Field:
    if field.name == "reference":
        return replace(field, suggestions=references.known())
    if field.name == "gpu":
        return replace(field, suggestions=gpu_names())
    if field.name in _POWERS:
        least, most = _POWERS[field.name]
        steps = [least]
        while steps[-1] < most:
            steps.append(steps[-1] * 2)
        empty = _WITHOUT.get(field.name, field.placeholder)
        return replace(field, steps=tuple(str(step) for step in steps), placeholder=empty)
    if field.kind is FieldKind.SWITCH and not _pair(field.name):
        return replace(field, choices=("yes",), empty="no")
    return replace(field, suggestions=_SUGGESTED.get(field.name, ()))


_WITHOUT: Mapping[str, str] = {"nodes": "1", "micro_batch": "searched"}
"""What applies while a field is empty."""


def _pair(name: str) -> bool:
    """Whether an option has a flag for no, so that False says something."""
    return "/" in declared()[name].flags[0]


def _resolved(shared: Services, name: str, value: Any) -> Any:
    if name in _REFERENCES:
        return references.allowed(shared.roots, value)
    if isinstance(value, list):
        return [str(shared.roots.resolve(item)) for item in value]
    return str(shared.roots.resolve(value))
