"""The form of a rule. The table of all rules is :data:`fsdptool.config.rules.RULES`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdptool.records.diagnostic import Severity

Family = Literal["parse", "schema", "meaning", "model", "hardware"]
Safety = Literal["safe", "unsafe", "none"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: what ``fsdptool rule CODE`` prints and ``docs/rules.md`` is generated from.

    Attributes:
        code: Stable code; the first digit is the family.
        title: What is found, in a few words.
        severity: Severity unless the finding says otherwise.
        why: What the consumer really does, with the version it was seen in.
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
    def family(self) -> Family:
        """The family, from the first digit of the code."""
        return _FAMILIES[self.code[3]]


_FAMILIES: dict[str, Family] = {"1": "parse", "2": "schema", "3": "meaning", "4": "model", "5": "hardware"}
