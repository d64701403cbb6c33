"""Detections, comparisons and findings as pages, and every record of the Python interface in a few lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from fsdptool.formatting import amount, printable
from fsdptool.records.command_documents import ComparedFigure, Comparison, Figure
from fsdptool.records.detection import Detection
from fsdptool.records.diagnostic import Answer, Diagnostic
from fsdptool.records.plan import Plan
from fsdptool.report import plan_words as words
from fsdptool.report.comparison import figure_cells, headline
from fsdptool.report.html_page import breaking, foot, html_table, notes, page, section
from fsdptool.report.tables import count

if TYPE_CHECKING:
    from fsdptool.config.result import Reading

_SHOWN_FINDINGS = 6
_SHOWN_FIGURES = 8
_CHARTED = 16


def plan_lines(plan: Plan) -> list[str]:
    """Return a plan in a few lines: verdict, configuration, memory, speed, and what else it holds."""
    candidate = words.shown(plan)
    lines = [
        words.headline(plan),
        f"{candidate.id}: {words.brief(candidate.settings)}",
        words.need(candidate),
    ]
    if candidate.step_seconds is not None:
        lines.append(
            f"{words.duration(candidate.step_seconds)} per step, {words.speed(candidate)} (estimate)"
        )
    held = [
        _number(len(plan.candidates), "candidate"),
        _number(len(plan.next_steps), "suggestion"),
        *_severities(plan.diagnostics),
    ]
    return _printable([*lines, ", ".join(held)])


def detection_lines(answer: Answer[Detection]) -> list[str]:
    """Return a detection in a few lines: class, size, wrap classes with the reason, and findings."""
    detection = answer.body
    model, wrap, total = detection.model, detection.wrap, detection.parameters
    lines = [
        f"{detection.reference.id}: {model.class_}, {total.total:,} parameters (exact)",
        f"wrap: {', '.join(wrap.classes) or 'nothing'}",
    ]
    chosen = [f"{item.name}: {item.reason}" for item in detection.classes if item.chosen]
    lines += [f"  {text}" for text in chosen[:3]]
    largest = detection.largest_unit
    lines.append(
        f"{len(detection.units)} FSDP units ({wrap.layout} layout); the largest is {largest.id}:"
        f" {count(largest.parameters)}, {largest.share:.1%} of all"
    )
    if detection.ties:
        lines.append(_number(len(detection.ties), "group") + " of tied parameters")
    return _printable([*lines, *_found(answer.envelope.diagnostics)])


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return a comparison in a few lines: its error, and the figures that differ."""
    differing = [row for row in comparison.rows if row.left != row.right]
    lines = [headline(comparison)]
    for row in differing[:_SHOWN_FIGURES]:
        what, left, right, percent = figure_cells(row)
        lines.append(f"{what}: {left} -> {right}{f' ({percent})' if percent else ''}")
    if len(differing) > _SHOWN_FIGURES:
        lines.append(f"... and {len(differing) - _SHOWN_FIGURES} more")
    return _printable(lines)


def verdict_lines(readings: Sequence[Reading]) -> list[str]:
    """Return the findings in files in a few lines, the most severe first."""
    findings = [item for reading in readings for item in reading.diagnostics]
    count_of = ", ".join(_severities(findings)) or "no findings"
    lines = [f"{_number(len(readings), 'file')}: {count_of}"]
    order = {"error": 0, "warning": 1, "info": 2}
    findings.sort(key=lambda item: order[item.severity])
    for item in findings[:_SHOWN_FINDINGS]:
        place = f"{item.path or 'text'}:{item.line}" if item.line is not None else item.path or "text"
        lines.append(f"{place}: {item.severity} {item.code} {item.message}")
    if len(findings) > _SHOWN_FINDINGS:
        lines.append(f"... and {len(findings) - _SHOWN_FINDINGS} more")
    return _printable(lines)


