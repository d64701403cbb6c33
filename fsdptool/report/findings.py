"""Findings, rules and effective settings as text: with source lines, one line each, or as a diff."""

from __future__ import annotations

import difflib
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fsdptool.config.rules import RULES
from fsdptool.formatting import printable, printable_lines
from fsdptool.records.diagnostic import Diagnostic, tool_version
from fsdptool.report.tables import layout_table, wrap_line

if TYPE_CHECKING:
    from fsdptool.config.result import Reading, Verdict
    from fsdptool.files.text import SourceText
    from fsdptool.records.config_documents import CodeCount
    from fsdptool.records.diagnostic import Rule

_COLOURS = {"error": "31;1", "warning": "33;1", "info": "36"}
_WIDTH = 160


def colour_wanted() -> bool:
    """Whether to write colours: a terminal and no NO_COLOR (no-color.org), or FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def render_text(
    readings: Iterable[Reading], *, colour: bool = False, quiet: bool = False, width: int | None = None
) -> str:
    """Return every finding with its place in the source.

    Args:
        readings: The files.
        colour: Write terminal colours.
        quiet: Leave out findings of severity ``info``.
        width: Columns of the terminal, to which lines are broken between words; None breaks none.
    """
    columns = width or sys.maxsize
    return "".join(_block(reading, item, colour, columns) for reading, item in _listed(readings, quiet))


def _listed(readings: Iterable[Reading], quiet: bool) -> Iterator[tuple[Reading, Diagnostic]]:
    """Return the findings that are shown one by one: files of other programs are counted only."""
    for reading in readings:
        for item in reading.diagnostics:
            if not reading.passed_over and not (quiet and item.severity == "info"):
                yield reading, item


def _block(reading: Reading, item: Diagnostic, colour: bool, width: int) -> str:
    lines = wrap_line(_head(reading, item, colour), width)
    if item.line is not None and item.column is not None and reading.source is not None:
        lines.extend(_snippet(reading, item, colour, min(width, _WIDTH)))
    if item.help:
        lines.extend(wrap_line(f"  help: {printable(item.help)}", width))
    if item.fix is not None:
        option = "--fix" if item.fix.safe else "--unsafe-fixes"
        lines.extend(wrap_line(f"  fix ({option}): {printable(item.fix.description)}", width))
    return "\n".join(lines) + "\n\n"


def _head(reading: Reading, item: Diagnostic, colour: bool) -> str:
    severity = paint(item.severity, item.severity, colour)
    return f"{place(reading, item)}: {severity} {item.code} {printable(item.message)}"


def place(reading: Reading, item: Diagnostic) -> str:
    """Return ``file:line:column`` as far as it is known."""
    path = printable(item.path or reading.path or "<text>")
    return path if item.line is None else f"{path}:{item.line}:{item.column}"


def paint(text: str, severity: str, colour: bool) -> str:
    """Return the text in the colour of a severity."""
    return f"\x1b[{_COLOURS[severity]}m{text}\x1b[0m" if colour else text


def _snippet(reading: Reading, item: Diagnostic, colour: bool, width: int) -> list[str]:
    assert reading.source is not None and item.line is not None and item.column is not None
    source = reading.source.line(item.line)
    if not source.strip():
        return []
    start = item.column - 1
    end = len(source)
    if item.end_line == item.line and item.end_column is not None:
        end = max(item.end_column - 1, start + 1)
    number = str(item.line)
    # A caret under a long line: show the part around it.
    room = max(width - len(number) - len("   | "), 20)
    offset = max(0, start - room // 2) if len(source) > room else 0
    shown = printable(source[offset : offset + room])
    caret = " " * (start - offset) + "^" * max(1, min(end, offset + room) - start)
    return [
        f"  {number} | {shown}",
        f"  {' ' * len(number)} | {paint(caret, item.severity, colour)}",
    ]


def render_concise(readings: Iterable[Reading], *, colour: bool = False, quiet: bool = False) -> str:
    """Return one line per finding: ``file:line:column: severity CODE message``; [*] marks a safe fix."""
    lines = []
    for reading, item in _listed(readings, quiet):
        mark = " [*]" if item.fix is not None and item.fix.safe else ""
        named = paint(f"{item.severity} {item.code}", item.severity, colour)
        lines.append(f"{place(reading, item)}: {named}{mark} {printable(item.message)}\n")
    return "".join(lines)


def render_statistics(
    counts: Iterable[CodeCount], *, colour: bool = False, quiet: bool = False, width: int | None = None
) -> str:
    """Return one line per code: how often it was found, its severity, and its title.

    Args:
        counts: The codes, in the order of the table.
        colour: Write terminal colours.
        quiet: Leave out those of severity ``info``.
        width: Columns of the terminal, to which lines are broken between words; None breaks none.
    """
    rows = [row for row in counts if not (quiet and row.severity == "info")]
    digits = max((len(str(row.count)) for row in rows), default=0)
    lines = []
    for row in rows:
        fixable = f" ({row.fixable} with a fix)" if row.fixable else ""
        severity = paint(f"{row.severity:<7}", row.severity, colour)
        line = f"{row.count:>{digits}}  {severity}  {row.code}  {RULES[row.code].title}{fixable}"
        lines.extend(wrap_line(line, width) if width is not None else [line])
    return "".join(f"{line}\n" for line in lines)


def render_summary(verdict: Verdict, accepted: int = 0) -> str:
    """Return the closing line.

    Args:
        verdict: All files.
        accepted: Number of findings that a baseline holds back.
    """
    judged = len(verdict.readings) - verdict.passed_over
    text = f"{judged} file{'s' * (judged != 1)}: "
    if verdict.errors or verdict.warnings:
        text += (
            f"{verdict.errors} error{'s' * (verdict.errors != 1)}, "
            f"{verdict.warnings} warning{'s' * (verdict.warnings != 1)}"
        )
        text += f", {verdict.fixable} fixable (--fix, --unsafe-fixes)" if verdict.fixable else ""
    else:
        text += "no errors, no warnings"
    if verdict.passed_over:
        text += f"; {verdict.passed_over} of other programs skipped"
    if accepted:
        text += f"; {accepted} old finding{'s' * (accepted != 1)} in the baseline"
    return text + "\n"


_LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def render_github(readings: Iterable[Reading], *, quiet: bool = False) -> str:
    """Return one workflow command per finding; ``quiet`` leaves out those of severity ``info``."""
    lines = []
    for reading, item in _listed(readings, quiet):
        fields = {"title": f"fsdptool {item.code}", "file": item.path or reading.path}
        if item.line is not None:
            fields |= {"line": str(item.line), "col": str(item.column)}
            if item.end_line is not None:
                fields |= {"endLine": str(item.end_line), "endColumn": str(item.end_column)}
        written = ",".join(f"{key}={_property(printable(value))}" for key, value in fields.items() if value)
        message = printable(item.message) + (f"\n{printable(item.help)}" if item.help else "")
        lines.append(f"::{_LEVELS[item.severity]} {written}::{_data(message)}\n")
    return "".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def unified(before: SourceText, after: str, name: str | None = None) -> str:
    """Return what ``patch`` would do to a file, empty when nothing changes.

    Args:
        before: The file as it was read; its byte-order mark is part of the first line.
        after: Its new text, without the mark.
        name: What to call it; by default its path, or ``stdin``.
    """
    if before.text == after:
        return ""
    name = printable(name or before.path or "stdin")
    mark = "\ufeff" if before.bom else ""
    lines = difflib.unified_diff(_lines(mark + before.text), _lines(mark + after), f"a/{name}", f"b/{name}")
    return "".join(
        _patch_line(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n", mark)
        for line in lines
    )


def _patch_line(line: str, mark: str) -> str:
    """Return a line that a terminal may show and ``git apply`` still matches: mark and tabs stay."""
    kept = 2 if mark and line[1:2] == mark else 0
    return line[:kept] + "\t".join(printable_lines(part) for part in line[kept:].split("\t"))


def _lines(text: str) -> list[str]:
    """Split at newlines only: ``str.splitlines`` also splits at form feeds and Unicode's separators."""
    pieces = text.split("\n")
    lines = [piece + "\n" for piece in pieces[:-1]]
    return [*lines, pieces[-1]] if pieces[-1] else lines


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
        "Generated from the tables of rules with `fsdptool rule --write docs/rules.md`; `fsdptool rule CODE` "
        "prints one rule. In an example, the lines with a minus cause the finding; with those that have a "
        "plus instead, the rule finds nothing. Codes that begin with "
        "FSD are findings in configuration files: `# fsdptool: ignore[CODE]` at the end of a line silences "
        "one there, on a separate line in the whole file. DET codes come from commands that "
        "inspect a model, PLN from `plan`, DOC from `doctor`, CACHE from the cache, RUN from `diagnose`. "
        "The severities are the usual ones; a finding may have another one for some consumers.\n"
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


