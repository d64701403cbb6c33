"""The charts of a plan as inline SVG that takes its colours from the page.

Every chart has a title and a description, and a table next to it has the numbers. Charts come in two widths,
of which the style sheet shows one: text is as large on a telephone as on a screen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

from fsdptool.formatting import amount
from fsdptool.records.plan import Candidate, Moment, Plan, SearchPoint
from fsdptool.records.trace import ColourGroup, Component
from fsdptool.report.plan_words import brief, duration, moments

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
            areas.append(area(f"g-{group.value}", places, below, above, frame, group.legend))
            below = above
    if not areas:
        levels = [moment.allocated_bytes for moment in steps]
        areas.append(area("area", places, below, levels, frame, "allocated"))
    return areas


def area(
    kind: str, places: Sequence[float], below: Sequence[int], above: Sequence[int], frame: Frame, label: str
) -> str:
    """Return the area between two curves over the same places; ``kind`` is its class, ``label`` its title."""
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


_STRIP = 44
"""Height of the strip of candidates that do not fit."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A candidate whose memory and speed are known."""

    candidate: Candidate
    bytes: int
    speed: float

    @property
    def is_over(self) -> bool:
        """Whether it needs more than the usable memory."""
        usable = self.candidate.usable_bytes
        return usable is not None and self.bytes > usable


def scatter(
    plan: Plan,
    width: int,
    link: Callable[[Candidate], str | None] = lambda _: None,
    marked: SearchPoint | None = None,
) -> str:
    """Return every known candidate by speed and memory, with the Pareto front and the chosen one.

    Candidates that need more than the usable memory are in a strip of their own above the chart, at their
    speed: how far they are over the limit would flatten all others.

    Args:
        plan: The plan.
        width: Of the chart.
        link: From a candidate to the address that shows it, or None.
        marked: Settings of a candidate to mark.
    """
    unit = "tokens"
    if not any(item.tokens_per_second for item in plan.candidates if item.device_total_bytes is not None):
        unit = "samples"
    known = [
        _Known(item, item.device_total_bytes, speed)
        for item in plan.candidates
        if item.device_total_bytes is not None
        and (speed := item.tokens_per_second if unit == "tokens" else item.samples_per_second)
    ]
    if len(known) < 3:
        return ""
    fitting = [item for item in known if not item.is_over]
    over = [item for item in known if item.is_over] if fitting else []
    drawn = fitting or known
    limits = {item.candidate.usable_bytes for item in known}
    limit = limits.pop() if len(limits) == 1 else None
    sizes = [item.bytes for item in drawn]
    highest = limit if over and limit is not None else max(*sizes, limit or 0) * 1.06
    top = 26 + (_STRIP if over else 0)
    frame = Frame(width, 62, width - 10, top, top + 250, highest)
    most = max(item.speed for item in known) * 1.04
    front = set(plan.details.front)

    def place(item: _Known) -> tuple[float, float]:
        return frame.x(item.speed / most), frame.y(item.bytes)

    body = ['<text x="2" y="13">memory per rank</text>', grid(frame), _speeds(frame, most, unit, width)]
    if limit is not None:
        body.append(_usable_line(frame, limit))
    if over:
        body += _strip(over, frame, most, link)
    line = sorted(place(item) for item in drawn if item.candidate.id in front)
    if len(line) > 1:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in line)
        body.append(f'<polyline class="front" points="{points}"/>')
    seen: set[tuple[int, int]] = set()
    for item in sorted(drawn, key=lambda k: (k.candidate.id == plan.chosen, k.candidate.id in front)):
        x, y = place(item)
        name = item.candidate.id
        kind = "chosen" if name == plan.chosen else "on" if name in front else "off"
        if width == NARROW and kind == "off":
            # Thousands of points share a few hundred places on a narrow screen.
            if (round(x), round(y)) in seen:
                continue
            seen.add((round(x), round(y)))
        radius = {"chosen": 7, "on": 4.5, "off": 3}[kind]
        body.append(_point(item.candidate, x, y, kind, radius, link(item.candidate)))
        if kind == "chosen":
            anchor, shift = ("end", -11) if x > (frame.left + frame.right) / 2 else ("start", 11)
            body.append(
                f'<text class="strong halo" x="{x + shift:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">'
                f"{escape(name)} (chosen)</text>"
            )
    for item in drawn if marked is not None else ():
        if item.candidate.settings == marked:
            x, y = place(item)
            body.append(
                f'<circle class="here" cx="{x:.1f}" cy="{y:.1f}" r="11"><title>shown</title></circle>'
            )
    title = f"{len(known)} candidates by speed and memory; {len(known) - len(fitting)} do not fit"
    linked = any("<a " in part for part in body)
    return svg(f"scatter-{width}", width, frame.bottom + 46, title, body, role="group" if linked else "img")


