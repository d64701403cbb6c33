"""The effective settings of a file as plain rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool.formatting import printable
from fsdptool.report.findings import render_concise

if TYPE_CHECKING:
    from fsdptool.config.result import Reading


def render_explanation(reading: Reading) -> str:
    """Return settings, values and origins in columns, then what was ignored, then the findings."""
    lines = [f"{reading.path or '<text>'}: {reading.dialect or 'unknown'} file, read by {reading.consumer}"]
    if reading.version is not None:
        lines.append(f"FSDP version {reading.version} runs")
    elif reading.dialect is not None:
        lines.append("FSDP does not run")
    if reading.effective:
        lines.append("")
        rows = [(item.key, shown(item.value), item.origin) for item in reading.effective]
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines.extend(
            f"  {key:<{widths[0]}}  {value:<{min(widths[1], 48)}}  {origin}" for key, value, origin in rows
        )
    if reading.ignored:
        lines.append("")
        lines.append("ignored:")
        lines.extend(
            f"  line {item.line}: {item.key} = {shown(item.value)} ({item.reason})"
            for item in reading.ignored
        )
    text = "\n".join(printable(line) for line in lines) + "\n"
    findings = render_concise([reading])
    return text + (f"\n{findings}" if findings else "")


def shown(value: Any) -> str:
    """Return a value as a person would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    return str(value)