DTYPE_WORDS = {
    "stored": "trained parameters and optimizer states",
    "gathered": "parameters after the all-gather",
    "computed": "layers",
    "reduced": "gradients while they are reduced",
    "outputs": "outputs of the model, and a loss that its forward computes",
    "saved": "trained parameters in checkpoints",
}
_AS_LOADED = "as loaded"


def _room(width: int | None) -> int | None:
    return width - 2 if width is not None else None


def render_explanation(reading: Reading, *, width: int | None = None) -> str:
    """Return settings, values and origins in columns, then what was ignored, then the findings.

    Args:
        reading: What was read.
        width: Columns of the terminal; None is as many as the text needs.
    """
    lines = [f"{reading.path or '<text>'}: {reading.dialect or 'unknown'} file, read by {reading.consumer}"]
    findings = render_concise([reading]).splitlines()
    if reading.version is not None:
        lines.append(f"FSDP version {reading.version} runs")
    elif any(item.code == "FSD116" for item in reading.diagnostics):
        lines.append("Whether FSDP runs is not known: a file was not read")
    elif reading.dialect is not None:
        lines.append("FSDP does not run")
    if reading.effective:
        lines.append("")
        rows = [(item.key, printable(shown(item.value)), item.origin) for item in reading.effective]
        cells = [("setting", "value", "origin"), *rows]
        lines.extend(f"  {line.text}" for line in layout_table(cells, optional=(2,), width=_room(width)))
    if reading.dtypes is not None:
        lines.append("")
        pairs = [(name, getattr(reading.dtypes, name) or _AS_LOADED) for name in DTYPE_WORDS]
        described = [(name, dtype, DTYPE_WORDS[name]) for name, dtype in pairs]
        cells = [("dtype", "value", "of"), *described]
        lines.extend(f"  {line.text}" for line in layout_table(cells, optional=(2,), width=_room(width)))
    if reading.ignored:
        lines.append("")
        lines.append("ignored:")
        lines.extend(
            f"  {f'line {item.line}: ' if item.line else ''}{item.key} = {shown(item.value)} ({item.reason})"
            for item in reading.ignored
        )
    if findings:
        lines += ["", *findings]
    printed = (wrap_line(printable(line), width or sys.maxsize) for line in lines)
    return "".join(f"{line}\n" for part in printed for line in part)


