"""One finding, wherever it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace the characters ``[start, end)`` of a file's decoded text by ``text``."""

    start: int
    end: int
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
    line: int | None = None
    column: int | None = None
    end_line: int | None = None
    end_column: int | None = None
    fix: Fix | None = None