def _speeds(frame: Frame, most: float, unit: str, width: int) -> str:
    ticks = number_ticks(most)
    parts = []
    for value, name in ticks[:: 1 if width > NARROW else 2]:
        x, y = frame.x(value / most), frame.bottom
        parts.append(f'<line class="axis" x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 5}"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 19}" text-anchor="middle">{name}</text>')
    middle = (frame.left + frame.right) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{frame.bottom + 38}" text-anchor="middle">'
        f"{unit} per second (estimate)</text>"
    )
    return "".join(parts)


def _usable_line(frame: Frame, limit: int) -> str:
    y = frame.y(limit)
    # Below the line where a strip is above it, and above the line elsewhere.
    text = y + 15 if y <= frame.top + 1 else y - 5
    return (
        f'<line class="limit" x1="{frame.left}" y1="{y:.1f}" x2="{frame.right}" y2="{y:.1f}"/>'
        f'<text class="halo" x="{frame.left + 6}" y="{text:.1f}">usable {amount(limit)}</text>'
    )


def _strip(
    over: Sequence[_Known], frame: Frame, most: float, link: Callable[[Candidate], str | None]
) -> list[str]:
    least, largest = (pick(item.bytes for item in over) for pick in (min, max))
    spread = amount(least) if least == largest else f"{amount(least)} to {amount(largest)}"
    text = f"{len(over)} do{'es' if len(over) == 1 else ''} not fit: {spread}"
    top = frame.top - _STRIP
    size = f'width="{frame.right - frame.left}" height="{_STRIP}"'
    parts = [f'<rect class="over" x="{frame.left}" y="{top}" {size}/>']
    places = set()
    for item in over:
        x = round(frame.x(item.speed / most), 1)
        if x not in places:
            places.add(x)
            parts.append(_point(item.candidate, x, frame.top - 10, "over", 3, link(item.candidate)))
    parts.append(f'<text class="halo" x="{frame.left + 6}" y="{top + 15}">{text}</text>')
    return parts


def _point(item: Candidate, x: float, y: float, kind: str, radius: float, link: str | None) -> str:
    figures = f"{amount(item.device_total_bytes)}, {duration(item.step_seconds)} per step"
    label = f"{item.id}: {figures}; {brief(item.settings)}"
    circle = (
        f'<circle class="p-{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
        f"<title>{escape(label)}</title></circle>"
    )
    if link is None:
        return circle
    # Hundreds of points would be as many stops of the Tab key; the front is enough.
    stop = "" if kind in ("chosen", "on") else ' tabindex="-1"'
    return f'<a href="{escape(link)}" aria-label="{escape(label)}"{stop}>{circle}</a>'


@dataclass(frozen=True, slots=True)
class Frame:
    """The area of a chart, in units of its picture.

    Attributes:
        width: Width of the picture.
        left: Where the area begins, right of the labels of the vertical axis.
        right: Where it ends.
        top: Its upper edge.
        bottom: Its lower edge.
        highest: The value at the upper edge; 0 is at the lower one.
    """

    width: int
    left: int
    right: int
    top: int
    bottom: int
    highest: float

    def y(self, value: float) -> float:
        """Return the height of a value."""
        return self.bottom - value / self.highest * (self.bottom - self.top)

    def x(self, share: float) -> float:
        """Return the place of a share of the horizontal axis."""
        return self.left + share * (self.right - self.left)


def byte_ticks(top: float) -> list[tuple[float, str]]:
    """Return round byte counts from 0 up to ``top``, about five of them, with their names."""
    unit = next((size for size in (2**40, 2**30, 2**20, 2**10) if top >= size), 1)
    return [
        (value * unit, amount(int(value * unit)).replace(".0 ", " ").replace(".00 ", " "))
        for value in _ticks(top / unit)
    ]


def number_ticks(top: float) -> list[tuple[float, str]]:
    """Return round numbers from 0 up to ``top``, about five of them, with their names."""
    return [(value, f"{value / 1000:g} k" if value >= 10_000 else f"{value:g}") for value in _ticks(top)]


def _ticks(top: float) -> list[float]:
    steps = (base * 10.0**power for power in range(-9, 13) for base in (1, 2, 5))
    step = next((step for step in steps if top / step <= 6), top or 1.0)
    return [index * step for index in range(int(top / step + 1e-9) + 1)]
