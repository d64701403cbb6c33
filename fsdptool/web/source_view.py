"""Files and differences line by line, as templates show them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlencode

from fsdptool.config.lint_settings import selector_of
from fsdptool.config.result import Reading
from fsdptool.config.rules import file_rules
from fsdptool.files.text import SourceText
from fsdptool.formatting import printable
from fsdptool.records.diagnostic import Diagnostic, Severity
from fsdptool.report.console.findings import shown
from fsdptool.report.console.tables import unified

MOST_LINES = 2000
"""Lines of a file that a page shows."""
_LONGEST = 1000
"""Characters of a line that a page shows."""
_SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class ShownFinding:
    """A finding beside a line.

    Attributes:
        item: The finding.
        title, why: What its rule is about.
        address: Where the page shows its fix; empty without one.
        open: Whether its fix is shown now.
    """

    item: Diagnostic
    title: str
    why: str
    address: str = ""
    open: bool = False


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One line of a file with the findings on it.

    Attributes:
        number: 1-based.
        before, marked, after: Its text, divided where the first finding's place begins and ends.
        severity: The worst of its findings; empty without any.
        findings: The findings.
    """

    number: int
    before: str
    marked: str
    after: str
    severity: str
    findings: tuple[ShownFinding, ...]


@dataclass(frozen=True, slots=True)
class SourceView:
    """A file with its findings.

    Attributes:
        lines: At most ``MOST_LINES`` of it.
        elsewhere: Findings that have no line here.
        left_out: Number of lines that are not shown.
    """

    lines: tuple[SourceLine, ...]
    elsewhere: tuple[ShownFinding, ...]
    left_out: int = 0


DiffKind = Literal["head", "hunk", "added", "removed", "same"]


@dataclass(frozen=True, slots=True)
class DiffLine:
    """One line of a unified diff."""

    kind: DiffKind
    text: str


@dataclass(frozen=True, slots=True)
class EffectiveRow:
    """One effective setting as text; ``line`` is None for defaults."""

    key: str
    value: str
    origin: str
    line: int | None


def source_view(
    reading: Reading, address: Callable[[Diagnostic], str] = lambda _item: "", chosen: str = ""
) -> SourceView:
    """Return a file's lines with its findings.

    Args:
        reading: The file.
        address: Where the page shows the fix of a finding; empty text for none.
        chosen: Key of the finding whose fix is shown.
    """
    source = reading.source
    count = min(source.line_count, MOST_LINES) if source is not None else 0
    beside: dict[int, list[ShownFinding]] = {}
    elsewhere = []
    for item in reading.diagnostics:
        rule = file_rules().get(item.code)
        finding = ShownFinding(
            item,
            rule.title if rule is not None else "",
            rule.why if rule is not None else "",
            address(item) if item.fix is not None and item.fix.edits else "",
            bool(chosen) and str(selector_of(item)) == chosen,
        )
        if item.line is not None and item.line <= count and item.path in (None, reading.path):
            beside.setdefault(item.line, []).append(finding)
        else:
            elsewhere.append(finding)
    if source is None:
        return SourceView((), tuple(elsewhere))
    last = count
    if last == source.line_count and not source.line(last):
        last -= 1  # What follows the last newline is not a line for people.
    lines = tuple(_line(source, number, beside.get(number, ())) for number in range(1, last + 1))
    return SourceView(lines, tuple(elsewhere), source.line_count - count)


def _line(source: SourceText, number: int, findings: Sequence[ShownFinding]) -> SourceLine:
    text = source.line(number)[:_LONGEST]
    start = end = len(text)
    worst = min((item.item.severity for item in findings), key=_SEVERITIES.index, default="")
    first = next((item.item for item in findings if item.item.column is not None), None)
    if first is not None and first.column is not None:
        start = min(first.column - 1, len(text))
        if first.end_line == number and first.end_column is not None:
            end = max(first.end_column - 1, start)
    parts = (text[:start], text[start:end], text[end:])
    before, marked, after = map(printable, parts)
    return SourceLine(number, before, marked, after, worst, tuple(findings))


def diff_lines(before: SourceText, after: str, name: str) -> tuple[DiffLine, ...]:
    """Return a unified diff; empty if nothing changes."""
    lines: list[DiffLine] = []
    for text in unified(before, after, name).split("\n")[:-1]:
        if text.startswith(("--- ", "+++ ")) and len(lines) < 2:
            kind: DiffKind = "head"
        else:
            kind = _KINDS.get(text[:1], "same")
        lines.append(DiffLine(kind, text))
    return tuple(lines)


_KINDS: dict[str, DiffKind] = {"@": "hunk", "+": "added", "-": "removed"}


def effective_rows(reading: Reading) -> tuple[EffectiveRow, ...]:
    """Return every effective setting with its origin."""
    return tuple(
        EffectiveRow(item.key, printable(shown(item.value)), printable(item.origin), item.line)
        for item in reading.effective
    )


def address_of(path: str, **parameters: str | int | None) -> str:
    """Return an address; parameters that are empty or None are left out."""
    given = {key: value for key, value in parameters.items() if value not in (None, "")}
    return f"{path}?{urlencode(given)}" if given else path


def command_path(path: Path) -> str:
    """Return a path as a command line in the server's working directory would name it."""
    try:
        below = path.relative_to(os.path.realpath("."))
    except ValueError:
        return str(path)
    return str(below)
