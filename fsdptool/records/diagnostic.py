"""Findings of every package, what their codes mean, and the envelope of the documents that carry them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import metadata
from typing import Any, Generic, Literal, TypeVar

from fsdptool.records.annotations import Count, Digest, Positive
from fsdptool.records.codec import from_json, to_json

Severity = Literal["error", "warning", "info"]
Safety = Literal["safe", "unsafe", "none"]


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the characters ``[start, end)`` of a file's decoded text by ``text``."""

    start: Count
    end: Count
    text: str


def apply_edits(text: str, edits: Iterable[Edit]) -> str:
    """Return ``text`` with non-overlapping edits applied.

    Raises:
        ValueError: Two edits overlap.
    """
    result: list[str] = []
    position = 0
    for edit in sorted(edits, key=lambda edit: (edit.start, edit.end)):
        if edit.start < position:
            raise ValueError("edits overlap")
        result.append(text[position : edit.start])
        result.append(edit.text)
        position = edit.end
    result.append(text[position:])
    return "".join(result)


@dataclass(frozen=True, slots=True)
class Fix:
    """A change that removes a finding. ``safe`` means the run it describes stays the same."""

    safe: bool
    description: str
    edits: tuple[Edit, ...] = ()


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """One finding: a stable code, a place and, if possible, a fix.

    Attributes:
        code: Stable code of the rule, for example ``FSD101`` (``fsdptool rule FSD101``).
        severity: ``error`` fails the command, ``warning`` fails it under ``--strict``.
        message: One line that names the thing.
        help: What to do about it.
        path: File the finding is about, or None.
        line, column, end_line, end_column: 1-based place in ``path``, or None.
        fix: A mechanical repair, or None.
    """

    code: str
    severity: Severity
    message: str
    help: str | None = None
    path: str | None = None
    line: Positive | None = None
    column: Positive | None = None
    end_line: Positive | None = None
    end_column: Positive | None = None
    fix: Fix | None = None


RuleFamily = Literal[
    "parse",
    "schema",
    "meaning",
    "model",
    "hardware",
    "scripts",
    "plugins",
    "configuration",
    "sharding",
    "plan",
    "doctor",
    "cache",
    "failures",
]

_FAMILIES: dict[str, RuleFamily] = {
    "FSD1": "parse",
    "FSD2": "schema",
    "FSD3": "meaning",
    "FSD4": "model",
    "FSD5": "hardware",
    "FSD6": "scripts",
    "DET0": "plugins",
    "DET1": "configuration",
    "DET2": "sharding",
    "PLN0": "plan",
    "DOC0": "doctor",
    "CACHE0": "cache",
    "RUN0": "failures",
    "RUN1": "failures",
    "RUN2": "failures",
    "RUN3": "failures",
}


