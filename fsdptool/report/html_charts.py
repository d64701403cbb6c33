"""One rank's memory as inline SVG that takes its colours from the page. Reads the plan only.

Every chart has a title and a description, and a table next to it has the numbers. Charts come in two widths,
of which the style sheet shows one: text is as large on a telephone as on a screen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from html import escape

from fsdptool.formatting import amount
from fsdptool.records.plan import Candidate, Moment, Plan
from fsdptool.records.trace import ColourGroup, Component
from fsdptool.report import plan_words as words
from fsdptool.report.curve import Frame, byte_ticks, moments
from fsdptool.report.html_style import CHARTS, DARK, LIGHT

BROAD, NARROW = 960, 380
"""Widths of charts in units of their pictures."""


def in_both_widths(draw: Callable[[int], str]) -> str:
    """Return a chart for broad screens and one for narrow ones; empty where there is nothing to draw."""
    broad = draw(BROAD)
    if not broad:
        return ""
    return f'<div class="broad">{broad}</div><div class="narrow">{draw(NARROW)}</div>'


def memory_bar(candidate: Candidate, width: int) -> str:
    """Return one stacked bar: the memory of one rank at its peak, and the usable memory."""
    parts = [(item.name, item.bytes) for item in candidate.components if item.bytes]
    total, usable = candidate.device_total_bytes, candidate.usable_bytes
    if not parts or total is None:
        return ""
    order = list(ColourGroup)
    parts.sort(key=lambda part: (order.index(part[0].group), -part[1]))
    top = max(total, usable or 0)
    scale = width / (top * 1.01)
    shapes, x = [], 0.0
    for component, held in parts:
        size = held * scale
        label = f"{component}: {amount(held)}"
        shapes.append(
            f'<rect class="g-{component.group}" x="{x:.2f}" y="22" width="{max(size, 0.4):.2f}"'
            f' height="34"><title>{escape(label)}</title></rect>'
        )
        x += size
    if usable is not None:
        line = usable * scale
        anchor = "end" if line > width / 2 else "start"
        shapes.append(f'<line class="limit" x1="{line:.2f}" y1="16" x2="{line:.2f}" y2="62"/>')
        shapes.append(f'<text x="{line:.2f}" y="12" text-anchor="{anchor}">usable {amount(usable)}</text>')
    shapes += [
        f'<line class="axis" x1="{value * scale:.2f}" y1="58" x2="{value * scale:.2f}" y2="63"/>'
        f'<text x="{value * scale:.2f}" y="76" text-anchor="{"middle" if value else "start"}">{name}</text>'
        for value, name in byte_ticks(top)
        if value * scale < width - 24
    ]
    title = f"One rank needs {amount(total)} of {amount(usable)} usable"
    return svg(f"bar-{width}", width, 80, title, shapes)


def timeline(candidate: Candidate, width: int) -> str:
    """Return the allocated bytes of a step, event by event and stacked by group, with the peak marked."""
    steps = moments(candidate)
    if len(steps) < 2:
        return ""
    levels = [moment.allocated_bytes for moment in steps]
    peak = candidate.allocated_peak_bytes or max(levels)
    frame = Frame(width, 62, width - 8, 26, 244, max(peak, *levels) * 1.06 or 1)
    places = [frame.x(index / (len(levels) - 1)) for index in range(len(levels))]
    outline = " ".join(f"{x:.1f},{frame.y(level):.1f}" for x, level in zip(places, levels, strict=True))
    body = [grid(frame), '<text x="2" y="13">allocated</text>']
    body += _stack(steps, places, frame)
    body.append(f'<polyline class="stroke" points="{outline}"/>')
    wide = (frame.right - frame.left) / (len(levels) - 1)
    body += [_hover(moment, x, wide, frame) for moment, x in zip(steps, places, strict=True)]
    body += _peak_mark(candidate, steps, places, frame)
    body += _phases(steps, places, frame)
    middle = (frame.left + frame.right) / 2
    body.append(
        f'<text x="{middle:.0f}" y="{frame.bottom + 40}" text-anchor="middle">'
        "events of one step, in their order</text>"
    )
    title = f"Allocated memory over one step; the peak is {amount(peak)}"
    return svg(f"timeline-{width}", width, 292, title, body)


def cursor(candidate: Candidate) -> str:
    """Return what a script needs to list what is alive at each moment of the timeline, with its slider.

    Plans of earlier versions tell the groups of components only.
    """
    steps = moments(candidate)
    data = []
    for moment in steps:
        if moment.components:
            largest = sorted(moment.components.items(), key=lambda item: -item[1])
            holdings = [(Component(name).group.value, name.replace("_", " "), size) for name, size in largest]
        else:
            sizes = moment.groups
            holdings = [(g.value, g.legend, sizes[g.value]) for g in ColourGroup if sizes.get(g.value)]
        listed = [[group, name, amount(size)] for group, name, size in holdings]
        data.append([moment.name, amount(moment.allocated_bytes), listed])
    highest = max(range(len(steps)), key=lambda i: steps[i].allocated_bytes)
    return (
        f'<div class="moment" data-moments="{escape(json.dumps(data, ensure_ascii=False))}" hidden>'
        f'<label>What is alive at one moment <input type="range" min="0" max="{len(steps) - 1}"'
        f' value="{highest}"></label><div class="alive" aria-live="polite"></div></div>'
    )


def _stack(steps: Sequence[Moment], places: Sequence[float], frame: Frame) -> list[str]:
    """Return an area per group of components, one on the other; one area where the groups are not known."""
    below = [0] * len(steps)
    areas = []
    for group in ColourGroup:
        sizes = [moment.groups.get(group.value, 0) for moment in steps]
        if any(sizes):
            above = [low + size for low, size in zip(below, sizes, strict=True)]
            areas.append(_area(f"g-{group.value}", places, below, above, frame, group.legend))
            below = above
    if not areas:
        levels = [moment.allocated_bytes for moment in steps]
        areas.append(_area("area", places, below, levels, frame, "allocated"))
    return areas


def _area(
    kind: str, places: Sequence[float], below: Sequence[int], above: Sequence[int], frame: Frame, label: str
) -> str:
    upper = [f"{x:.1f},{frame.y(level):.1f}" for x, level in zip(places, above, strict=True)]
    lower = [f"{x:.1f},{frame.y(level):.1f}" for x, level in zip(places, below, strict=True)]
    points = " ".join([*upper, *reversed(lower)])
    return f'<polygon class="{kind}" points="{points}"><title>{escape(label)}</title></polygon>'


def grid(frame: Frame) -> str:
    """Return the vertical axis of bytes: its ticks, their names and lines across the chart."""
    lines = []
    for value, name in byte_ticks(frame.highest):
        y = frame.y(value)
        kind = "grid" if value else "axis"
        lines.append(f'<line class="{kind}" x1="{frame.left}" y1="{y:.1f}" x2="{frame.right}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    return "".join(lines)


def _hover(moment: Moment, x: float, wide: float, frame: Frame) -> str:
    label = escape(f"{moment.name}: {amount(moment.allocated_bytes)}")
    return (
        f'<rect class="hover" x="{x - wide / 2:.1f}" y="{frame.top}" width="{wide:.2f}"'
        f' height="{frame.bottom - frame.top}"><title>{label}</title></rect>'
    )


def _peak_mark(
    candidate: Candidate, steps: Sequence[Moment], places: Sequence[float], frame: Frame
) -> list[str]:
    """Mark the highest point of the curve, and name the event that it falls into."""
    index = max(range(len(steps)), key=lambda i: steps[i].allocated_bytes)
    value = steps[index].allocated_bytes
    x, y = places[index], frame.y(value)
    name = candidate.peak.moment if candidate.peak is not None else steps[index].name
    longest = (frame.right - frame.left) // 7 - len(" 1000.0 MiB")
    name = name if len(name) <= longest else f"{name[: longest - 1]}…"
    label = f"{name} {amount(value)}"
    # The text stays within the chart, above the point.
    half = len(label) * 3.3
    middle = min(max(x, frame.left + half), frame.right - half)
    return [
        f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="5"/>',
        f'<text class="strong halo" x="{middle:.1f}" y="{y - 9:.1f}" text-anchor="middle">'
        f"{escape(label)}</text>",
    ]


def _phases(steps: Sequence[Moment], places: Sequence[float], frame: Frame) -> list[str]:
    """Name forward, backward and the update under the axis, where each begins."""
    marks, last, free = [], None, 0.0
    for moment, x in zip(steps, places, strict=True):
        word = moment.name.split(" ", 1)[0]
        phase = {"forward": "forward", "backward": "backward", "optimizer": "update"}.get(word)
        if phase is None or phase == last:
            continue
        last = phase
        y = frame.bottom
        marks.append(f'<line class="axis" x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 6}"/>')
        ends = x > frame.right - 50
        if x >= free:
            marks.append(
                f'<text x="{x:.1f}" y="{y + 20}" text-anchor="{"end" if ends else "start"}">{phase}</text>'
            )
            free = x + len(phase) * 7.5
    return marks


def legend(candidate: Candidate) -> list[ColourGroup]:
    """Return the colour groups of a candidate's components, in the order of the stack."""
    present = {item.name.group for item in candidate.components}
    return [group for group in ColourGroup if group in present]


