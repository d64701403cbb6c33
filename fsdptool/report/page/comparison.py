"""A comparison as a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fsdptool.formatting import amount
from fsdptool.records.command_documents import ComparedFigure, Comparison, Figure
from fsdptool.records.diagnostic import Answer
from fsdptool.report.page.parts import breaking, foot, html_table, notes, page, section
from fsdptool.report.summaries import figure_cells, headline

_CHARTED = 16


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
