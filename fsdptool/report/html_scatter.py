"""The chart of all candidates by speed and memory. Reads the plan only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from fsdptool.formatting import amount
from fsdptool.records.plan import Candidate, Plan, SearchPoint
from fsdptool.report.curve import Frame, number_ticks
from fsdptool.report.html_charts import NARROW, grid, svg
from fsdptool.report.plan_words import brief, duration

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
        body.append(_limit(frame, limit))
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


def _limit(frame: Frame, limit: int) -> str:
    y = frame.y(limit)
    # Below the line where a strip is above it, and above the line elsewhere.
    text = y + 15 if y <= frame.top + 1 else y - 5
    return (
        f'<line class="limit" x1="{frame.left}" y1="{y:.1f}" x2="{frame.right}" y2="{y:.1f}"/>'
        f'<text class="halo" x="{frame.left + 6}" y="{text:.1f}">usable {amount(limit)}</text>'
    )


def _strip(
    over: Sequence[_Known],
    frame: Frame,
    most: float,
    link: Callable[[Candidate], str | None],
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
