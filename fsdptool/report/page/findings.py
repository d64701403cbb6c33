"""Findings in files as a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from fsdptool.report.page.parts import breaking, html_table, page, section
from fsdptool.report.summaries import verdict_lines

if TYPE_CHECKING:
    from fsdptool.config.result import Reading


def verdict_page(readings: Sequence[Reading]) -> str:
    """Return the findings in files as a page, file by file."""
    lines = verdict_lines(readings)
    sections = [
        section(breaking(reading.path or "text"), _finding_table(reading), raw=True) for reading in readings
    ]
    body = f"<header><h1>{escape(lines[0])}</h1></header>" + "\n".join(sections)
    return page(lines[0], body)


def _finding_table(reading: Reading) -> str:
    rows = [
        f'<tr><td class="n">{item.line or ""}</td><th scope="row" class="{_CLASSES[item.severity]}">'
        f'{item.severity}</th><td class="word">{escape(item.code)}</td>'
        f'<td class="wide">{escape(item.message)}<br><small>{escape(item.help or "")}</small></td></tr>'
        for item in reading.diagnostics
    ]
    if not rows:
        return "<p>No findings.</p>"
    heads = ("line", "severity", "code", "finding")
    return html_table(f"Findings in {reading.path or 'text'}", heads, rows, numbers=(0,), cards=True)


_CLASSES = {"error": "does_not_fit", "warning": "unknown", "info": "soft"}
