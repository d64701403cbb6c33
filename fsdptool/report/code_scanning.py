"""Findings for code scanning: SARIF, and the workflow commands of GitHub."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fsdptool.config.rules import file_rules
from fsdptool.formatting import printable
from fsdptool.records.diagnostic import Diagnostic, tool_version

if TYPE_CHECKING:
    from fsdptool.config.result import Reading


def listed(readings: Iterable[Reading], quiet: bool) -> Iterator[tuple[Reading, Diagnostic]]:
    """Return the findings that are shown one by one: files of other programs are counted only."""
    for reading in readings:
        for item in reading.diagnostics:
            if not reading.passed_over and not (quiet and item.severity == "info"):
                yield reading, item


def _annotated(readings: Iterable[Reading], quiet: bool) -> Iterator[tuple[Reading, Diagnostic]]:
    """Return the findings that annotate a file. That a file does not configure FSDP is not one."""
    return ((reading, item) for reading, item in listed(readings, quiet) if item.code != "FSD113")


_LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def render_github(readings: Iterable[Reading], *, quiet: bool = False) -> str:
    """Return one workflow command per finding; ``quiet`` leaves out those of severity ``info``."""
    lines = []
    for reading, item in _annotated(readings, quiet):
        fields = {"title": f"fsdptool {item.code}", "file": item.path or reading.path}
        if item.line is not None:
            fields |= {"line": str(item.line), "col": str(item.column)}
            if item.end_line is not None:
                fields |= {"endLine": str(item.end_line), "endColumn": str(item.end_column)}
        lines.append(workflow_command(_LEVELS[item.severity], fields, item.message, item.help))
    return "".join(lines)


def workflow_command(level: str, fields: Mapping[str, str | None], message: str, help: str | None) -> str:
    """Return the line with which GitHub annotates a place.

    Args:
        level: ``error``, ``warning`` or ``notice``.
        fields: Title, file, line and column; what is None is left out.
        message: What is found there.
        help: What to do about it, on a line of its own.
    """
    written = ",".join(f"{key}={_property(printable(value))}" for key, value in fields.items() if value)
    text = printable(message) + (f"\n{printable(help)}" if help else "")
    return f"::{level} {written}::{_data(text)}\n"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


_SARIF_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def sarif_document(readings: Iterable[Reading]) -> dict[str, Any]:
    """Return the log: one run, its rules, and a result per finding with its region and fixes."""
    found = list(_annotated(readings, quiet=False))
    used = sorted({item.code for _, item in found})
    index = {code: number for number, code in enumerate(used)}
    results = [_result(reading, item, index) for reading, item in found]
    return sarif_log([_rule(code) for code in used], results)


def sarif_log(rules: Sequence[object], results: Sequence[object]) -> dict[str, Any]:
    """Return the log of one run.

    Args:
        rules: Descriptors of the rules that were broken, in the form of SARIF.
        results: What was found, in that form; ``ruleIndex`` is an index of ``rules``.
    """
    driver = {"name": "fsdptool", "version": tool_version(), "rules": rules}
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}],
    }


def _rule(code: str) -> dict[str, Any]:
    rule = file_rules()[code]
    return {
        "id": code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.why},
        "help": {"text": rule.fix},
        "defaultConfiguration": {"level": _SARIF_LEVELS[rule.severity]},
        "properties": {"family": rule.family},
    }


def _result(reading: Reading, item: Diagnostic, index: dict[str, int]) -> dict[str, Any]:
    location: dict[str, Any] = {"artifactLocation": artifact(item.path or reading.path)}
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


def artifact(name: str | None) -> dict[str, str]:
    """Return where a file is: relative to here, as code scanning wants it, or with its scheme.

    Text that is of no file comes from standard input.
    """
    path = Path(name or "stdin")
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
    change = {"artifactLocation": artifact(item.path or reading.path), "replacements": replacements}
    return {"description": {"text": item.fix.description}, "artifactChanges": [change]}
