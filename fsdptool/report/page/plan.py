"""Plans, sweeps and comparisons as self-contained pages: no network, no script; light and dark, printable."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fsdptool.formatting import amount
from fsdptool.records.advice import Suggestion
from fsdptool.records.codec import to_json
from fsdptool.records.command_documents import ComparedFigure, Comparison, Figure, Sweep, SweepRow
from fsdptool.records.diagnostic import Answer, digest
from fsdptool.records.plan import Candidate, Plan, SearchPoint
from fsdptool.report import file_words
from fsdptool.report import plan_tables as tables
from fsdptool.report import plan_words as words
from fsdptool.report.page import charts
from fsdptool.report.page.parts import CHARTS, breaking, finding_lines, foot, html_table, notes, page, section
from fsdptool.report.plan_words import duration
from fsdptool.report.summaries import figure_cells, headline


def plan_page(plan: Plan) -> str:
    """Return the page of a plan plan, as HTML text."""
    return page(words.headline(plan), plan_body(plan))


def plan_file(plan: Plan, suffix: str) -> str:
    """Return the text of a plan's file: a picture for ``.svg``, a page for any other suffix."""
    return plan_picture(plan) if suffix == ".svg" else plan_page(plan)


@dataclass(frozen=True, slots=True)
class Links:
    """What a page that answers requests adds to the sections; a written page has none of it.

    Attributes:
        candidate: From a candidate to the address that shows it, or None.
        change: From a suggestion to the address with that change, or None where options cannot say it.
        marked: Settings of the candidate that is shown elsewhere on the page, to mark in the chart.
        cursor: Whether a script moves a cursor over the timeline.
        others: Whether to list candidates that are neither chosen nor on the front.
    """

    candidate: Callable[[Candidate], str | None] = lambda _: None
    change: Callable[[Suggestion], str | None] = lambda _: None
    marked: SearchPoint | None = None
    cursor: bool = False
    others: bool = True


def plan_body(plan: Plan) -> str:
    """Return the page's sections."""
    sections = [*plan_parts(plan).values(), candidates_section(plan)]
    sections += [findings_section(plan), _inputs(plan), foot(digest(plan.inputs))]
    return "\n".join(section for section in sections if section)


def plan_parts(plan: Plan, links: Links = Links()) -> dict[str, str]:
    """Return the sections about the shown candidate by name, in order; some may be empty."""
    candidate = words.shown(plan)
    return {
        "head": _head(plan, candidate),
        "memory": _memory(candidate, links),
        "time": _time(candidate),
        "offers": _offers(plan),
        "batches": _batches(plan),
        "lengths": _lengths(plan),
        "stages": _stages(plan),
        "changes": changes_section(plan, links),
        "settings": _settings(plan, candidate),
    }


