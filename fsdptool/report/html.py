"""A plan as one self-contained page: no network, no script; keyboard, print, light and dark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from fsdptool.formatting import amount
from fsdptool.report import html_charts as charts
from fsdptool.report import plan_words as words
from fsdptool.report.html_page import foot, frame, html_table, page
from fsdptool.report.html_scatter import scatter
from fsdptool.report.plan_words import duration


def plan_page(document: Mapping[str, Any]) -> str:
    """Return the page of a plan document, as HTML text."""
    return page(words.headline(document), plan_body(document))


def plan_file(document: Mapping[str, Any], suffix: str) -> str:
    """Return the text of a plan's file: a picture for ``.svg``, a page for any other suffix."""
    return charts.plan_picture(document) if suffix == ".svg" else plan_page(document)


def plan_fragment(document: Mapping[str, Any]) -> str:
    """Return what a notebook shows of a plan."""
    return frame("fsdptool plan", plan_page(document))


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

    candidate: Callable[[Mapping[str, Any]], str | None] = lambda _: None
    change: Callable[[Mapping[str, Any]], str | None] = lambda _: None
    marked: Mapping[str, Any] | None = None
    cursor: bool = False
    others: bool = True


def plan_body(document: Mapping[str, Any]) -> str:
    """Return the page's sections."""
    sections = [*plan_parts(document).values(), candidates_section(document), *_end(document)]
    return "\n".join(section for section in sections if section)


def plan_parts(document: Mapping[str, Any], links: Links = Links()) -> dict[str, str]:
    """Return the sections about the shown candidate by name, in order; some may be empty."""
    candidate = words.shown(document)
    return {
        "head": _head(document, candidate),
        "memory": _memory(candidate, links),
        "time": _time(candidate),
        "offers": _offers(document),
        "changes": changes_section(document, links),
        "settings": _settings(document, candidate),
    }


def _end(document: Mapping[str, Any]) -> list[str]:
    return [findings_section(document), _inputs(document), foot(document)]


