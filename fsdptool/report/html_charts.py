"""The page's charts, as inline SVG that takes its colours from the page. Reads the document only.

Every chart has a title and a description, and a table next to it has the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from fsdptool.formatting import amount
from fsdptool.records.trace import ColourGroup, Component
from fsdptool.report.plan_words import brief, duration

_WIDTH = 960


def group_of(name: str) -> ColourGroup:
    """Return the colour group of a component."""
    return Component(name).group


def memory_bar(candidate: Mapping[str, Any]) -> str:
    """Return one stacked bar: the memory of one rank at its peak, and the usable memory."""
    parts = [item for item in candidate["components"] if item["bytes"]]
    total, usable = candidate["device_total_bytes"], candidate["usable_bytes"]
    if not parts or total is None:
        return ""
    order = list(ColourGroup)
    parts.sort(key=lambda item: (order.index(group_of(item["name"])), -item["bytes"]))
    scale = _WIDTH / max(total, usable or 0)
    shapes, x = [], 0.0
    for item in parts:
        width = item["bytes"] * scale
        label = f"{item['name']}: {amount(item['bytes'])}"
        shapes.append(
            f'<rect class="g-{group_of(item["name"])}" x="{x:.2f}" y="14" width="{max(width, 0.4):.2f}"'
            f' height="34"><title>{escape(label)}</title></rect>'
        )
        x += width
    if usable is not None:
        line = usable * scale
        anchor = "end" if line > _WIDTH / 2 else "start"
        shapes.append(f'<line class="limit" x1="{line:.2f}" y1="6" x2="{line:.2f}" y2="56"/>')
        edge = min(line, _WIDTH - 1)
        shapes.append(f'<text x="{edge:.2f}" y="70" text-anchor="{anchor}">usable {amount(usable)}</text>')
    shapes.append(f'<text x="{min(x, _WIDTH) / 2:.2f}" y="70" text-anchor="middle">{amount(total)}</text>')
    return _svg("bar", 76, f"One rank needs {amount(total)} of {amount(usable)} usable", "".join(shapes))


def timeline(candidate: Mapping[str, Any]) -> str:
    """Return the step's allocated bytes, event by event, with the peak marked."""
    moments = candidate["timeline"]
    if len(moments) < 2:
        return ""
    height, left, bottom = 260, 70, 226
    levels = [moment["allocated_bytes"] for moment in moments]
    peak = candidate["allocated_peak_bytes"] or max(levels)
    top = max(peak, *levels) * 1.08 or 1
    step = (_WIDTH - left - 10) / (len(levels) - 1)
    points = [
        (left + index * step, bottom - level / top * (bottom - 14)) for index, level in enumerate(levels)
    ]
    outline = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    body = [_grid(top, left, bottom)]
    body += _stack(moments, [x for x, _ in points], top, bottom)
    body.append(f'<polyline class="stroke" points="{outline}"/>')
    body += [_hover(moment, x, step, bottom) for moment, (x, _) in zip(moments, points, strict=True)]
    body.append(_peak_mark(candidate, moments, points, top, bottom))
    body += _phases(moments, points, bottom)
    title = f"Allocated memory over one step; the peak is {amount(peak)}"
    return _svg("timeline", height, title, "".join(body))


def _stack(
    moments: Sequence[Mapping[str, Any]], places: Sequence[float], top: float, bottom: int
) -> list[str]:
    """Return an area per group of components, one on the other; one area where the groups are not known."""
    below = [0] * len(moments)
    areas = []
    for group in ColourGroup:
        sizes = [(moment.get("groups") or {}).get(group.value, 0) for moment in moments]
        if any(sizes):
            above = [low + size for low, size in zip(below, sizes, strict=True)]
            areas.append(_area(f"g-{group.value}", places, below, above, top, bottom, group.legend))
            below = above
    if not areas:
        levels = [moment["allocated_bytes"] for moment in moments]
        areas.append(_area("area", places, below, levels, top, bottom, "allocated"))
    return areas


def _area(
    kind: str,
    places: Sequence[float],
    below: Sequence[int],
    above: Sequence[int],
    top: float,
    bottom: int,
    label: str,
) -> str:
    def corner(x: float, level: int) -> str:
        return f"{x:.1f},{bottom - level / top * (bottom - 14):.1f}"

    upper = [corner(x, level) for x, level in zip(places, above, strict=True)]
    lower = [corner(x, level) for x, level in zip(places, below, strict=True)]
    points = " ".join([*upper, *reversed(lower)])
    return f'<polygon class="{kind}" points="{points}"><title>{escape(label)}</title></polygon>'


