"""JSON Schemas (2020-12) of every document, generated from the records.

A field's type, its ``Keywords`` and its documentation make its schema, so a document is described once.
``fsdptool schema --write schemas`` renews the committed files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal, is_typeddict

from fsdptool.records.annotations import Annotation, Kind, Shape, fields_of
from fsdptool.records.codec import to_json


@dataclasses.dataclass(frozen=True, slots=True)
class DocumentFormat:
    """How one kind of document is described.

    Attributes:
        record: The record's module within this package and its name.
        title: Title of the schema.
        kind: ``output`` documents always hold every field. ``saved`` ones are read back, perhaps from an
            earlier version, and ``input`` ones are written by hand: fields with a default may be absent.
        envelope: Whether the document begins with :class:`fsdptool.records.diagnostic.Envelope`.
        closed: Whether unknown keys are refused.
    """

    record: str
    title: str
    kind: Literal["output", "saved", "input"] = "output"
    envelope: bool = True
    closed: bool = True


FORMATS: Mapping[str, DocumentFormat] = {
    "advisory": DocumentFormat("advisory.Advisory", "Advisory", "input", envelope=False),
    "audit": DocumentFormat("advisory.AuditReport", "Audit"),
    "cache": DocumentFormat("command_documents.CacheReport", "Cache"),
    "check": DocumentFormat("config_documents.CheckReport", "Check"),
    "cluster": DocumentFormat("cluster.ClusterFile", "Cluster", "input", envelope=False),
    "compare": DocumentFormat("command_documents.Comparison", "Comparison"),
    "detect": DocumentFormat("detection.Detection", "Detection"),
    "diagnose": DocumentFormat("diagnosis.FailureDiagnosis", "Diagnosis of a failed run"),
    "doctor": DocumentFormat("command_documents.Health", "Doctor"),
    "emit-config": DocumentFormat("config_documents.EmittedConfig", "Emitted configuration"),
    "explain": DocumentFormat("config_documents.Explanation", "Explanation"),
    "export": DocumentFormat("command_documents.ExportReport", "Export"),
    "families": DocumentFormat("family_documents.FamilyList", "Families"),
    "gpus": DocumentFormat("cluster.GpuFile", "GPU catalogue", "input", envelope=False),
    "init": DocumentFormat("command_documents.StarterReport", "Starter files"),
    "launch": DocumentFormat("command_documents.LaunchLines", "Launch"),
    "machine": DocumentFormat("cluster.MachineFile", "Machine table", "input", envelope=False),
    "measurements": DocumentFormat("measurements.Measurements", "Measurements of a machine", "saved"),
    "metrics": DocumentFormat("run.Metrics", "Metrics", envelope=False),
    "memory-snapshot": DocumentFormat("snapshot.MemorySnapshot", "Memory of a recording"),
    "migrate": DocumentFormat("config_documents.Migration", "Migration"),
    "plan": DocumentFormat("plan.Plan", "Plan", "saved", closed=False),
    "precompute": DocumentFormat("command_documents.PrecomputeReport", "Precompute"),
    "presets": DocumentFormat("config_documents.PresetList", "Presets"),
    "profile": DocumentFormat("profile.Profile", "Where the time of steps went"),
    "proof": DocumentFormat("proof.ShardingProof", "Proof of sharding", "saved"),
    "queue": DocumentFormat("queue.QueueReport", "Queue"),
    "recipe": DocumentFormat("recipe.Recipe", "fsdptool recipe", "input", envelope=False),
    "rules": DocumentFormat("config_documents.RuleList", "Rules"),
    "run": DocumentFormat("run.Start", "Run"),
    "runs": DocumentFormat("run.RunList", "Runs"),
    "shared-row": DocumentFormat("shared_row.SharedRow", "Measured run to share", "saved", envelope=False),
    "summary": DocumentFormat("run.Summary", "Run summary", "saved"),
    "sweep": DocumentFormat("command_documents.Sweep", "Sweep"),
    "watch": DocumentFormat("run.RunView", "State of a run"),
    "validate": DocumentFormat("config_documents.ValidationReport", "Verdict"),
}
"""Every document that a record describes. The accelerate YAML's schema comes from its dialect's keys."""


def generate(name: str) -> dict[str, Any]:
    """Return the JSON Schema of the document called ``name`` (a key of :data:`FORMATS`)."""
    from importlib import import_module

    from fsdptool.records.diagnostic import SCHEMA_VERSION, Envelope

    form = FORMATS[name]
    module, _, record_name = form.record.rpartition(".")
    record: type = getattr(import_module(f"fsdptool.records.{module}"), record_name)
    generator = _Generator(form)
    body = generator.object(record)
    if form.envelope:
        head = generator.object(Envelope)
        constants = {"schema": {"const": name}, "schema_version": {"const": SCHEMA_VERSION}}
        body["required"] = list(dict.fromkeys([*head["required"], *body["required"]]))
        body["properties"] = {**head["properties"], **constants, **body["properties"]}
    return compose(name, form.title, body, generator.definitions)


def compose(name: str, title: str, body: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole schema: the head every one of them has, its body, and the records it refers to."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:fsdptool:schema:{name}",
        "title": title,
        **body,
        **({"$defs": dict(sorted(definitions.items()))} if definitions else {}),
    }


class _Generator:
    def __init__(self, form: DocumentFormat) -> None:
        self._form = form
        self.definitions: dict[str, Any] = {}

    def object(self, record: type) -> dict[str, Any]:
        """Return the schema of a record, without a reference to it."""
        documented = field_documentation(record)
        required, properties = [], {}
        for key, field in fields_of(record).items():
            if (self._form.kind == "output" and not field.sparse) or field.required:
                required.append(key)
            entry = self._type(field.annotation)
            if field.name in documented:
                entry = {**entry, "description": documented[field.name]}
            if self._form.kind == "input" and _shown(field.default, entry):
                entry |= {"default": to_json(field.default)}
            properties[key] = entry
        summary = _plain((record.__doc__ or "").split("\n\n", maxsplit=1)[0])
        return {
            "description": summary,
            "type": "object",
            **({"required": required} if required else {}),
            **({"additionalProperties": False} if self._form.closed else {}),
            "properties": properties,
        }

    def _type(self, annotation: Annotation) -> dict[str, Any]:
        options = [{**self._kind(kind), **kind.keywords} for kind in annotation.kinds]
        if annotation.optional:
            options.append({"type": "null"})
        return {**(options[0] if len(options) == 1 else _merged(options)), **annotation.keywords}

    def _kind(self, kind: Kind) -> dict[str, Any]:
        items = [self._type(item) for item in kind.items]
        match kind.shape:
            case Shape.ANY:
                return {}
            case Shape.CHOICE:
                return {"enum": list(kind.choices)}
            case Shape.LIST:
                return {"type": "array", "items": items[0]}
            case Shape.TUPLE:
                return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
            case Shape.MAPPING:
                names = {"propertyNames": items[0]} if kind.items[0].choices else {}
                return {"type": "object", **names, **({"additionalProperties": items[1]} if items[1] else {})}
            case Shape.RECORD:
                return self._reference(kind.type)
            case Shape.SCALAR:
                return {"type": _SCALARS[kind.type]}

    def _reference(self, record: type) -> dict[str, Any]:
        if record.__name__ not in self.definitions:
            self.definitions[record.__name__] = {}  # A record may hold others of its own kind.
            self.definitions[record.__name__] = self.object(record)
        return {"$ref": f"#/$defs/{record.__name__}"}


def _shown(default: object, entry: Mapping[str, Any]) -> bool:
    """Whether a default is worth telling: nested records have their own, and None may stand for absent."""
    if default is None:
        return "null" in _names(entry.get("type", ["null"]))
    return default is not dataclasses.MISSING and not dataclasses.is_dataclass(default)


_SCALARS = {int: "integer", float: "number", str: "string", bool: "boolean"}


def _merged(options: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the union of schemas: one list of types, or of values, where that says the same."""
    if all(list(option) == ["enum"] or option == {"type": "null"} for option in options):
        return {"enum": [value for option in options for value in option.get("enum", [None])]}
    keywords = [key for option in options for key in option if key != "type"]
    if all("type" in option for option in options) and len(keywords) == len(set(keywords)):
        # Each keyword speaks of one type only (minimum of numbers, pattern of text).
        merged = {key: value for option in options for key, value in option.items()}
        return {**merged, "type": [name for option in options for name in _names(option["type"])]}
    return {"anyOf": options}


