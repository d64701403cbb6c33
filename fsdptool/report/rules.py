"""Rules as text, and the pages of the documentation that are generated from them."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING

from fsdptool.formatting import printable

if TYPE_CHECKING:
    from fsdptool.records.diagnosis import Signature
    from fsdptool.records.diagnostic import Rule


_SAFETY = {
    "safe": "--fix (the run stays the same)",
    "unsafe": "--unsafe-fixes (the run changes)",
    "none": "no automatic fix",
}


def render_rule(rule: Rule, *, width: int | None = None) -> str:
    """Return one rule as text, broken between words to at most ``width`` columns, by default 96."""

    def wrap(text: str) -> str:
        size = min(width or 96, 96)
        return textwrap.fill(
            text,
            size,
            initial_indent="  ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )

    return (
        f"{rule.code} {rule.title}\n  {rule.family}, {rule.severity}\n\nwhy\n{wrap(rule.why)}\n\n"
        f"what to do\n{wrap(rule.fix)}\n\nfix\n  {_SAFETY[rule.safety]}\n"
    )


def render_list(rules: Iterable[Rule]) -> str:
    """Return all rules, one line each."""
    return "".join(f"{rule.code}  {rule.severity:<8}{rule.title}\n" for rule in rules)


def rules_page(rules: Iterable[Rule]) -> str:
    """Return ``docs/rules.md``, which ``fsdptool rule --write`` writes."""
    parts = [
        "# Rules\n\n"
        "This page is for anyone who meets the code of a finding. It is generated from the tables of rules "
        "with `fsdptool rule --write docs/rules.md`; `fsdptool rule CODE` prints one rule.\n\n"
        "Codes that begin with FSD are findings in configuration files. `# fsdptool: ignore[CODE]` at the "
        "end of a line silences one there, on a separate line in the whole file. FSD6 codes are findings in "
        "training scripts, where `# noqa: CODE` silences one. DET codes come from "
        "commands that inspect a model, PLN from `plan`, DOC from `doctor`, CACHE from the cache, RUN from "
        "`diagnose`.\n\n"
        "In an example, the lines with a minus cause the finding. With the lines that have a plus instead, "
        "the rule finds nothing. The severities are the usual ones; a finding may have another one for some "
        "consumers.\n"
    ]
    for family, members in groupby(rules, key=lambda rule: rule.family):
        parts.append(f"\n## {family}\n")
        for rule in members:
            parts.append(
                f"\n### {rule.code}: {rule.title}\n\n*{rule.severity}; fix: {_SAFETY[rule.safety]}*\n\n"
                f"{rule.why}\n\n**What to do.** {rule.fix}\n{_example(rule)}"
            )
    return "".join(parts)


def _example(rule: Rule) -> str:
    """Return what changes a file with the finding into one without it."""
    if rule.example is None:
        return ""
    shown, passing = rule.example, rule.example.passing
    texts = ((shown.fails, shown.options), (shown.passes, shown.options if passing is None else passing))
    before, after = (
        [*([f"# fsdptool validate {options} FILE"] if options else []), *text.splitlines()]
        for text, options in texts
    )
    lines = list(difflib.unified_diff(before, after, n=len(before), lineterm=""))[3:]
    return "\n```diff\n" + "".join(f"{line}\n" for line in lines) + "```\n"


def signatures_table(signatures: Iterable[Signature]) -> str:
    """Return the table of known failures, for a page beside the folder of ``rules.md``."""
    rows = []
    for item in signatures:
        anchor = f"{item.code}: {item.title}".lower().replace(" ", "-")
        anchor = "".join(letter for letter in anchor if letter.isalnum() or letter in "-_")
        texts = ", ".join(f"`{printable(text)}`" for text in item.texts)
        cause = item.cause.value.replace("_", " ")
        rows.append(f"| [{item.code}](../rules.md#{anchor}) | {item.title} | {cause} | {texts} |\n")
    return "| code | failure | cause | recognised by |\n|---|---|---|---|\n" + "".join(rows)