def scatter(document: Mapping[str, Any]) -> str:
    """Return every known candidate by step speed and memory, with the front and the chosen one."""
    known = [
        item
        for item in document["candidates"]
        if item["samples_per_second"] and item["device_total_bytes"] is not None
    ]
    if len(known) < 3:
        return ""
    height, left, bottom = 320, 70, 276
    top = max(item["device_total_bytes"] for item in known) * 1.06
    limit = known[0]["usable_bytes"]
    if limit is not None:
        top = max(top, limit * 1.06) if limit < 3 * top else top
    most = max(item["samples_per_second"] for item in known) * 1.04

    def place(item: Mapping[str, Any]) -> tuple[float, float]:
        x = left + item["samples_per_second"] / most * (_WIDTH - left - 12)
        return x, bottom - item["device_total_bytes"] / top * (bottom - 14)

    front = set(document["details"].get("front", ()))
    body = [_grid(top, left, bottom)]
    if limit is not None and limit <= top:
        y = bottom - limit / top * (bottom - 14)
        body.append(f'<line class="limit" x1="{left}" y1="{y:.1f}" x2="{_WIDTH}" y2="{y:.1f}"/>')
        body.append(f'<text x="{_WIDTH - 4}" y="{y - 5:.1f}" text-anchor="end">usable {amount(limit)}</text>')
    line = sorted(place(item) for item in known if item["id"] in front)
    if len(line) > 1:
        body.append(
            '<polyline class="front" points="' + " ".join(f"{x:.1f},{y:.1f}" for x, y in line) + '"/>'
        )
    ordered = sorted(known, key=lambda item: (item["id"] == document["chosen"], item["id"] in front))
    for item in ordered:
        x, y = place(item)
        kind = "chosen" if item["id"] == document["chosen"] else "on" if item["id"] in front else "off"
        figures = f"{amount(item['device_total_bytes'])}, {duration(item['step_seconds'])} per step"
        label = f"{item['id']}: {figures}; {brief(item['settings'])}"
        radius = {"chosen": 7, "on": 4.5, "off": 3}[kind]
        body.append(
            f'<circle class="p-{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
            f"<title>{escape(label)}</title></circle>"
        )
    body.append(f'<text x="{_WIDTH - 4}" y="{height - 22}" text-anchor="end">faster (samples/s) →</text>')
    return _svg("scatter", height, "Every candidate, by speed and memory", "".join(body))


def _grid(top: float, left: int, bottom: int) -> str:
    lines = []
    for value in _ticks(top):
        y = bottom - value / top * (bottom - 14)
        lines.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{_WIDTH}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{_round(value)}</text>')
    return "".join(lines)


def _ticks(top: float) -> list[float]:
    """Return round values from 0, about five of them, in the unit the top is read in."""
    unit = next((size for size in (2**40, 2**30, 2**20, 2**10) if top >= size), 1)
    steps = [unit * base * 10**power for power in range(4) for base in (1, 2, 5)]
    step = next((step for step in steps if top / step <= 6), steps[-1])
    return [index * step for index in range(int(top / step) + 1)]


def _round(value: float) -> str:
    return amount(int(value)).replace(".0 ", " ").replace(".00 ", " ")


def _hover(moment: Mapping[str, Any], x: float, step: float, bottom: int) -> str:
    label = escape(f"{moment['name']}: {amount(moment['allocated_bytes'])}")
    return (
        f'<rect class="hover" x="{x - step / 2:.1f}" y="14" width="{step:.2f}" height="{bottom - 14}">'
        f"<title>{label}</title></rect>"
    )


def _peak_mark(
    candidate: Mapping[str, Any],
    moments: Sequence[Mapping[str, Any]],
    points: Sequence[tuple[float, float]],
    top: float,
    bottom: int,
) -> str:
    """Mark the peak at the event it falls into: within it memory may rise above both its ends."""
    peak, value = candidate["peak"], candidate["allocated_peak_bytes"]
    if peak is None or value is None:
        return ""
    named = [index for index, moment in enumerate(moments) if moment["name"] == peak["moment"]]
    index = named[-1] if named else max(range(len(moments)), key=lambda i: moments[i]["allocated_bytes"])
    x, y = points[index][0], bottom - value / top * (bottom - 14)
    anchor = "end" if x > _WIDTH * 0.6 else "start"
    shift = -10 if anchor == "end" else 10
    label = escape(f"{peak['moment']}: {amount(value)}")
    return (
        f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        f'<text class="strong" x="{x + shift:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{label}</text>'
    )


def _phases(
    moments: Sequence[Mapping[str, Any]], points: Sequence[tuple[float, float]], bottom: int
) -> list[str]:
    """Name forward, backward and the update under the axis, where each begins."""
    marks, last = [], None
    for moment, (x, _) in zip(moments, points, strict=True):
        word = moment["name"].split(" ", 1)[0]
        phase = {"forward": "forward", "backward": "backward", "optimizer": "update"}.get(word)
        if phase is not None and phase != last:
            marks.append(f'<line class="grid" x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 8}"/>')
            anchor = "end" if x > _WIDTH - 60 else "start"
            marks.append(f'<text x="{x:.1f}" y="{bottom + 24}" text-anchor="{anchor}">{phase}</text>')
            last = phase
    return marks


def _svg(name: str, height: int, title: str, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-labelledby="{name}-title" class="{name}">'
        f'<title id="{name}-title">{escape(title)}</title>{body}</svg>'
    )


