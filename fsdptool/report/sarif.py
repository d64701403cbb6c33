"""Findings as SARIF 2.1.0 (OASIS), for code scanning."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from fsdptool.config.rules import RULES
from fsdptool.records.diagnostic import tool_version

if TYPE_CHECKING:
    from fsdptool.config.result import Reading
    from fsdptool.records.diagnostic import Diagnostic

_LEVELS = {"error": "error", "warning": "warning", "info": "note"}


def sarif_document(readings: Iterable[Reading]) -> dict[str, Any]:
    """Return the log: one run, its rules, and a result per finding with its region and fixes."""
    readings = list(readings)
    used = sorted({item.code for reading in readings for item in reading.diagnostics})
    index = {code: number for number, code in enumerate(used)}
    results = [_result(reading, item, index) for reading in readings for item in reading.diagnostics]
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
        "defaultConfiguration": {"level": _LEVELS[rule.severity]},
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
        "level": _LEVELS[item.severity],
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
