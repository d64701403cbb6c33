"""Findings as GitHub workflow commands, which become annotations of a pull request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdptool.config.reading import Reading

_LEVELS = {"error": "error", "warning": "warning", "info": "notice"}


def render_github(readings: Iterable[Reading], *, quiet: bool = False) -> str:
    """Return one workflow command per finding; ``quiet`` leaves out those of severity ``info``."""
    lines = []
    for reading in readings:
        for item in reading.diagnostics:
            if quiet and item.severity == "info":
                continue
            fields = {"title": f"fsdptool {item.code}", "file": item.path or reading.path}
            if item.line is not None:
                fields |= {"line": str(item.line), "col": str(item.column)}
                if item.end_line is not None:
                    fields |= {"endLine": str(item.end_line), "endColumn": str(item.end_column)}
            written = ",".join(f"{key}={_property(value)}" for key, value in fields.items() if value)
            message = item.message + (f"\n{item.help}" if item.help else "")
            lines.append(f"::{_LEVELS[item.severity]} {written}::{_data(message)}\n")
    return "".join(lines)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