STYLE = """
:root{color-scheme:light dark;--bg:#fbfbfa;--ink:#1c1d1f;--soft:#5b6068;--line:#d9dbde;--card:#fff;
--good:#0b6b3a;--bad:#a3211b;--maybe:#7a5300;--accent:#1f5fbf;
--states:#3b6fb6;--gathered:#c9822b;--activations:#3f8f6b;--passing:#8a63a8;--outside:#9aa0a8}
@media (prefers-color-scheme:dark){:root{--bg:#15171a;--ink:#e7e8ea;--soft:#a2a8b1;--line:#343941;
--card:#1c1f23;--good:#58c58b;--bad:#ff8a80;--maybe:#e3b457;--accent:#82b1ff;
--states:#6f9fdf;--gathered:#e0a458;--activations:#63b98f;--passing:#b18fce;--outside:#767d87}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:66rem;margin:0 auto;padding:1.5rem 1.25rem 4rem}
h1{font-size:1.5rem;line-height:1.25;margin:.2rem 0 .6rem;overflow-wrap:anywhere}
h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
p{margin:.3rem 0;max-width:48rem}
.soft,small{color:var(--soft)}
.fits{color:var(--good)}.does_not_fit{color:var(--bad)}.unknown{color:var(--maybe)}
.skip{position:absolute;left:-999px}.skip:focus{left:1rem;top:1rem;background:var(--card);padding:.5rem}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(10.5rem,1fr));gap:.75rem;margin:1.1rem 0}
dl div{background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.6rem .8rem}
dt{color:var(--soft);font-size:.82rem}dd{margin:0;font-size:1.15rem;font-variant-numeric:tabular-nums}
dd small{display:block;font-size:.8rem}
svg{display:block;width:100%;height:auto;margin:.4rem 0;font:12px system-ui,sans-serif}
svg text{fill:var(--soft)}svg text.strong{fill:var(--ink);font-weight:600}
.g-states,.k-states{fill:var(--states);background:var(--states)}
.g-gathered,.k-gathered{fill:var(--gathered);background:var(--gathered)}
.g-activations,.k-activations{fill:var(--activations);background:var(--activations)}
.g-passing,.k-passing{fill:var(--passing);background:var(--passing)}
.g-outside,.k-outside{fill:var(--outside);background:var(--outside)}
svg rect[class^=g-]{stroke:var(--bg);stroke-width:.6}
.limit{stroke:var(--bad);stroke-width:1.6;stroke-dasharray:5 4}
.grid{stroke:var(--line);stroke-width:1}
.area{fill:var(--accent);opacity:.16}.stroke{fill:none;stroke:var(--accent);stroke-width:2}
.front{fill:none;stroke:var(--accent);stroke-width:1.4;opacity:.7}
.hover{fill:transparent}.hover:hover{fill:var(--accent);fill-opacity:.18}
.peak{fill:var(--bad)}
.p-off{fill:var(--outside);opacity:.55}.p-on{fill:var(--accent)}
.p-chosen{fill:var(--good);stroke:var(--bg);stroke-width:2}
.key{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;padding:0;margin:.2rem 0 .6rem;
font-size:.88rem}
.swatch{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em;vertical-align:-.05em}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:.5rem;background:var(--card)}
.tall{max-height:34rem;overflow-y:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem}
caption{position:absolute;left:-999px}
th,td{padding:.38rem .7rem;text-align:left;border-bottom:1px solid var(--line);vertical-align:top}
tbody tr:last-child td,tbody tr:last-child th{border-bottom:0}
thead th{position:sticky;top:0;background:var(--card);font-weight:600;white-space:nowrap}
tbody th{font-weight:400}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
tr.chosen{background:color-mix(in srgb,var(--good) 12%,transparent)}
.wide{min-width:14rem}.word{white-space:nowrap}
details{margin:.5rem 0}summary{cursor:pointer;color:var(--accent)}
:focus-visible{outline:3px solid var(--accent);outline-offset:2px}
pre{overflow:auto;background:var(--card);border:1px solid var(--line);border-radius:.5rem;padding:.8rem;
font-size:.82rem;max-height:30rem}
ul.notes{padding-left:1.1rem}ul.notes li{margin:.35rem 0;max-width:52rem}
footer{margin-top:3rem;color:var(--soft);font-size:.85rem;overflow-wrap:anywhere}
@media (max-width:40rem){main{padding:1rem .75rem 3rem}h1{font-size:1.25rem}svg{font-size:20px}
svg.timeline,svg.scatter{min-width:38rem}.chart{overflow-x:auto}svg.timeline,svg.scatter{font-size:13px}}
@media print{:root{--bg:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb}
main{max-width:none;padding:0}.scroll,.tall{overflow:visible;max-height:none;border:0}
thead th{position:static}section{break-inside:avoid-page}section.long{break-inside:auto}
.screen{display:none}h2{break-after:avoid-page}
tr{break-inside:avoid}body{font-size:11pt}.skip{display:none}}
"""
