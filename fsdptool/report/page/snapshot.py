"""A memory snapshot as one self-contained page: a timeline that can be zoomed, and a flame view by line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from fsdptool.formatting import amount, count, printable
from fsdptool.records.diagnostic import Answer
from fsdptool.records.snapshot import MeasuredComponent, MemorySnapshot
from fsdptool.records.trace import ColourGroup, Component
from fsdptool.report.console.snapshots import (
    activation_rows,
    change_lines,
    moment_title,
    pool_name,
    reason_text,
    shown_components,
    snapshot_lines,
)
from fsdptool.report.page.charts import BROAD, NARROW, Frame, area, grid, svg
from fsdptool.report.page.parts import breaking, cards, foot, html_table, notes, page, section

_ZOOMS = (1, 4, 16)
_LEVELS, _NARROWEST, _ROW = 24, 0.002, 22


def snapshot_page(answer: Answer[MemorySnapshot]) -> str:
    """Return the page of a memory snapshot, as HTML text."""
    snapshot = answer.body
    sections = (
        _head(snapshot),
        section("Allocated memory over time", _timeline(snapshot)),
        section("What holds it", _components(snapshot)),
        section("Activations by block", _activations(snapshot)),
        section("Lines of Python", _flame(snapshot) + _lines(snapshot)),
        section("Free but reserved", _inactive(snapshot)),
        section("What would free memory", notes(map(printable, change_lines(snapshot)))),
        foot(answer.envelope.inputs_digest),
    )
    return page(printable(f"Memory of {snapshot.file}"), "\n".join(filter(None, sections)))


def _head(snapshot: MemorySnapshot) -> str:
    figures = [
        ("allocated peak", amount(snapshot.allocated_peak_bytes), _planned(snapshot)),
        ("reserved peak", amount(snapshot.reserved_peak_bytes), ""),
        ("allocated at the end", amount(snapshot.allocated_bytes), ""),
        ("reserved at the end", amount(snapshot.reserved_bytes), ""),
    ]
    if snapshot.failed is not None:
        free = f"{amount(snapshot.failed.device_free_bytes)} were left"
        figures.insert(0, ("request that failed", amount(snapshot.failed.bytes), free))
    if snapshot.entries:
        seconds = f"{snapshot.seconds:.3g} s" if snapshot.seconds is not None else ""
        figures.append(("entries", count(snapshot.entries), seconds))
    return (
        f'<header><p class="soft">memory snapshot, GPU {snapshot.device}</p>'
        f"<h1>{breaking(printable(snapshot.file))}</h1>{cards(figures)}"
        f"{notes(map(printable, snapshot_lines(snapshot)))}</header>"
    )


def _planned(snapshot: MemorySnapshot) -> str:
    return f"planned {amount(snapshot.planned_peak_bytes)}" if snapshot.planned_peak_bytes is not None else ""


def _group(name: str) -> ColourGroup:
    """Return the colour of a component: what stacks do not name is drawn as outside of the model."""
    return Component(name).group if name in set(Component) else ColourGroup.OUTSIDE


def _timeline(snapshot: MemorySnapshot) -> str:
    """Return the stacked timeline in three widths, of which radio buttons show one; the wide ones scroll."""
    if len(snapshot.timeline) < 2:
        return ""
    buttons, charts = [], []
    for zoom in _ZOOMS:
        checked = " checked" if zoom == 1 else ""
        buttons.append(
            f'<input type="radio" name="zoom" id="zoom-{zoom}"{checked}>'
            f'<label for="zoom-{zoom}">{zoom}×</label>'
        )
        broad, narrow = (
            f'<div class="{name}"><div style="width:{100 * zoom}%">'
            f"{_chart(snapshot, width, zoom)}</div></div>"
            for name, width in (("broad", BROAD), ("narrow", NARROW))
        )
        charts.append(
            f'<div class="zoomed scroll zoom-{zoom}" tabindex="0" role="region"'
            f' aria-label="timeline, {zoom} times">'
            f"{broad}{narrow}</div>"
        )
    present = {_group(item.name) for item in snapshot.components}
    key = "".join(
        f'<li><span class="swatch k-{group}"></span>{_legend(group)}</li>'
        for group in ColourGroup
        if group in present
    )
    return (
        f'<ul class="key">{key}</ul><div class="zoom"><span>zoom</span>{"".join(buttons)}{"".join(charts)}'
        '</div><p class="soft">Each point is the largest moment of its stretch; the line above is reserved'
        " memory.</p>"
    )


def _legend(group: ColourGroup) -> str:
    return (
        "before the recording, not attributed, or outside" if group is ColourGroup.OUTSIDE else group.legend
    )


def _chart(snapshot: MemorySnapshot, base: int, zoom: int) -> str:
    points, width = snapshot.timeline, base * zoom
    frame = Frame(width, 62, width - 8, 26, 244, max(point.reserved_bytes for point in points) * 1.06 or 1)
    last = max(points[-1].entry, 1)
    places = [frame.x(point.entry / last) for point in points]
    names = [item.name for item in snapshot.components]
    body = [grid(frame), '<text x="2" y="13">allocated</text>']
    below = [0] * len(points)
    for group in ColourGroup:
        columns = [index for index, name in enumerate(names) if _group(name) is group]
        above = [
            low + sum(point.components[index] for index in columns if index < len(point.components))
            for low, point in zip(below, points, strict=True)
        ]
        if above != below:
            body.append(area(f"g-{group}", places, below, above, frame, _legend(group)))
        below = above
    reserved = " ".join(
        f"{x:.1f},{frame.y(point.reserved_bytes):.1f}" for x, point in zip(places, points, strict=True)
    )
    body.append(f'<polyline class="front" points="{reserved}"/>')
    wide = (frame.right - frame.left) / len(points)
    for point, x in zip(points, places, strict=True):
        at = f", {point.seconds:.4g} s" if point.seconds is not None else ""
        label = f"entry {count(point.entry)}{at}: {amount(point.allocated_bytes)} allocated"
        body.append(
            f'<rect class="hover" x="{x - wide / 2:.1f}" y="{frame.top}" width="{wide:.2f}"'
            f' height="{frame.bottom - frame.top}"><title>{label}</title></rect>'
        )
    title = f"Allocated memory by group, peak {amount(snapshot.allocated_peak_bytes)}"
    return svg(f"memory-{base}-{zoom}", width, 270, title, body)


def _components(snapshot: MemorySnapshot) -> str:
    total = max(snapshot.moment_bytes, 1)
    planned = snapshot.planned_peak_bytes is not None
    rows = [
        f'<tr><th scope="row"><span><span class="swatch k-{_group(item.name)}"></span>{escape(item.name)}'
        f'</span></th><td class="n">{amount(item.bytes)}</td><td class="n">{100 * item.bytes / total:.1f}'
        f' %</td><td class="n">{count(item.blocks)}</td>{_expected(item) if planned else ""}</tr>'
        for item in shown_components(snapshot)
    ]
    heads = (moment_title(snapshot), "bytes", "share", "blocks", *(["planned"] if planned else []))
    return html_table("Components", heads, rows, numbers=(1, 2, 3, 4), cards=True) if rows else ""


def _expected(item: MeasuredComponent) -> str:
    return (
        f'<td class="n">{amount(item.planned_bytes) if item.planned_bytes is not None else "not known"}</td>'
    )


def _activations(snapshot: MemorySnapshot) -> str:
    rows = [
        f'<tr><th scope="row" class="wide">{escape(name)}<br><small>{breaking(printable(line))}</small></th>'
        f'<td class="n">{size}</td><td class="n">{blocks}</td></tr>'
        for name, size, blocks, line in activation_rows(snapshot)
    ]
    if not rows:
        return ""
    table = html_table("Activations by block", ("call", "bytes", "blocks"), rows, numbers=(1, 2))
    return table + notes(["the order of the recorded lines says which call of a block it was"])


@dataclass(slots=True)
class _Node:
    """A line of the flame view, and what it called."""

    bytes: int = 0
    calls: dict[str, _Node] = field(default_factory=dict)


def _flame(snapshot: MemorySnapshot) -> str:
    root = _Node()
    for stack in snapshot.stacks:
        node = root
        node.bytes += stack.bytes
        for line in stack.lines[:_LEVELS]:
            node = node.calls.setdefault(line, _Node())
            node.bytes += stack.bytes
    if not root.bytes:
        return ""
    drawn = [_flame_chart(root, name, width) for name, width in (("broad", BROAD), ("narrow", NARROW))]
    return "".join(drawn) + '<p class="soft">Callers are above what they call; the width is bytes.</p>'


def _flame_chart(root: _Node, name: str, width: int) -> str:
    scale = width / root.bytes
    boxes = list(_boxes(root, 0.0, 0, scale, width * _NARROWEST))
    shapes = []
    for line, size, x, level in boxes:
        wide, y = size * scale, level * _ROW
        label = escape(printable(f"{line}: {amount(size)}"))
        shapes.append(
            f'<rect class="g-{list(ColourGroup)[level % 4]}" x="{x:.1f}" y="{y}" width="{wide:.1f}"'
            f' height="{_ROW - 2}"><title>{label}</title></rect>'
        )
        letters = int(wide / 7.2)
        if letters > 4:
            text = printable(line.rsplit("/", 1)[-1])
            text = text if len(text) <= letters else f"{text[: letters - 1]}…"
            shapes.append(f'<text class="strong halo" x="{x + 3:.1f}" y="{y + 14}">{escape(text)}</text>')
    height = (max((level for *_, level in boxes), default=0) + 1) * _ROW
    return (
        f'<div class="{name}">{svg(f"flame-{name}", width, height, "Bytes by line of Python", shapes)}</div>'
    )


def _boxes(
    node: _Node, x: float, level: int, scale: float, least: float
) -> Iterator[tuple[str, int, float, int]]:
    for line, called in sorted(node.calls.items(), key=lambda item: -item[1].bytes):
        if called.bytes * scale >= least:
            yield line, called.bytes, x, level
            yield from _boxes(called, x, level + 1, scale, least)
        x += called.bytes * scale


def _lines(snapshot: MemorySnapshot) -> str:
    rows = [
        f'<tr><th scope="row" class="wide">{breaking(printable(f"{item.file}:{item.line}"))}<br>'
        f'<small>{breaking(printable(item.function))}</small></th><td class="n">{amount(item.bytes)}</td>'
        f'<td class="n">{count(item.blocks)}</td></tr>'
        for item in snapshot.lines
    ]
    heads: Sequence[str] = ("allocated by", "bytes", "blocks")
    return html_table("Lines of Python", heads, rows, numbers=(1, 2), tall=len(rows) > 12) if rows else ""


def _inactive(snapshot: MemorySnapshot) -> str:
    rows = [
        f'<tr><th scope="row">{escape(pool_name(item))}</th><td class="n">{amount(item.bytes)}</td>'
        f'<td class="n">{count(item.pieces)}</td><td class="n">{amount(item.largest_bytes)}</td>'
        f'<td class="n">{amount(item.whole_segment_bytes)}</td>'
        f'<td class="wide">{escape(reason_text(item))}</td></tr>'
        for item in snapshot.inactive
    ]
    heads = ("stream and pool", "bytes", "pieces", "largest", "whole segments", "why not used")
    return html_table("Free but reserved", heads, rows, numbers=(1, 2, 3, 4), cards=True) if rows else ""