def _names(types: str | list[str]) -> list[str]:
    return [types] if isinstance(types, str) else types


def field_documentation(record: type) -> dict[str, str]:
    """Return what a record says of its fields: under ``Attributes:`` or in the text that follows one."""
    documented: dict[str, str] = {}
    for base in reversed(record.__mro__):
        if dataclasses.is_dataclass(base) or is_typeddict(base):
            documented |= dict(_attributes(base.__doc__ or "")) | dict(_field_texts(base))
    return documented


def _attributes(doc: str) -> Iterator[tuple[str, str]]:
    import inspect
    import re

    section = inspect.cleandoc(doc).partition("\nAttributes:\n")[2].split("\n\n", maxsplit=1)[0]
    for names, text in re.findall(r"^ {4}(\w[\w, ]*): (.*(?:\n {8}.*)*)", section, re.MULTILINE):
        for name in names.split(","):
            yield name.strip(), _plain(text)


def _field_texts(record: type) -> Iterator[tuple[str, str]]:
    import ast
    import inspect
    import textwrap
    from itertools import pairwise

    body = ast.parse(textwrap.dedent(inspect.getsource(record))).body[0].body  # type: ignore[attr-defined]
    for field, following in pairwise(body):
        named = isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            yield field.target.id, _plain(str(following.value.value))


def _plain(text: str) -> str:
    """Return documentation on one line, in the words of JSON: Markdown's backticks, bare names, ``null``."""
    import re

    text = re.sub(r":\w+:`~?(?:\w+\.)*(\w+)`", r"`\1`", text.replace("``", "`"))
    text = re.sub(r"\b(True|False)\b", lambda word: word[0].lower(), text)
    return " ".join(re.sub(r"\bNone\b", "null", text).split())
