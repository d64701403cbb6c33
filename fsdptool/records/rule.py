"""What a diagnostic's code means: one form for every room's table (``fsdptool rule CODE``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdptool.records.diagnostic import Severity

Safety = Literal["safe", "unsafe", "none"]

_FAMILIES = {
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
        title: What is found, in a few words.
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
    def family(self) -> str:
        """The family, from the code."""
        return _FAMILIES[self.code[:-2]]