def comparison_page(answer: Answer[Comparison]) -> str:
    """Return the page of an answer of ``compare``, as HTML text."""
    comparison = answer.body
    run = comparison.kind == "run"
    sides = ("predicted", "measured") if run else ("left", "right")
    title = f"{comparison.left} and {comparison.right}"
    bars = _bars((*comparison.rows, *comparison.moments), sides)
    text = headline(comparison).removeprefix(f"{title}: ")
    summary = f"<p>{escape(text[:1].upper() + text[1:])}.</p>" if text != title else ""
    chart = f"{bars}{_key(sides)}" if bars else ""
    body = [
        f"<header><h1>{breaking(title)}</h1>{summary}</header>",
        section("Memory", chart),
        section("Figures", _figures("Totals", comparison.rows, sides)),
        section("Memory by moment", _figures("Moments", comparison.moments, sides)),
        section("Notes", notes(comparison.notes)),
        foot(answer.envelope.inputs_digest),
    ]
    return page(title, "\n".join(part for part in body if part))


def _figures(caption: str, rows: Sequence[ComparedFigure], sides: tuple[str, str]) -> str:
    if not rows:
        return ""
    lines = []
    for row in rows:
        what, left, right, percent = figure_cells(row)
        lines.append(
            f'<tr><th scope="row">{breaking(what)}</th><td class="n">{escape(left)}</td>'
            f'<td class="n">{escape(right)}</td><td class="n">{escape(percent)}</td></tr>'
        )
    heads = ("figure", *sides, "difference")
    tall = len(lines) > 20
    return html_table(caption, heads, lines, numbers=(1, 2, 3), tall=tall, cards=True)


def _bars(rows: Sequence[ComparedFigure], sides: tuple[str, str]) -> str:
    """Return two bars per figure in bytes, the left side above the right one, on one scale."""
    sizes = [(row.what, _bytes(row.left), _bytes(row.right)) for row in rows if row.unit == "bytes"]
    charted = [size for size in sizes if size[1] or size[2]][:_CHARTED]
    if not charted:
        return ""
    most = max(max(left or 0, right or 0) for _, left, right in charted)
    lines = []
    for what, left, right in charted:
        bars = "".join(
            f'<rect class="g-{group}" x="0" y="{y}" width="{(size or 0) / most * 100:.2f}" height="4">'
            f"<title>{name}: {amount(size)}</title></rect>"
            for size, name, group, y in ((left, sides[0], "states", 1), (right, sides[1], "gathered", 6))
        )
        lines.append(
            f'<tr><th scope="row">{breaking(what)}</th><td class="wide">'
            f'<svg viewBox="0 0 100 11" preserveAspectRatio="none" class="pair" aria-hidden="true">'
            f'{bars}</svg></td><td class="n">{amount(left)}<br>{amount(right)}</td></tr>'
        )
    heads = ("figure", f"{sides[0]} above {sides[1]}", "bytes")
    return html_table("Memory on one scale", heads, lines, numbers=(2,), cards=True)


def _bytes(value: Figure) -> int | None:
    return value if isinstance(value, int) else None


def _key(sides: tuple[str, str]) -> str:
    items = zip(sides, ("states", "gathered"), strict=True)
    listed = "".join(f'<li><span class="swatch k-{group}"></span>{name}</li>' for name, group in items)
    return f'<ul class="key">{listed}</ul>'


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


def _found(diagnostics: Iterable[Diagnostic]) -> list[str]:
    serious = [item for item in diagnostics if item.severity != "info"]
    lines = [f"{item.severity} {item.code}: {item.message}" for item in serious[:_SHOWN_FINDINGS]]
    rest = len(serious) - _SHOWN_FINDINGS
    return [*lines, f"... and {rest} more"] if rest > 0 else lines


def _severities(diagnostics: Iterable[Diagnostic]) -> list[str]:
    found = [item.severity for item in diagnostics]
    names = {"error": "error", "warning": "warning", "info": "note"}
    return [_number(found.count(kind), name) for kind, name in names.items() if kind in found]


def _number(value: int, noun: str) -> str:
    return f"{value} {noun}{'s' * (value != 1)}"


def _printable(lines: Iterable[str]) -> list[str]:
    return [printable(line) for line in lines]
