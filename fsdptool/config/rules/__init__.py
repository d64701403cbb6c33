"""Every rule, by code. One table serves the findings, ``fsdptool rule`` and ``docs/rules.md``."""

from __future__ import annotations

from fsdptool.config.rules.form import PARSE, SCHEMA
from fsdptool.config.rules.meaning import HARDWARE, MEANING, MODEL
from fsdptool.records.diagnostic import Rule

RULES: dict[str, Rule] = {rule.code: rule for rule in (*PARSE, *SCHEMA, *MEANING, *MODEL, *HARDWARE)}

__all__ = ["RULES", "Rule"]