def shown(value: Any) -> str:
    """Return a value as a person would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    return str(value)


_SARIF_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def sarif_document(readings: Iterable[Reading]) -> dict[str, Any]:
    """Return the log: one run, its rules, and a result per finding with its region and fixes."""
    found = list(_listed(readings, quiet=False))
    used = sorted({item.code for _, item in found})
    index = {code: number for number, code in enumerate(used)}
    results = [_result(reading, item, index) for reading, item in found]
    driver = {
        "name": "fsdptool",
        "version": tool_version(),
        "rules": [_rule(code) for code in used],
    }
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def _rule(code: str) -> dict[str, Any]:
    rule = RULES[code]
    return {
        "id": code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.fix},
        "defaultConfiguration": {"level": _SARIF_LEVELS[rule.severity]},
        "properties": {"family": rule.family},
    }


def _result(reading: Reading, item: Diagnostic, index: dict[str, int]) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": _artifact(reading, item)}
    if item.line is not None:
        region = {"startLine": item.line, "startColumn": item.column}
        if item.end_line is not None:
            region |= {"endLine": item.end_line, "endColumn": item.end_column}
        location["region"] = region
    result: dict[str, Any] = {
        "ruleId": item.code,
        "ruleIndex": index[item.code],
        "level": _SARIF_LEVELS[item.severity],
        "message": {"text": item.message + (f" ({item.help})" if item.help else "")},
        "locations": [{"physicalLocation": location}],
    }
    if item.fix is not None and item.fix.edits and reading.source is not None:
        result["fixes"] = [_fix(reading, item)]
    return result


def _artifact(reading: Reading, item: Diagnostic) -> dict[str, str]:
    """Return where a file is: relative to here, as code scanning wants it, or with its scheme."""
    path = Path(item.path or reading.path or "stdin")
    if path.is_absolute():
        try:
            path = path.relative_to(Path.cwd())
        except ValueError:
            return {"uri": path.as_uri()}
    return {"uri": quote(path.as_posix())}


def _fix(reading: Reading, item: Diagnostic) -> dict[str, Any]:
    assert item.fix is not None and reading.source is not None
    replacements = []
    for edit in item.fix.edits:
        start, end = reading.source.place(edit.start), reading.source.place(edit.end)
        region = {"startLine": start[0], "startColumn": start[1], "endLine": end[0], "endColumn": end[1]}
        replacement: dict[str, Any] = {"deletedRegion": region}
        if edit.text:
            replacement["insertedContent"] = {"text": edit.text}
        replacements.append(replacement)
    change = {"artifactLocation": _artifact(reading, item), "replacements": replacements}
    return {"description": {"text": item.fix.description}, "artifactChanges": [change]}
