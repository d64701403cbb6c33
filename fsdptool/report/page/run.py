"""A run as one self-contained page: curves, memory against the plan, ranks and events."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from fsdptool.formatting import amount, elapsed, printable
from fsdptool.records.diagnostic import Answer
from fsdptool.records.run import PhaseMemory, RunView
from fsdptool.report.console.train import Progress
from fsdptool.report.page.charts import NARROW, in_both_widths
from fsdptool.report.page.parts import foot, html_table, page
from fsdptool.runs.view import History

_HEIGHT, _TOP, _BOTTOM = 260, 14, 214

_STATES = {"completed": "fits", "running": "fits", "failed": "does_not_fit", "dead": "does_not_fit"}


def run_page(answer: Answer[RunView], history: History) -> str:
    """Return the page of a run, as HTML text.

    Args:
        answer: The run as it stands.
        history: The course of the run.
    """
    view = answer.body
    parts = run_parts(view, history).values()
    sections = (*parts, foot(answer.envelope.inputs_digest))
    title = f"{view.model or view.folder}: {view.state}"
    return page(printable(title), "\n".join(section for section in sections if section))


def run_parts(view: RunView, history: History) -> dict[str, str]:
    """Return the sections of a run's page by name, in order; a section without anything to show is empty.

    Args:
        view: The run as it stands.
        history: The course of the run.
    """
    return {
        "head": _head(view),
        "failure": _failure(view),
        "loss": _loss(history),
        "rate": _rate(history),
        "memory": _memory(view),
        "ranks": _ranks(view),
        "events": _events(history),
    }


def _head(run: RunView) -> str:
    total = run.total_steps
    cards = [("steps", f"{run.step:,}", f"of {total:,}" if total else "")]
    if run.loss is not None:
        cards.append(("loss", f"{run.loss:.4f}", "last step"))
    if run.tokens_per_second is not None:
        cards.append(("throughput", f"{run.tokens_per_second:,.0f} tokens/s", _per_step(run)))
    elif run.samples_per_second is not None:
        cards.append(("throughput", f"{run.samples_per_second:,.2f} samples/s", _per_step(run)))
    if run.measured_peak_bytes is not None:
        planned = run.predicted_peak_bytes
        note = f"planned {amount(planned)}" if planned is not None else "not planned"
        cards.append(("allocated peak, measured", amount(run.measured_peak_bytes), note))
    if run.eta_seconds is not None:
        cards.append(("remaining", elapsed(run.eta_seconds), "estimate"))
    if run.last_checkpoint is not None:
        cards.append(("checkpoint", f"step {run.last_checkpoint}", "newest complete one"))
    figures = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(note)}</small></dd></div>"
        for name, value, note in cards
    )
    ranks = f"{run.world_size} rank{'s' if run.world_size != 1 else ''}"
    place = ", ".join((*run.nodes, *(f"GPU {gpu}" for gpu in run.gpus))) or run.device
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(run.started))
    return (
        f'<header><p class="soft">{escape(_safe(run.folder))} · {ranks} on {escape(_safe(place))}'
        f" · started {started}</p>"
        f'<h1>{escape(_safe(run.model or "run"))}: <span class="{_STATES.get(run.state, "unknown")}">'
        f"{run.state}</span></h1><dl>{figures}</dl></header>"
    )


def _per_step(run: RunView) -> str:
    return f"{run.step_seconds:.3g} s per step" if run.step_seconds is not None else ""


def _safe(text: object) -> str:
    return printable(str(text))


def _failure(run: RunView) -> str:
    failure = run.failure
    if failure is None:
        if run.state != "dead":
            return ""
        text = "The processes are gone, and no summary says how the run ended."
        return f'<section><h2>How it ended</h2><p class="run-note">{text}</p></section>'
    advice = f"<br>{escape(_safe(failure.help))}" if failure.help else ""
    return (
        '<section><h2>How it ended</h2><p class="run-note"><b class="does_not_fit">'
        f"{escape(_safe(failure.message))}</b>{advice}</p></section>"
    )


def _loss(history: History) -> str:
    points = [(point.step, point.loss) for point in history.points if point.loss is not None]
    chart = _curves("Training loss", "loss", points, "{:.4g}".format, marks=history.evaluations)
    marks = " Circles are validation losses." if history.evaluations else ""
    return _chart_section("Loss", chart, f"{_thinned(history)}{marks}")


def _rate(history: History) -> str:
    # The first step of a run compiles and allocates.
    points = [(point.step, point.rate) for point in history.points[1:] if point.rate is not None]
    chart = _curves("Throughput", f"{history.unit}/s", points, "{:,.4g}".format, zero=True)
    return _chart_section("Throughput", chart, _thinned(history))


def _thinned(history: History) -> str:
    size = history.steps_per_point
    return f"Each point is the mean of {size} steps." if size > 1 else "Each point is one step."


def _chart_section(title: str, chart: str, note: str) -> str:
    if not chart:
        return ""
    return f'<section><h2>{title}</h2>{chart}<p class="soft">{note}</p></section>'


def _curves(
    title: str,
    unit: str,
    points: Sequence[tuple[int, float]],
    form: Callable[[float], str],
    *,
    marks: Sequence[tuple[int, float]] = (),
    zero: bool = False,
) -> str:
    """Return a line over the steps, for broad and for narrow screens; empty with fewer than two points."""
    if len(points) < 2:
        return ""
    return in_both_widths(lambda width: _curve(title, unit, points, form, width, marks=marks, zero=zero))


def _curve(
    title: str,
    unit: str,
    points: Sequence[tuple[int, float]],
    form: Callable[[float], str],
    width: int,
    *,
    marks: Sequence[tuple[int, float]],
    zero: bool,
) -> str:
    """Return a line over the steps with both axes' ticks, ``width`` units wide."""
    left = 84 if width > NARROW else 56
    values = [value for _, value in (*points, *marks)]
    low, high = (0.0 if zero else min(values)), max(values)
    ticks = axis_ticks(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = points[0][0], points[-1][0]

    def place(step: float, value: float) -> tuple[float, float]:
        x = left + (step - first) / max(last - first, 1) * (width - left - 24)
        return x, _BOTTOM - (value - low) / ((high - low) or 1.0) * (_BOTTOM - _TOP)

    body = []
    for value in ticks:
        _, y = place(first, value)
        body.append(f'<line class="grid" x1="{left}" y1="{y:.1f}" x2="{width}" y2="{y:.1f}"/>')
        body.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{form(value)}</text>')
    for step in axis_ticks(first, last):
        if first <= step <= last and step == int(step):
            x, _ = place(step, low)
            body.append(f'<line class="grid" x1="{x:.1f}" y1="{_BOTTOM}" x2="{x:.1f}" y2="{_BOTTOM + 6}"/>')
            body.append(f'<text x="{x:.1f}" y="{_BOTTOM + 22}" text-anchor="middle">{step:,.0f}</text>')
    body.append(f'<text x="{width - 4}" y="{_HEIGHT - 6}" text-anchor="end">step</text>')
    body.append(f'<text x="{left}" y="{_HEIGHT - 6}">{escape(unit)}</text>')
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
    body.append(f'<polyline class="loss" points="{line}"/>')
    for step, value in marks:
        if first <= step <= last:
            x, y = place(step, value)
            label = escape(f"step {step}: {form(value)}")
            body.append(
                f'<circle class="held" cx="{x:.1f}" cy="{y:.1f}" r="5"><title>{label}</title></circle>'
            )
    label = f"{title}, step {first} to {last}: {form(points[0][1])} to {form(points[-1][1])}"
    return (
        f'<svg viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(body)}</svg>'
    )


def axis_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round values that enclose ``low`` to ``high``."""
    # Differences that no axis can show would be beyond the least number.
    span = max((high - low) or abs(high) or 1.0, 1e-30)
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * base for base in (1, 2, 5, 10) if span / (power * base) <= count)
    begin = math.floor(low / step)
    end = max(math.ceil(high / step), begin + 1)
    return [round(index * step, 12) for index in range(begin, end + 1)]


def _memory(run: RunView) -> str:
    phases = [phase for phase in run.memory if phase.predicted_bytes or phase.measured_bytes]
    if not phases:
        return ""
    rows = []
    most = max(max(phase.predicted_bytes or 0, phase.measured_bytes or 0) for phase in phases)
    for phase in phases:
        planned, seen = phase.predicted_bytes, phase.measured_bytes
        cells = (
            amount(planned) if planned is not None else "not planned",
            amount(seen) if seen is not None else "not measured",
            f"{phase.error_percent:+.1f} %" if phase.error_percent is not None else "",
        )
        figures = "".join(f'<td class="n">{cell}</td>' for cell in cells)
        rows.append(
            f'<tr><th scope="row">{escape(_safe(phase.name))}</th>'
            f'<td class="wide">{_pair(phase, most)}</td>{figures}</tr>'
        )
    heads = ("phase", "planned above measured", "planned", "measured", "error")
    table = html_table("Allocated peak per rank by phase", heads, rows, numbers=(2, 3, 4), cards=True)
    key = (
        '<ul class="key"><li><span class="swatch planned"></span>planned</li>'
        '<li><span class="swatch measured"></span>measured, largest rank</li></ul>'
    )
    return f"<section><h2>Memory against the plan</h2>{key}{table}</section>"


def _pair(phase: PhaseMemory, most: int) -> str:
    """Return two bars, planned above measured bytes, as parts of the largest figure of all phases."""
    bars = "".join(
        f'<rect class="{kind}" x="0" y="{y}" width="{max(size / most * 100, 0.3):.2f}" height="4"/>'
        for kind, size, y in (("planned", phase.predicted_bytes, 1), ("measured", phase.measured_bytes, 6))
        if size is not None
    )
    return (
        f'<svg viewBox="0 0 100 11" preserveAspectRatio="none" class="pair" aria-hidden="true">{bars}</svg>'
    )


def _ranks(run: RunView) -> str:
    if not run.ranks:
        return ""
    latest = max(rank.progressed for rank in run.ranks)
    rows = []
    for rank in run.ranks:
        step = rank.step if rank.step is not None else ""
        waits = "for other ranks" if rank.waiting else ""
        rows.append(
            f'<tr><th scope="row">{rank.rank}</th><td>{escape(_safe(rank.phase))}</td>'
            f'<td class="n">{step}</td><td class="n">{elapsed(latest - rank.progressed)}</td>'
            f"<td>{waits}</td></tr>"
        )
    heads = ("rank", "last phase", "step", "behind", "waiting")
    table = html_table("What every rank did last", heads, rows, numbers=(2, 3), tall=len(rows) > 16)
    return f"<section><h2>Ranks</h2>{table}</section>"


def _events(history: History) -> str:
    rows = []
    for event in history.events:
        when = time.strftime("%m-%d %H:%M:%S", time.gmtime(event["time"]))
        rows.append(
            f'<tr><td class="word">{when}</td><td class="n">{escape(_safe(event.get("rank", "")))}</td>'
            f'<td class="wide">{escape(event_text(event))}</td></tr>'
        )
    if not rows:
        return ""
    table = html_table("Events, UTC", ("time", "rank", "event"), rows, numbers=(1,), tall=len(rows) > 16)
    more = f'<p class="soft">{history.omitted} earlier events are left out.</p>' if history.omitted else ""
    return f'<section class="long"><h2>Events</h2>{more}{table}</section>'


def event_text(event: Mapping[str, Any]) -> str:
    """Return an event in one line, as the display of a run says it."""
    kind = str(event.get("kind"))
    if kind == "failure":
        return _safe(f"failure: {event.get('message')}")
    if kind in ("started", "finished"):
        status = f": {event['status']} at step {event.get('step')}" if "status" in event else ""
        return _safe(f"{kind}{status}")
    said = io.StringIO()
    Progress(None, stream=said)(event)
    return _safe(" ".join(said.getvalue().split())) or _safe(kind.replace("_", " "))