def svg(name: str, width: int, height: int, title: str, body: Iterable[str], *, role: str = "img") -> str:
    """Return a chart of a page; ``name`` is unique on it. A chart with links has the role ``group``."""
    return (
        f'<svg viewBox="0 0 {width} {height}" role="{role}" aria-labelledby="{name}-title" class="{name}">'
        f'<title id="{name}-title">{escape(title)}</title>{"".join(body)}</svg>'
    )


def plan_picture(plan: Plan) -> str:
    """Return a plan as one SVG image: verdict, speed, one rank's memory at its peak and over a step."""
    candidate = words.shown(plan)
    headline = words.headline(plan)
    lines = [words.need(candidate)]
    if candidate.step_seconds is not None:
        lines.append(
            f"{words.duration(candidate.step_seconds)} per step, {words.speed(candidate)} (estimate)"
        )
    lines.append(words.brief(candidate.settings))
    y = 34
    shapes = ['<rect width="100%" height="100%" fill="var(--bg)"/>']
    shapes.append(f'<text class="strong" x="20" y="{y}" font-size="18">{escape(headline)}</text>')
    for line in lines:
        y += 20
        shapes.append(f'<text x="20" y="{y}" font-size="13.5">{escape(line)}</text>')
    y += 16
    for part, height in ((memory_bar(candidate, BROAD - 40), 80), (timeline(candidate, BROAD - 40), 292)):
        if part:
            inner = part.replace("<svg ", f'<svg x="20" y="{y}" width="{BROAD - 40}" height="{height}" ', 1)
            shapes.append(inner)
            y += height + 14
    x = 20.0
    for group in legend(candidate):
        shapes.append(f'<rect class="g-{group}" x="{x:.0f}" y="{y}" width="11" height="11"/>')
        shapes.append(f'<text x="{x + 17:.0f}" y="{y + 10}" font-size="11">{escape(group.legend)}</text>')
        x += 36 + len(group.legend) * 5.9
    style = f"svg{{{LIGHT}}}@media (prefers-color-scheme:dark){{svg{{{DARK}}}}}{CHARTS}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {BROAD} {y + 28}" role="img"'
        f' aria-labelledby="plan-title"><title id="plan-title">{escape(headline)}</title>'
        f"<style>{style}</style>{''.join(shapes)}</svg>\n"
    )