def _head(document: Mapping[str, Any], candidate: Mapping[str, Any]) -> str:
    verdict = document["verdict"]
    model = document["inputs"]["model"]
    where = document["details"]["clusters"][candidate["settings"]["cluster"]]
    title = f"{escape(model['reference'])} on {escape(where)}"
    figures = [
        ("memory per rank", amount(candidate["device_total_bytes"]), _spare(candidate)),
        ("allocated at the peak", amount(candidate["allocated_peak_bytes"]), _moment(candidate)),
    ]
    if candidate["reserved_peak_bytes"] is not None:
        note = f"caching allocator{words.reserved_range(document, candidate)}"
        figures.append(("reserved", amount(candidate["reserved_peak_bytes"]), note))
    if candidate["step_seconds"] is not None:
        figures.append(
            ("step time", duration(candidate["step_seconds"]), f"estimate{words.time_range(candidate)}")
        )
        mfu = f"MFU {candidate['mfu']:.0%}, estimate" if candidate.get("mfu") is not None else "estimate"
        figures.append(("throughput", words.speed(candidate), mfu))
    if candidate["host_bytes_per_node"]:
        figures.append(("host memory per node", amount(candidate["host_bytes_per_node"]), ""))
    cards = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in figures
    )
    parameters = f"{model['parameters']:,} parameters" if model.get("parameters") else ""
    size = words.assumed_size(document)
    at = f", at {escape(size)} (assumed)" if size else ""
    loop = (*words.unread(document), *words.loop(document))
    return (
        f'<header><p class="soft">{escape(model.get("class") or "")} · {parameters}</p>'
        f'<h1>{title}: <span class="{verdict}">{words.VERDICTS[verdict]}</span>{at}</h1>'
        f"<p>{escape(_sentence(words.need(candidate)))}</p>"
        f'<p class="soft">Shown: {escape(candidate["id"])}, {escape(words.brief(candidate["settings"]))}.</p>'
        f"{''.join(f'<p>{escape(_sentence(line))}</p>' for line in loop)}"
        f"<dl>{cards}</dl></header>"
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _spare(candidate: Mapping[str, Any]) -> str:
    usable, slack = candidate["usable_bytes"], candidate["slack_bytes"]
    if usable is None:
        return "the usable memory is unknown"
    if slack is None:
        return f"of {amount(usable)} usable"
    rest = f"{amount(slack)} free" if slack >= 0 else f"{amount(-slack)} too much"
    return f"of {amount(usable)} usable: {rest}"


def _moment(candidate: Mapping[str, Any]) -> str:
    return candidate["peak"]["moment"] if candidate["peak"] is not None else "unknown"


def _memory(candidate: Mapping[str, Any], links: Links) -> str:
    total = candidate["device_total_bytes"] or 0
    rows = []
    for item in sorted(candidate["components"], key=lambda item: -(item["bytes"] or 0)):
        group = charts.group_of(item["name"])
        share = f"{item['bytes'] / total:.1%}" if total and item["bytes"] is not None else ""
        name = escape(item["name"].replace("_", " "))
        rows.append(
            f'<tr><th scope="row"><span class="swatch k-{group}"></span>&#8288;{name}</th>'
            f'<td class="n">{amount(item["bytes"])}</td><td class="n">{share}</td>'
            f"<td>{words.MARKS[item['basis']]}</td></tr>"
        )
    key = "".join(
        f'<li><span class="swatch k-{group}"></span>{escape(group.legend)}</li>'
        for group in charts.legend(item["name"] for item in candidate["components"])
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


def _moments(candidate: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><th scope="row">{escape(moment["name"])}</th>'
        f'<td class="n">{amount(moment["allocated_bytes"])}</td></tr>'
        for moment in candidate["timeline"]
    ]
    table = html_table(
        "Allocated bytes after each event", ("event", "allocated"), rows, numbers=(1,), tall=True
    )
    return f'<details class="screen"><summary>Show as a table</summary>{table}</details>'


def _phases(candidate: Mapping[str, Any]) -> str:
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


def _time(candidate: Mapping[str, Any]) -> str:
    parts = {name: value for name, value in (candidate.get("seconds") or {}).items() if value}
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
    return f"<section><h2>Step time by part</h2>{note}{table}</section>"


def _offers(document: Mapping[str, Any]) -> str:
    if len(document["details"]["clusters"]) < 2:
        return ""
    heads, offers = words.offers(document)
    rows = [
        f"<tr{' class=chosen' if offer['candidate'] == document['chosen'] else ''}>"
        f'<th scope="row">{escape(name)}</th>'
        + "".join(f'<td class="n">{escape(cell)}</td>' for cell in cells)
        + "</tr>"
        for offer, (name, *cells) in zip(document["details"]["offers"], offers, strict=True)
    ]
    table = html_table("Offers", heads, rows, numbers=range(1, len(heads)), cards=True)
    return f"<section><h2>Offers</h2>{table}</section>"


def changes_section(document: Mapping[str, Any], links: Links) -> str:
    """Return the section of the suggested changes; empty without any."""
    if not document["next_steps"]:
        return ""
    classes = {True: "fits", False: "does_not_fit", None: "unknown"}
    rows = []
    for step in document["next_steps"]:
        address = links.change(step)
        apply = f'<br><a class="button quiet small" href="{escape(address)}">Apply</a>' if address else ""
        rows.append(
            f'<tr><th scope="row" class="wide">{escape(step["change"])}{apply}</th>'
            f'<td class="n">{amount(step["device_total_bytes"])}</td>'
            f'<td class="word {classes[step["fits"]]}">{words.FITS[step["fits"]]}</td>'
            f'<td class="wide">{escape(step["cost"])}</td></tr>'
        )
    heads = ("change", "memory", "verdict", "cost")
    table = html_table("Suggested changes", heads, rows, numbers=(1,), cards=True)
    return f"<section><h2>Suggested changes</h2>{table}</section>"


def _settings(document: Mapping[str, Any], candidate: Mapping[str, Any]) -> str:
    rows = [
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>'
        for name, value in words.configuration(document, candidate["settings"])
    ]
    table = html_table("Configuration", ("setting", "value"), rows)
    return f"<section><h2>Configuration</h2>{table}</section>"


def candidates_section(document: Mapping[str, Any], links: Links = Links()) -> str:
    """Return the section of all candidates: their chart, the chosen one and the front, and the others."""
    candidates = document["candidates"]
    if len(candidates) < 2:
        return ""
    front = {name: place for place, name in enumerate(document["details"].get("front", ()))}
    best = [item for item in candidates if item["id"] == document["chosen"] or item["id"] in front]
    best.sort(key=lambda item: (item["id"] != document["chosen"], front.get(item["id"], -1)))
    shown_ids = {item["id"] for item in best}
    rest = [item for item in candidates if item["id"] not in shown_ids]
    shown = _rows("The chosen candidate and the Pareto front", document, best) if best else ""
    # Thousands of rows are for looking a configuration up, not for paper.
    others = (
        f'<details class="screen"><summary>{len(rest)} other candidates, with reasons</summary>'
        f"{_rows('Every other candidate', document, rest)}</details>"
        if rest and links.others
        else ""
    )
    chart = charts.in_both_widths(lambda width: scatter(document, width, links.candidate, links.marked))
    title = f"{len(candidates)} candidates"
    return f'<section class="long"><h2>{title}</h2>{chart}{shown}{others}</section>'


def _rows(caption: str, document: Mapping[str, Any], items: Iterable[Mapping[str, Any]]) -> str:
    front = set(document["details"].get("front", ()))
    clusters = document["details"]["clusters"]
    rows = []
    for item in items:
        chosen = item["id"] == document["chosen"]
        mark = " (chosen)" if chosen else " (Pareto front)" if item["id"] in front else ""
        settings = words.brief(item["settings"])
        if len(clusters) > 1:
            settings = f"{clusters[item['settings']['cluster']]}; {settings}"
        price = item.get("price_per_million_samples")
        why = words.reason(item) + (f" ({price:.4g} per million samples)" if price is not None else "")
        rows.append(
            f'<tr{" class=chosen" if chosen else ""}><th scope="row">{escape(item["id"])}{mark}</th>'
            f'<td class="n">{amount(item["device_total_bytes"])}</td>'
            f'<td class="n">{duration(item["step_seconds"])}</td><td class="n">{words.speed(item)}</td>'
            f'<td class="wide">{escape(settings)}</td><td class="wide">{escape(why)}</td></tr>'
        )
    heads = ("candidate", "memory", "step time", "throughput", "settings", "rejected by")
    return html_table(caption, heads, rows, numbers=(1, 2, 3), tall=True, cards=True)


def findings_section(document: Mapping[str, Any]) -> str:
    """Return the section of diagnostics and notes; empty where there are none."""
    lines = [f"<li><b>unknown</b>: {escape(text)}</li>" for text in document["unknowns"]]
    for item in document["diagnostics"]:
        more = f"<br><small>{escape(item['help'])}</small>" if item.get("help") else ""
        text = f"{escape(item['code'])}: {escape(item['message'])}"
        lines.append(f"<li><b>{item['severity']}</b> {text}{more}</li>")
    lines += [f"<li>{escape(text)}</li>" for text in document["details"].get("notes", ())]
    if document["confidence"] != "verified":
        lines.append("<li><b>confidence</b>: unverified for this torch version</li>")
    return (
        f'<section><h2>Diagnostics and notes</h2><ul class="notes">{"".join(lines)}</ul></section>'
        if lines
        else ""
    )


def _inputs(document: Mapping[str, Any]) -> str:
    inputs = {key: value for key, value in document["inputs"].items() if key != "machines"}
    text = escape(json.dumps(inputs, indent=2, ensure_ascii=False))
    return (
        '<section class="long screen"><h2>Inputs</h2><details>'
        f'<summary>The inputs of the plan</summary><pre tabindex="0">{text}</pre></details></section>'
    )
