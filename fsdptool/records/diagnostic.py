"""Findings of every room, and what their codes mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdptool.records.schema import Count, Positive

Severity = Literal["error", "warning", "info"]
Safety = Literal["safe", "unsafe", "none"]


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the characters ``[start, end)`` of a file's decoded text by ``text``."""

    start: Count
    end: Count
    text: str


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
    "plugins",
    "configuration",
    "sharding",
    "plan",
    "doctor",
    "cache",
]

_FAMILIES: dict[str, RuleFamily] = {
    "FSD1": "parse",
    "FSD2": "schema",
    "FSD3": "meaning",
    "FSD4": "model",
    "FSD5": "hardware",
    "DET0": "plugins",
    "DET1": "configuration",
    "DET2": "sharding",
    "PLN0": "plan",
    "DOC0": "doctor",
    "CACHE0": "cache",
}


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
    """

    code: str
    title: str
    severity: Severity
    why: str
    fix: str
    safety: Safety = "none"

    @property
    def family(self) -> RuleFamily:
        """The family, from the code."""
        return _FAMILIES[self.code[:-2]]
