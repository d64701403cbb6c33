"""A sweep as a chart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fsdptool.formatting import amount
from fsdptool.records.command_documents import Sweep, SweepRow
from fsdptool.report import plan_words as words

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 300, 90, 40, 250
_COLOURS = ("#1f5fbf", "#c9822b", "#0b6b3a", "#8a63a8", "#a3211b", "#3f8f6b")


def sweep_svg(sweep: Sweep) -> str:
    """Return memory and speed over the first swept option as an SVG image, a line per value of the others.

    Values of the first option are spaced evenly, in their order. Filled points fit, hollow ones do not.
    """
    first, *others = sweep.options
    places = sorted({row.values[first] for row in sweep.rows})
    series: dict[str, list[SweepRow]] = {}
    for row in sweep.rows:
        if row.verdict is not None:
            name = ", ".join(f"{other.replace('_', ' ')} {row.values[other]:g}" for other in others)
            series.setdefault(name, []).append(row)
    speed = "tokens_per_second"
    if not any(getattr(row, speed) is not None for rows in series.values() for row in rows):
        speed = "samples_per_second"
    limits = {row.usable_bytes for rows in series.values() for row in rows} - {None}
    limit = limits.pop() if len(limits) == 1 else None
    unit = speed.split("_", 1)[0]
    panels = [
        _panel(series, first, places, "device_total_bytes", "memory per rank, bytes", amount, limit),
        _panel(series, first, places, speed, f"{unit} per second", words.rate, None),
    ]
    panels = [panel for panel in panels if panel]
    legend = _legend(list(series)) if others else ""
    height = _HEIGHT * len(panels) + (24 * len(series) if others else 0) + 10
    body = "".join(f'<g transform="translate(0 {_HEIGHT * i})">{panel}</g>' for i, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img"'
        f' font-family="sans-serif" font-size="13"><title>{escape(first.replace("_", " "))}: memory and speed'
        f'</title><rect width="100%" height="100%" fill="#fff"/>{body}'
        f'<g transform="translate(0 {_HEIGHT * len(panels)})">{legend}</g></svg>\n'
    )


def _panel(
    series: Mapping[str, Sequence[SweepRow]],
    first: str,
    places: Sequence[float],
    key: str,
    title: str,
    shown: Any,
    limit: int | None,
) -> str:
    known = [value for rows in series.values() for row in rows if (value := getattr(row, key)) is not None]
    if not known:
        return ""
    top = max(*known, limit or 0) * 1.1 or 1.0
    step = (_WIDTH - _LEFT - 30) / max(len(places) - 1, 1)

    def at(value: float, level: float) -> tuple[float, float]:
        return _LEFT + places.index(value) * step, _BOTTOM - level / top * (_BOTTOM - _TOP)

    body = [f'<text x="{_LEFT}" y="24" font-weight="bold">{escape(title)} (estimate)</text>']
    for part in range(5):
        level = top * part / 4
        y = at(places[0], level)[1]
        body.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - 20}" stroke="#ddd"/>')
        body.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{shown(int(level))}</text>')
    for value in places:
        body.append(
            f'<text x="{at(value, 0)[0]:.1f}" y="{_BOTTOM + 20}" text-anchor="middle">{value:g}</text>'
        )
    name = escape(first.replace("_", " "))
    body.append(f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_BOTTOM + 40}" text-anchor="middle">{name}</text>')
    if limit is not None:
        y = at(places[0], limit)[1]
        body.append(f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - 20}" stroke="#a3211b" stroke-dasharray="6 4"/>')
        body.append(
            f'<text x="{_WIDTH - 22}" y="{y - 5:.1f}" text-anchor="end">usable {amount(limit)}</text>'
        )
    for index, rows in enumerate(series.values()):
        colour = _COLOURS[index % len(_COLOURS)]
        ordered = sorted(
            (r for r in rows if getattr(r, key) is not None), key=lambda r: float(r.values[first])
        )
        points = [at(row.values[first], getattr(row, key)) for row in ordered]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for row, (x, y) in zip(ordered, points, strict=True):
            fill = colour if row.verdict == "fits" else "#fff"
            body.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}" stroke-width="2">'
                f"<title>{row.values[first]:g}: {escape(shown(getattr(row, key)))}</title></circle>"
            )
    return "".join(body)


def _legend(names: Sequence[str]) -> str:
    return "".join(
        f'<rect x="{_LEFT}" y="{24 * i}" width="12" height="12" fill="{_COLOURS[i % len(_COLOURS)]}"/>'
        f'<text x="{_LEFT + 20}" y="{24 * i + 11}">{escape(name)}</text>'
        for i, name in enumerate(names)
    )