def _head(plan: Plan, candidate: Candidate) -> str:
    verdict = plan.verdict
    answer = words.verdict(verdict, candidate.fit_share)
    model = plan.inputs.model
    where = plan.details.clusters[candidate.settings.cluster]
    title = f"{escape(model.reference)} on {escape(where)}"
    figures = [
        ("memory per rank", amount(candidate.device_total_bytes), _spare(candidate)),
        ("allocated at the peak", amount(candidate.allocated_peak_bytes), _moment(candidate)),
    ]
    if candidate.reserved_peak_bytes is not None:
        note = f"caching allocator{words.reserved_range(candidate)}"
        figures.append(("reserved", amount(candidate.reserved_peak_bytes), note))
    if candidate.step_seconds is not None:
        figures.append(
            ("step time", duration(candidate.step_seconds), f"estimate{words.time_range(candidate)}")
        )
        mfu = f"MFU {candidate.mfu:.0%}, estimate" if candidate.mfu is not None else "estimate"
        figures.append(("throughput", words.speed(candidate), mfu))
    if run := words.run_of(plan):
        price = f"price {words.money(run.price_per_run)}, " if run.price_per_run is not None else ""
        steps = f"{plan.inputs.recipe.steps:,} steps, " if plan.inputs.recipe.steps else ""
        figures.append(("whole run", duration(run.run_seconds), f"{price}{steps}estimate"))
    if candidate.host_bytes_per_node:
        figures.append(("host memory per node", amount(candidate.host_bytes_per_node), words.host(plan)))
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in figures
    )
    parameters = f"{model.parameters:,} parameters" if model.parameters else ""
    at = escape(words.assumptions(plan))
    reading = (
        *file_words.described(plan),
        *file_words.unread(plan),
        *file_words.loop(plan),
        *words.shortfall(plan),
    )
    settings = [words.dtypes(plan), words.compilation(candidate), words.fused_loss(candidate)]
    lora = plan.inputs.recipe.method.lora if plan.details.adapter else None
    settings += [f"trains the LoRA adapter: {words.lora_words(lora)}"] if lora is not None else []
    decided = [*(line for line in settings if line), *words.spare_memory(plan), *words.mesh_reasons(plan)]
    decided += words.largest_batches(plan)
    return (
        f'<header><p class="soft">{escape(model.class_ or "")} · {parameters}</p>'
        f'<h1>{title}: <span class="{verdict}">{answer}</span>{at}</h1>'
        f"<p>{escape(_sentence(words.need(candidate, plan.unknowns)))}</p>"
        f'<p class="soft">Shown: {escape(candidate.id)}, {escape(words.brief(candidate.settings))}.</p>'
        f"{''.join(f'<p>{escape(_sentence(line))}</p>' for line in reading)}"
        f"<dl>{cards}</dl>{''.join(f'<p>{escape(_sentence(line))}</p>' for line in decided)}</header>"
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _spare(candidate: Candidate) -> str:
    usable, slack = candidate.usable_bytes, candidate.slack_bytes
    if usable is None:
        return "the usable memory is unknown"
    if slack is None:
        return f"of {amount(usable)} usable"
    rest = f"{amount(slack)} free" if slack >= 0 else f"{amount(-slack)} too much"
    return f"of {amount(usable)} usable: {rest}"


def _moment(candidate: Candidate) -> str:
    return candidate.peak.moment if candidate.peak is not None else "unknown"


def _memory(candidate: Candidate, links: Links) -> str:
    total = candidate.device_total_bytes or 0
    rows = []
    for item in sorted(candidate.components, key=lambda item: -(item.bytes or 0)):
        name = escape(item.name.replace("_", " "))
        rows.append(
            f'<tr><th scope="row"><span class="swatch k-{item.name.group}"></span>&#8288;{name}</th>'
            f'<td class="n">{amount(item.bytes)}</td><td class="n">{words.share(item.bytes, total)}</td>'
            f"<td>{words.MARKS[item.basis]}</td></tr>"
        )
    key = "".join(
        f'<li><span class="swatch k-{group}"></span>{escape(group.legend)}</li>'
        for group in charts.legend(candidate)
    )
    table = html_table(
        "Memory of one rank at its peak", ("component", "bytes", "share", "basis"), rows, numbers=(1, 2)
    )
    bar = charts.in_both_widths(lambda width: charts.memory_bar(candidate, width))
    line = charts.in_both_widths(lambda width: charts.timeline(candidate, width))
    keys = f'<ul class="key">{key}</ul>'
    cursor = charts.cursor(candidate) if links.cursor else ""
    body = f"<h2>Memory over one step</h2>{line}{cursor}{keys}{_moments(candidate)}"
    over = f"<section>{body}</section>" if line else ""
    run = _phases(candidate)
    over += f"<section>{run}</section>" if run else ""
    return f"<section><h2>One rank at its peak</h2>{bar}{keys}{table}</section>{over}"


def _moments(candidate: Candidate) -> str:
    rows = [
        f'<tr><th scope="row">{escape(moment.name)}</th>'
        f'<td class="n">{amount(moment.allocated_bytes)}</td></tr>'
        for moment in candidate.timeline
    ]
    table = html_table(
        "Allocated bytes after each event", ("event", "allocated"), rows, numbers=(1,), tall=True
    )
    return f'<details class="screen"><summary>Show as a table</summary>{table}</details>'


def _phases(candidate: Candidate) -> str:
    rows = [
        f'<tr><th scope="row">{escape(name)}</th><td class="wide">{escape(what)}</td>'
        f'<td class="n">{escape(device)}</td><td class="n">{escape(host)}</td><td>{escape(basis)}</td></tr>'
        for name, what, device, host, basis in words.phases(candidate)
    ]
    if not rows:
        return ""
    heads = ("phase", "description", "device, allocated", "host, per rank", "basis")
    table = html_table("Peak memory of one rank in each phase", heads, rows, numbers=(2, 3), cards=True)
    return f"<h2>Memory over the run</h2>{table}"


def _time(candidate: Candidate) -> str:
    parts = {name: value for name, value in candidate.seconds.items() if value}
    if not parts:
        return ""
    rows = [
        f'<tr><th scope="row">{escape(name.replace("_", " "))}</th><td class="n">{duration(value)}</td></tr>'
        for name, value in parts.items()
    ]
    table = html_table("Step time by part", ("part", "time"), rows, numbers=(1,))
    note = (
        '<p class="soft">Estimates. Exposed communication is communication that compute does not overlap.</p>'
    )
    waits = words.bound(candidate)
    waits = f"<p>{escape(_sentence(waits))}</p>" if waits else ""
    return f"<section><h2>Step time by part</h2>{note}{waits}{table}</section>"


def _offers(plan: Plan) -> str:
    if len(plan.details.clusters) < 2:
        return ""
    heads, offers = words.offers(plan)
    rows = [
        f"<tr{' class=chosen' if offer.candidate == plan.chosen else ''}>"
        f'<th scope="row">{escape(name)}</th>'
        + "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for offer, (name, *cells) in zip(plan.details.offers, offers, strict=True)
    ]
    table = html_table("Offers", heads, rows, numbers=range(1, len(heads)), cards=True)
    return f"<section><h2>Offers</h2>{table}</section>"


def _batches(plan: Plan) -> str:
    heads, rows = tables.tried_batches(plan)
    if len(rows) < 2:
        return ""
    return _section_of_rows("Largest micro-batch by settings", heads, rows, numbers=(2, 3, 4))


def _lengths(plan: Plan) -> str:
    if plan.lengths is None:
        return ""
    heads, rows = tables.traced_lengths(plan.lengths)
    return _section_of_rows("Lengths that vary", heads, rows, tables.lengths(plan.lengths), numbers=range(5))


def _stages(plan: Plan) -> str:
    pipeline = plan.details.pipeline
    if pipeline is None:
        return ""
    heads, rows = tables.stages(pipeline)
    return _section_of_rows(
        "Pipeline stages", heads, rows, [tables.pipeline_line(pipeline)], numbers=(0, 2, 3, 4, 5, 6)
    )


def _section_of_rows(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    lines: Sequence[str] = (),
    *,
    numbers: Sequence[int],
) -> str:
    """Return a section of lines and a table of texts, the first cell of each row its head."""
    cells = [
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(
            f"<td{' class=n' if place in numbers else ''}>{escape(cell)}</td>"
            for place, cell in enumerate(rest, start=1)
        )
        + "</tr>"
        for first, *rest in rows
    ]
    table = html_table(title, heads, cells, numbers=numbers, cards=True) if cells else ""
    said = "".join(f"<p>{escape(_sentence(line))}</p>" for line in lines)
    return f"<section><h2>{title}</h2>{said}{table}</section>"


def changes_section(plan: Plan, links: Links) -> str:
    """Return the section of the suggested changes; empty without any."""
    if not plan.next_steps:
        return ""
    classes = {True: "fits", False: "does_not_fit", None: "unknown"}
    rows = []
    for step in plan.next_steps:
        address = links.change(step)
        apply = f'<br><a class="button quiet small" href="{escape(address)}">Apply</a>' if address else ""
        rows.append(
            f'<tr><th scope="row" class="wide">{escape(words.change_words(step))}{apply}</th>'
            f'<td class="n">{amount(step.device_total_bytes)}</td>'
            f'<td class="n">{words.speed(step) if step.samples_per_second else ""}</td>'
            f'<td class="word {classes[step.fits]}">{words.FITS[step.fits]}</td>'
            f'<td class="wide">{escape(step.cost)}</td></tr>'
        )
    heads = ("change", "memory", "speed", "verdict", "cost")
    table = html_table("Suggested changes", heads, rows, numbers=(1, 2), cards=True)
    return f"<section><h2>Suggested changes</h2>{table}</section>"


def _settings(plan: Plan, candidate: Candidate) -> str:
    rows = [
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in words.configuration(plan, candidate.settings)
    ]
    table = html_table("Configuration", ("setting", "value"), rows)
    return f"<section><h2>Configuration</h2>{table}</section>"


def candidates_section(plan: Plan, links: Links = Links()) -> str:
    """Return the section of all candidates: their chart, the chosen one and the front, and the others."""
    candidates = plan.candidates
    if len(candidates) < 2:
        return ""
    front = {name: place for place, name in enumerate(plan.details.front)}
    best = [item for item in candidates if item.id == plan.chosen or item.id in front]
    best.sort(key=lambda item: (item.id != plan.chosen, front.get(item.id, -1)))
    shown_ids = {item.id for item in best}
    rest = [item for item in candidates if item.id not in shown_ids]
    shown = _rows("The chosen candidate and the Pareto front", plan, best) if best else ""
    # Thousands of rows are for looking a configuration up, not for paper.
    others = (
        f'<details class="screen"><summary>{len(rest)} other candidates, with reasons</summary>'
        f"{_rows('Every other candidate', plan, rest)}</details>"
        if rest and links.others
        else ""
    )
    chart = charts.in_both_widths(lambda width: charts.scatter(plan, width, links.candidate, links.marked))
    title = f"{len(candidates)} candidates"
    return f'<section class="long"><h2>{title}</h2>{chart}{shown}{others}</section>'


def _rows(caption: str, plan: Plan, items: Iterable[Candidate]) -> str:
    front = set(plan.details.front)
    clusters = plan.details.clusters
    items = list(items)
    priced = any(item.price_per_million_samples is not None for item in items)
    rows = []
    for item in items:
        chosen = item.id == plan.chosen
        mark = " (chosen)" if chosen else " (Pareto front)" if item.id in front else ""
        settings = words.brief(item.settings)
        if len(clusters) > 1:
            settings = f"{clusters[item.settings.cluster]}; {settings}"
        price = f'<td class="n">{words.money(item.price_per_million_samples)}</td>' if priced else ""
        rows.append(
            f'<tr{" class=chosen" if chosen else ""}><th scope="row">{escape(item.id)}{mark}</th>'
            f'<td class="n">{amount(item.device_total_bytes)}</td>'
            f'<td class="n">{duration(item.step_seconds)}</td><td class="n">{words.speed(item)}</td>'
            f'{price}<td class="wide">{escape(settings)}</td>'
            f'<td class="wide">{escape(words.reason(item))}</td></tr>'
        )
    prices = ("price per million",) if priced else ()
    heads = ("candidate", "memory", "step time", "throughput", *prices, "settings", "rejected by")
    numbers = range(1, 5 if priced else 4)
    return html_table(caption, heads, rows, numbers=numbers, tall=True, cards=True)


def findings_section(plan: Plan) -> str:
    """Return the section of diagnostics and notes; empty where there are none."""
    lines = [f"<li><b>unknown</b>: {escape(text)}</li>" for text in plan.unknowns]
    lines += finding_lines(plan.diagnostics)
    lines += [f"<li>{escape(text)}</li>" for text in plan.details.notes]
    if plan.confidence != "verified":
        lines.append("<li><b>confidence</b>: unverified for this torch version</li>")
    return (
        f'<section><h2>Diagnostics and notes</h2><ul class="notes">{"".join(lines)}</ul></section>'
        if lines
        else ""
    )


def _inputs(plan: Plan) -> str:
    inputs = {key: value for key, value in to_json(plan.inputs).items() if key != "machines"}
    text = escape(json.dumps(inputs, indent=2, ensure_ascii=False))
    return (
        '<section class="long screen"><h2>Inputs</h2><details>'
        f'<summary>The inputs of the plan</summary><pre tabindex="0">{text}</pre></details></section>'
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
    inside = charts.BROAD - 40
    for part, height in (
        (charts.memory_bar(candidate, inside), 80),
        (charts.timeline(candidate, inside), 292),
    ):
        if part:
            inner = part.replace("<svg ", f'<svg x="20" y="{y}" width="{inside}" height="{height}" ', 1)
            shapes.append(inner)
            y += height + 14
    x = 20.0
    for group in charts.legend(candidate):
        shapes.append(f'<rect class="g-{group}" x="{x:.0f}" y="{y}" width="11" height="11"/>')
        shapes.append(f'<text x="{x + 17:.0f}" y="{y + 10}" font-size="11">{escape(group.legend)}</text>')
        x += 36 + len(group.legend) * 5.9
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {charts.BROAD} {y + 28}" role="img"'
        f' aria-labelledby="plan-title"><title id="plan-title">{escape(headline)}</title>'
        f"<style>{CHARTS}</style>{''.join(shapes)}</svg>\n"
    )


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
