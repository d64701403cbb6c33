"""Every rule, by code. One table serves the findings, ``fsdptool rule`` and ``docs/rules.md``."""

from __future__ import annotations

from fsdptool.config.rules.hardware import HARDWARE
from fsdptool.config.rules.meaning import MEANING
from fsdptool.config.rules.model import MODEL
from fsdptool.config.rules.parse import PARSE
from fsdptool.config.rules.schema import SCHEMA
from fsdptool.records.diagnostic import Rule

RULES: dict[str, Rule] = {rule.code: rule for rule in (*PARSE, *SCHEMA, *MEANING, *MODEL, *HARDWARE)}

__all__ = ["RULES", "Rule"]
