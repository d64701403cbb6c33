"""Rules as text and as the page ``docs/rules.md``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdptool.records.diagnostic import Rule

_SAFETY = {
    "safe": "--fix (the run stays the same)",
    "unsafe": "--unsafe-fixes (the run changes)",
    "none": "no automatic fix",
}


def render_rule(rule: Rule) -> str:
    """Return one rule as text."""

    def wrap(text: str) -> str:
        return textwrap.fill(text, 96, initial_indent="  ", subsequent_indent="  ")

    return (
        f"{rule.code} {rule.title}\n  {rule.family}, {rule.severity}\n\nwhy\n{wrap(rule.why)}\n\n"
        f"what to do\n{wrap(rule.fix)}\n\nfix\n  {_SAFETY[rule.safety]}\n"
    )


def render_list(rules: Iterable[Rule]) -> str:
    """Return all rules, one line each."""
    return "".join(f"{rule.code}  {rule.severity:<8}{rule.title}\n" for rule in rules)


def rules_page(rules: Iterable[Rule]) -> str:
    """Return ``docs/rules.md``; a test holds the page against the table."""
    parts = [
        "# Rules\n\n"
        "Generated from the tables of rules; `fsdptool rule CODE` prints the same. Codes that begin with "
        "FSD are findings in configuration files: `# fsdptool: ignore[CODE]` at the end of a line silences "
        "one there, on a separate line in the whole file. DET codes come from commands that "
        "inspect a model, PLN from `plan`, DOC from `doctor`, CACHE from the cache. The severities are the "
        "usual ones; a finding may have another one for some consumers.\n"
    ]
    for family, members in groupby(rules, key=lambda rule: rule.family):
        parts.append(f"\n## {family}\n")
        for rule in members:
            parts.append(
                f"\n### {rule.code}: {rule.title}\n\n*{rule.severity}; fix: {_SAFETY[rule.safety]}*\n\n"
                f"{rule.why}\n\n**What to do.** {rule.fix}\n"
            )
    return "".join(parts)