@dataclass(frozen=True, slots=True)
class Example:
    """A file in which a rule finds something, and one in which it does not.

    Attributes:
        fails, passes: Their texts.
        options: Options of ``fsdptool validate`` for both.
        passing: Those for the second one, where they differ.
    """

    fails: str
    passes: str
    options: str = ""
    passing: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: what ``fsdptool rule CODE`` prints and ``docs/rules.md`` is generated from.

    Attributes:
        code: Stable code; everything before its last two digits names the family.
        title: The problem in a few words.
        severity: Severity unless the finding says otherwise.
        why: What really happens, with the version it was seen in.
        fix: What to do, and what ``--fix`` does if it can.
        safety: ``safe`` (applied by ``--fix``), ``unsafe`` (``--unsafe-fixes``) or ``none``.
        example: For rules on configuration files; None where no text of a file can show it.
    """

    code: str
    title: str
    severity: Severity
    why: str
    fix: str
    safety: Safety = "none"
    example: Example | None = None

    @property
    def family(self) -> RuleFamily:
        """The family, from the code."""
        return _FAMILIES[self.code[:-2]]


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """A setting that takes effect, and where its value comes from; `line` is null for defaults."""

    key: str
    value: str | float | int | bool | tuple[str, ...] | None
    origin: str
    line: Positive | None


@dataclass(frozen=True, slots=True)
class EffectiveDtypes:
    """The dtypes of a run; null is the dtype that the weights are loaded in.

    Attributes:
        stored: Shards of trained parameters and their optimizer states. Frozen ones keep theirs.
        gathered: Parameters after the all-gather.
        computed: What layers compute in.
        reduced: Gradients while they are reduced.
        outputs: What the model returns, and with it a loss that its forward computes.
        saved: Trained parameters in a checkpoint.
    """

    stored: str | None
    gathered: str | None
    computed: str | None
    reduced: str | None
    outputs: str | None
    saved: str | None


@dataclass(frozen=True, slots=True)
class IgnoredKey:
    """Something that is written in the file and that the consumer does not use."""

    key: str
    value: str | float | int | bool | None
    line: Positive | None
    reason: str


SCHEMA_VERSION = 1
_LIBRARIES = ("torch", "accelerate", "transformers", "diffusers", "peft")


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every document begins with.

    Attributes:
        schema: Name of the schema the document follows.
        schema_version: Version of the schema.
        tool_version: Version of fsdptool.
        libraries: Versions of the libraries the answer depends on.
        inputs_digest: Digest of what the document was derived from.
        diagnostics: Findings that belong to the document.
        unknowns: What could not be derived, one sentence each.
    """

    schema: str
    schema_version: int
    tool_version: str
    libraries: Mapping[str, str]
    inputs_digest: Digest
    diagnostics: tuple[Diagnostic, ...]
    unknowns: tuple[str, ...]


def tool_version() -> str:
    """Return fsdptool's own version, from package metadata."""
    return metadata.version("fsdptool")


def library_versions() -> dict[str, str]:
    """Return the versions of the libraries an answer depends on; reads metadata, imports nothing."""
    return dict(_library_versions())


@cache
def _library_versions() -> tuple[tuple[str, str], ...]:
    # Once for each process, which imports a library once, too: the keys of a search ask hundreds of times.
    versions = []
    for name in _LIBRARIES:
        try:
            versions.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(versions)


def digest(value: Any) -> str:
    """Return the SHA-256 of ``value``'s canonical JSON, as ``sha256:<hex>``."""
    text = json.dumps(to_json(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """A record with the envelope that its document begins with."""

    envelope: Envelope
    body: T

    def document(self) -> dict[str, Any]:
        """Return the JSON document: the envelope's keys, then the record's."""
        return {**to_json(self.envelope), **to_json(self.body)}


def read_answer(record: type[T], document: Mapping[str, Any]) -> Answer[T]:
    """Return the answer whose document this is.

    Raises:
        ConfigError: It is not in the record's form.
    """
    names = {item.name for item in fields(Envelope)}
    head = {key: value for key, value in document.items() if key in names}
    body = {key: value for key, value in document.items() if key not in names}
    return Answer(from_json(Envelope, head), from_json(record, body))


def answer(
    schema: str,
    inputs: Any,
    body: T,
    *,
    diagnostics: Iterable[Diagnostic] = (),
    unknowns: Iterable[str] = (),
) -> Answer[T]:
    """Return a record with its envelope.

    Args:
        schema: Name of the schema in ``schemas/`` the document validates against.
        inputs: What the document was derived from; only its digest is kept.
        body: The record of the document's format, or plain data in the record's form.
        diagnostics: Findings that belong to the document.
        unknowns: What could not be derived, one sentence each.
    """
    head = Envelope(
        schema=schema,
        schema_version=SCHEMA_VERSION,
        tool_version=tool_version(),
        libraries=library_versions(),
        inputs_digest=digest(inputs),
        diagnostics=tuple(diagnostics),
        unknowns=tuple(unknowns),
    )
    return Answer(head, body)


def envelope(
    schema: str,
    inputs: Any,
    body: object,
    *,
    diagnostics: Iterable[Diagnostic] = (),
    unknowns: Iterable[str] = (),
) -> dict[str, Any]:
    """Return a document; arguments as :func:`answer`."""
    return answer(schema, inputs, body, diagnostics=diagnostics, unknowns=unknowns).document()
