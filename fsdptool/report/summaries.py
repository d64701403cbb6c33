"""Every record of the Python interface in a few lines, and the words of comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fsdptool.formatting import amount, count, printable
from fsdptool.records.command_documents import ComparedFigure, Comparison, Figure, FigureUnit
from fsdptool.records.detection import Detection
from fsdptool.records.diagnostic import Answer, Diagnostic
from fsdptool.records.plan import Plan
from fsdptool.report import file_words
from fsdptool.report import plan_words as words
from fsdptool.report.console.findings import reader_lines
from fsdptool.report.plan_words import duration, rate

if TYPE_CHECKING:
    from fsdptool.config.result import Reading
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.run import Summary


_SHOWN_FINDINGS = 6
_SHOWN_FIGURES = 8


def plan_lines(plan: Plan) -> list[str]:
    """Return a plan in a few lines: verdict, configuration, memory, speed, and what else it holds."""
    candidate = words.shown(plan)
    lines = [
        words.headline(plan),
        f"{candidate.id}: {words.brief(candidate.settings)}",
        words.need(candidate, plan.unknowns),
    ]
    if candidate.step_seconds is not None:
        lines.append(
            f"{words.duration(candidate.step_seconds)} per step, {words.speed(candidate)} (estimate)"
        )
    held = [
        _counted(len(plan.candidates), "candidate"),
        _counted(len(plan.next_steps), "suggestion"),
        *_severities(plan.diagnostics),
    ]
    return _printable([*lines, ", ".join(held)])


def detection_lines(answer: Answer[Detection]) -> list[str]:
    """Return a detection in a few lines: class, size, wrap classes with the reason, and findings."""
    detection = answer.body
    model, wrap, total = detection.model, detection.wrap, detection.parameters
    lines = [
        f"{detection.reference.id}: {model.class_}, {total.total:,} parameters (exact)",
        f"wrap: {', '.join(wrap.classes) or 'nothing'}",
    ]
    chosen = [f"{item.name}: {item.reason}" for item in detection.classes if item.chosen]
    lines += [f"  {text}" for text in chosen[:3]]
    largest = detection.largest_unit
    lines.append(
        f"{len(detection.units)} FSDP units ({wrap.layout} layout); the largest is {largest.id}:"
        f" {count(largest.parameters)}, {largest.share:.1%} of all"
    )
    if detection.ties:
        lines.append(_counted(len(detection.ties), "group") + " of tied parameters")
    return _printable([*lines, *_found(answer.envelope.diagnostics)])


def comparison_lines(comparison: Comparison) -> list[str]:
    """Return a comparison in a few lines: its error, and the figures that differ."""
    differing = [row for row in comparison.rows if row.left != row.right]
    lines = [headline(comparison)]
    for row in differing[:_SHOWN_FIGURES]:
        what, left, right, percent = figure_cells(row)
        lines.append(f"{what}: {left} -> {right}{f' ({percent})' if percent else ''}")
    if len(differing) > _SHOWN_FIGURES:
        lines.append(f"... and {len(differing) - _SHOWN_FIGURES} more")
    return _printable(lines)


def verdict_lines(readings: Sequence[Reading]) -> list[str]:
    """Return the findings in files in a few lines, the most severe first."""
    findings = [item for reading in readings for item in reading.diagnostics]
    count_of = ", ".join(_severities(findings)) or "no findings"
    lines = [f"{_counted(len(readings), 'file')}: {count_of}"]
    order = {"error": 0, "warning": 1, "info": 2}
    findings.sort(key=lambda item: order[item.severity])
    for item in findings[:_SHOWN_FINDINGS]:
        place = f"{item.path or 'text'}:{item.line}" if item.line is not None else item.path or "text"
        lines.append(f"{place}: {item.severity} {item.code} {item.message}")
    if len(findings) > _SHOWN_FINDINGS:
        lines.append(f"... and {len(findings) - _SHOWN_FINDINGS} more")
    return _printable(lines)


def explained_lines(reading: Reading, run: DescribedRun | None) -> list[str]:
    """Return an explained file in a few lines: who reads it, whether FSDP runs, the run, and findings."""
    lines = reader_lines(reading, described=run is not None)
    if run is not None:
        lines.append(file_words.described_in_short(run, run.accumulation))
    return _printable([*lines, *_found(reading.diagnostics)])


def run_lines(summary: Summary) -> list[str]:
    """Return a run that ended in a few lines: steps, memory, speed, checkpoint and failure."""
    ranks = _counted(summary.world_size, "rank")
    lines = [f"{summary.status}: {_counted(summary.steps, 'step')} on {ranks}"]
    if summary.failure is not None:
        lines.append(summary.failure.message)
    measured = max((peak for peak in summary.measured_peak_bytes if peak is not None), default=None)
    lines.append(
        f"peak memory per rank: {amount(summary.predicted_peak_bytes)} predicted, {amount(measured)} measured"
    )
    if (median := summary.throughput.get("step_seconds_median")) is not None:
        lines.append(f"{duration(median)} per step (median)")
    if summary.last_checkpoint is not None:
        lines.append(f"last checkpoint: {summary.last_checkpoint}")
    return _printable(lines)


def _found(diagnostics: Iterable[Diagnostic]) -> list[str]:
    serious = [item for item in diagnostics if item.severity != "info"]
    lines = [f"{item.severity} {item.code}: {item.message}" for item in serious[:_SHOWN_FINDINGS]]
    rest = len(serious) - _SHOWN_FINDINGS
    return [*lines, f"... and {rest} more"] if rest > 0 else lines


def _severities(diagnostics: Iterable[Diagnostic]) -> list[str]:
    found = [item.severity for item in diagnostics]
    names = {"error": "error", "warning": "warning", "info": "note"}
    return [_counted(found.count(kind), name) for kind, name in names.items() if kind in found]


def _counted(value: int, noun: str) -> str:
    return f"{value} {noun}{'s' * (value != 1)}"


def _printable(lines: Iterable[str]) -> list[str]:
    return [printable(line) for line in lines]


def headline(comparison: Comparison) -> str:
    """Return what is compared and, for a run, how far the prediction is off, in one line."""
    sides = f"{comparison.left} and {comparison.right}"
    error = comparison.error_percent
    if error is None:
        return sides
    if round(error, 2) == 0:
        return f"{sides}: the predicted peak equals the measured one to 0.01 %"
    where = "above" if error >= 0 else "below"
    return f"{sides}: the predicted peak is {abs(error):.2f} % {where} the measured one"


def figure_cells(row: ComparedFigure) -> tuple[str, str, str, str]:
    """Return a figure's name, both sides and their difference as text."""
    percent = f"{row.percent:+.1f} %" if row.percent is not None else ""
    return row.what, _cell(row.left, row.unit), _cell(row.right, row.unit), percent


_FORMS: Mapping[FigureUnit, Callable[[Any], str]] = {"bytes": amount, "seconds": duration, "rate": rate}


def _cell(value: Figure, unit: FigureUnit) -> str:
    if value is None:
        return "unknown" if unit != "text" else "none"
    return _FORMS[unit](value) if unit in _FORMS else str(value)
