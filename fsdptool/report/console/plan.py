"""Plans, sweeps and comparisons on the console. Decides nothing."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, Literal

from fsdptool.formatting import amount
from fsdptool.records.command_documents import Comparison, Sweep
from fsdptool.records.mesh import PLANNED
from fsdptool.records.plan import Candidate, ComponentBytes, Plan, SearchPoint
from fsdptool.records.trace import ColourGroup
from fsdptool.report import file_words
from fsdptool.report import plan_tables as tables
from fsdptool.report import plan_words as words
from fsdptool.report.console.tables import (
    print_command,
    print_findings,
    print_line,
    print_rows,
    print_table,
    terminal_width,
)
from fsdptool.report.plan_words import curve, duration, mesh_lines
from fsdptool.report.summaries import figure_cells, headline

_SPARKS = "▁▂▃▄▅▆▇█"
_STYLES = {"fits": "bold green", "does_not_fit": "bold red", "unknown": "bold yellow"}
_FRONT = 8


def print_plan(plan: Plan, *, explain: bool = False, command: Sequence[str] | None = None) -> None:
    """Print a plan on one screen: verdict, configuration, one rank's memory, what to change.

    Args:
        plan: The plan.
        explain: Show everything else, too: states, phases, the limiting factor, every candidate, every note.
        command: The command line that was given, without what only concerns the output; None prints none.
    """
    candidate = words.shown(plan)
    print_line(words.headline(plan), style=_STYLES[plan.verdict])
    print_line(words.need(candidate, plan.unknowns))
    decides = words.host_decides(plan)
    if decides:
        print_line(words.host_line(plan), style="bold yellow")
    for line in (*file_words.described(plan), *file_words.unread(plan), *file_words.loop(plan)):
        print_line(line)
    for line in words.shortfall(plan):
        print_line(line)
    if candidate.step_seconds is not None:
        mfu = f", MFU {candidate.mfu:.0%}" if candidate.mfu is not None else ""
        step = duration(candidate.step_seconds)
        print_line(f"{step} per step, {words.speed(candidate)}{mfu} (estimates{words.time_range(candidate)})")
    for line in filter(None, (words.bound(candidate), words.duration_of_run(plan))):
        print_line(line)
    if plan.details.adapter and (lora := plan.inputs.recipe.method.lora) is not None:
        print_line(f"trains the LoRA adapter: {words.lora_words(lora)}")
    if stored := words.dtypes(plan):
        print_line(stored)
    requested = candidate.id in plan.details.asked
    name = "requested configuration" if requested else f"chosen configuration ({candidate.id})"
    print_line(f"{name}: {words.brief(candidate.settings)}")
    if compilation := words.compilation(candidate):
        print_line(compilation)
    if fused := words.fused_loss(candidate):
        print_line(fused)
    _command(plan, command)
    for line in words.spare_memory(plan):
        print_line(line)
    if not decides and candidate.host_bytes_per_node:
        print_line(words.host_line(plan))
    _components(candidate, explain=explain)
    _timeline(candidate)
    _mesh(plan, explain=explain)
    _pipeline(plan)
    if explain:
        _nearest(candidate)
        _states(plan)
        _peak(candidate)
        _phases(candidate)
        _configuration(plan, candidate)
        _seconds(candidate)
        _limit(plan, candidate)
    _lengths(plan, explain=explain)
    _offers(plan)
    _batches(plan)
    if explain or plan.chosen is None:
        _others(plan, explain=explain)
    _suggestions(plan)
    _notes(plan, explain=explain)


_SMALL = 0.01
"""Share of the total below which components are printed as one line."""


def _command(plan: Plan, command: Sequence[str] | None) -> None:
    """Print the flags of the configuration, alone or in the command that plans exactly it."""
    flags = plan.details.flags
    if not flags:
        return
    if command is None:
        print_command("flags", flags)
        return
    given = {part for part in command if part.startswith("--")}
    missing: list[str] = []
    keep = False
    for part in flags:
        if part.startswith("--"):
            # A global batch decides the accumulation.
            decided = part == "--accumulation" and "--global-batch" in given
            keep = not decided and part not in given and part.replace("--no-", "--") not in given
        missing += [part] if keep else []
    print_command("command", [*command, *missing, "--no-search"])


def print_candidates(plan: Plan, separator: Literal["tsv", "csv"]) -> None:
    """Print every candidate for programs (:func:`~fsdptool.report.console.tables.print_rows`)."""
    print_rows(*candidate_rows(plan), separator=separator)


def candidates_csv(plan: Plan) -> str:
    """Return the candidates as CSV."""
    stream = io.StringIO()
    print_rows(*candidate_rows(plan), separator="csv", stream=stream)
    return stream.getvalue()


def candidate_rows(plan: Plan) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Return column names, and a row for each candidate: bytes and seconds, None for what is unknown."""
    figures = (
        *("allocated_peak_bytes", "reserved_peak_bytes", "device_total_bytes", "usable_bytes"),
        *("host_bytes_per_node", "step_seconds", "samples_per_second", "tokens_per_second", "mfu"),
    )
    settings = [item.name for item in fields(SearchPoint) if item.name != "cluster"]
    rows: list[tuple[object, ...]] = []
    for item in plan.candidates:
        rejection = item.rejected_by
        kind = rejection.kind.value if rejection is not None else None
        values = [getattr(item.settings, name) for name in settings]
        rows.append(
            (
                item.id,
                plan.details.offers[item.settings.cluster].name,
                "chosen" if item.id == plan.chosen else kind,
                *(getattr(item, name) for name in figures),
                *(" ".join(value) if isinstance(value, tuple) else value for value in values),
                rejection.detail if rejection is not None else None,
            )
        )
    return ("candidate", "cluster", "verdict", *figures, *settings, "reason"), rows


def _nearest(candidate: Candidate) -> None:
    """Print the published runs that count for most in the ranges of the throughput and of reserved memory."""
    ranged = {"throughput": candidate.range_basis, "reserved memory": candidate.reserved_range_basis}
    for what, basis in ranged.items():
        if basis is None:
            continue
        print_line(f"{what} of published runs of {basis.sources} sources; nearest:")
        for line in basis.nearest:
            print_line(f"  {line}")


def _components(candidate: Candidate, *, explain: bool) -> None:
    print_line()
    total = candidate.device_total_bytes or 0
    shown: list[ComponentBytes] = []
    small: list[ComponentBytes] = []
    for item in sorted(candidate.components, key=lambda item: -(item.bytes or 0)):
        tiny = item.bytes is not None and item.bytes < _SMALL * total
        (small if tiny and not explain else shown).append(item)
    if len(small) < 2:
        shown, small = [*shown, *small], []
    cells = [
        (
            item.name.replace("_", " "),
            amount(item.bytes),
            words.share(item.bytes, total),
            words.MARKS[item.basis],
        )
        for item in shown
    ]
    if small:
        rest = sum(item.bytes or 0 for item in small)
        cells.append((f"{len(small)} others", amount(rest), words.share(rest, total), "estimate"))
    if candidate.device_total_bytes is not None:
        cells.append(("total", amount(candidate.device_total_bytes), "", "estimate"))
    print_table(
        ("memory of one rank at its peak", "bytes", "share", "basis"), cells, numeric=(1, 2), optional=(2,)
    )


def _mesh(plan: Plan, *, explain: bool) -> None:
    """Print why the mesh was chosen: always where it is more than sharding over all ranks."""
    plain = words.is_plain(words.shown(plan).settings)
    lines = list(mesh_lines(plan)) if explain or not plain else []
    if lines:
        print_line()
    for line in lines:
        print_line(line)


def _states(plan: Plan) -> None:
    if states := plan.details.states:
        kept = ", ".join(f"{name} {amount(size)}" for name, size in states.items())
        print_line()
        print_line(f"model states over a whole step: {kept} (exact)")


def _peak(candidate: Candidate) -> None:
    peak = candidate.peak
    if peak is None:
        return
    print_line()
    allocated, reserved = candidate.allocated_peak_bytes, candidate.reserved_peak_bytes
    text = f"peak: {peak.moment}; allocated {amount(allocated)}"
    if reserved is not None:
        text += f", reserved {amount(reserved)}{words.reserved_range(candidate)}"
    print_line(text)
    if candidate.allocated_peak_range_bytes:
        _, most = candidate.allocated_peak_range_bytes
        print_line(f"allocated if compiled blocks fuse nothing: {amount(most)}")
    alive = ", ".join(f"{item.name} {amount(item.bytes)}" for item in peak.live[:5])
    print_line(f"allocated at the peak: {alive}")


_CURVE = 48
"""Columns of the curve of a step, where the terminal has them."""


def _timeline(candidate: Candidate) -> None:
    """Print the step's curve: all of the allocated memory, then each group of components to one scale.

    A narrow terminal has fewer columns of it; in the narrowest ones it is below its name.
    """
    terminal = terminal_width(sys.stdout)
    widest = max(len(group.legend) for group in ColourGroup)
    room = _CURVE if terminal is None else min(_CURVE, terminal - widest - len("      1002.0 MiB"))
    above = room < _CURVE // 2
    rows, top = curve(candidate, max(min(_CURVE, (terminal or _CURVE) - 4), 8) if above else room)
    if not rows:
        return
    print_line()
    print_line(f"allocated over one step, 0 to {amount(top)}:")
    for name, levels in rows:
        marks = "".join(_spark(level, top) for level in levels)
        if above:
            print_line(f"  {name}, at most {amount(max(levels))}")
            print_line(f"    {marks}")
        else:
            print_line(f"  {name.ljust(widest)}  {marks}  {amount(max(levels))}")


def _spark(level: int, top: int) -> str:
    if not level or not top:
        return " "
    return _SPARKS[min(level * len(_SPARKS) // top, len(_SPARKS) - 1)]


def _phases(candidate: Candidate) -> None:
    rows = words.phases(candidate)
    if not rows:
        return
    print_line()
    heads = ("phase of the run", "description", "device, allocated", "host, per rank", "basis")
    print_table(heads, rows, numeric=(2,), optional=(1, 4))


def _batches(plan: Plan) -> None:
    """Print the largest micro-batch of every combination of settings that was tried (``--max-batch``)."""
    heads, rows = tables.tried_batches(plan)
    if len(rows) > 1:
        print_line()
        print_table(heads, rows, numeric=(2, 3, 4), optional=(3, 4))


def _configuration(plan: Plan, candidate: Candidate) -> None:
    print_line()
    print_table(("setting", "value"), words.configuration(plan, candidate.settings))


def _seconds(candidate: Candidate) -> None:
    if not candidate.seconds:
        return
    print_line()
    rows = [(name.replace("_", " "), duration(value)) for name, value in candidate.seconds.items() if value]
    print_table(("step time by part", "estimate"), rows, numeric=(1,))


def _limit(plan: Plan, candidate: Candidate) -> None:
    """Say why candidates were rejected and, of several, what keeps the chosen one from being faster."""
    print_line()
    kinds = [item.rejected_by.kind for item in plan.candidates if item.rejected_by]
    if kinds:
        reasons = sorted(words.REJECTIONS[kind] for kind in kinds)
        counted = ", ".join(f"{reason} {reasons.count(reason)}" for reason in dict.fromkeys(reasons))
        print_line(f"rejected candidates by reason: {counted}")
    if plan.chosen is None or len(plan.candidates) == 1:
        return
    speed = candidate.samples_per_second
    faster = [
        (item.samples_per_second or 0, item, item.rejected_by)
        for item in plan.candidates
        if speed and (item.samples_per_second or 0) > speed * 1.02 and item.rejected_by
    ]
    if not faster:
        print_line("limiting factor: step time; no other candidate is more than 2 % faster")
        return
    _, best, rejection = max(faster, key=lambda item: item[0])
    print_line(
        f"limiting factor: {words.REJECTIONS[rejection.kind]}; {best.id}"
        f" ({words.brief(best.settings)}) is faster, but {rejection.detail}"
    )


def _offers(plan: Plan) -> None:
    if len(plan.details.clusters) > 1:
        heads, offers = words.offers(plan)
        print_line()
        least = [heads.index(name) for name in ("cluster", "memory", "run", "speed") if name in heads]
        print_table(heads, offers, numeric=tuple(range(2, len(heads))), optional=least)


def _others(plan: Plan, *, explain: bool) -> None:
    candidates = plan.candidates
    if len(candidates) < 2:
        return
    front = plan.details.front
    names = [item.id for item in candidates] if explain else list(front[:_FRONT])
    if plan.chosen is not None and plan.chosen not in names:
        names.insert(0, plan.chosen)
    rows = []
    for name in names:
        item = words.find(plan, name)
        if item is not None:
            rows.append(_row(plan, item))
    print_line()
    if not rows:
        print_line(f"none of the {len(candidates)} candidates fits (--explain lists them)")
        return
    title = "candidate" if explain else f"Pareto front of {len(candidates)} candidates"
    heads = (title, "memory", "per step", "speed", "settings", "verdict")
    print_table(heads, rows, numeric=(1, 2, 3), optional=(2, 3))


def _row(plan: Plan, item: Candidate) -> tuple[str, ...]:
    verdict = "chosen" if item.id == plan.chosen else words.reason(item) or "fits"
    settings = words.brief(item.settings)
    if len(plan.details.clusters) > 1:
        settings = f"{plan.details.clusters[item.settings.cluster]}; {settings}"
    if item.price_per_million_samples is not None:
        verdict = f"{verdict}; price per million samples {words.money(item.price_per_million_samples)}"
    return (
        item.id,
        amount(item.device_total_bytes),
        duration(item.step_seconds),
        words.speed(item),
        settings,
        verdict,
    )


def _suggestions(plan: Plan) -> None:
    steps = plan.next_steps
    if not steps:
        return
    print_line()
    rows = [
        (
            words.change_words(step),
            amount(step.device_total_bytes),
            words.speed(step) if step.samples_per_second else "",
            words.FITS[step.fits],
            step.cost,
        )
        for step in steps
    ]
    print_table(
        ("suggested change", "memory", "speed", "verdict", "cost"), rows, numeric=(1, 2), optional=(2,)
    )


def _notes(plan: Plan, *, explain: bool) -> None:
    details = plan.details
    said = words.need(words.shown(plan), plan.unknowns)
    lines = [
        f"unknown: {text}"
        for text in plan.unknowns
        if not said.endswith(text.removeprefix(words.ACTIVATIONS))
    ]
    if explain:
        lines += [f"note: {text}" for text in details.notes]
    lines += words.largest_batches(plan)
    if plan.confidence != "verified":
        lines.append("confidence: unverified (the model of FSDP2 was not checked against this torch version)")
    findings = [item for item in plan.diagnostics if explain or item.severity != "info"]
    if lines or findings:
        print_line()
    for line in lines:
        print_line(line)
    hidden = len(plan.diagnostics) - len(findings) + (0 if explain else len(details.notes))
    if hidden and not explain:
        more = "note" if hidden == 1 else "notes"
        if not (lines or findings):
            print_line()
        print_line(f"--explain shows phases, every candidate and {hidden} {more}")
    print_findings(findings)


def _lengths(plan: Plan, *, explain: bool) -> None:
    """Print what varying lengths do to memory and speed: a few lines, the traced lengths with ``explain``."""
    lengths = plan.lengths
    if lengths is None:
        return
    print_line()
    for line in tables.lengths(lengths):
        print_line(line)
    if not explain or not lengths.traced:
        return
    print_line()
    heads, rows = tables.traced_lengths(lengths)
    print_table(heads, rows, numeric=(0, 1, 2, 3, 4))


def _pipeline(plan: Plan) -> None:
    """Print the schedule and a table of the stages, where the plan has any."""
    pipeline = plan.details.pipeline
    if pipeline is None:
        return
    print_line()
    print_line(tables.pipeline_line(pipeline))
    heads, rows = tables.stages(pipeline)
    print_table(heads, rows, numeric=(0, 2, 3, 4, 5, 6), optional=(4, 6))


_FIGURES = (
    "verdict",
    "device_total_bytes",
    "usable_bytes",
    "host_bytes_per_node",
    "step_seconds",
    "samples_per_second",
    "tokens_per_second",
    "mfu",
    "global_batch",
    "price_per_million_tokens",
    "price_per_run",
)
_SETTINGS = (
    "micro_batch",
    "accumulation",
    "checkpointing",
    "reshard_after_forward",
    *(item.name for item in PLANNED),
    "cpu_offload",
)


def print_sweep(sweep: Sweep) -> None:
    """Print one row per combination: its values, verdict, memory, speed and chosen configuration."""
    swept = [name.replace("_", " ") for name in sweep.options]
    priced = any(row.price_per_million_tokens is not None for row in sweep.rows)
    heads = (*swept, "verdict", "memory", "per step", "speed", "per million tokens", "configuration")
    rows = []
    for row in sweep.rows:
        values = [f"{row.values[name]:g}" for name in sweep.options]
        if row.verdict is None or row.settings is None:
            rows.append((*values, "invalid", "", "", "", "", row.reason or ""))
            continue
        rows.append(
            (
                *values,
                words.verdict(row.verdict, row.fit_share),
                amount(row.device_total_bytes),
                words.duration(row.step_seconds),
                words.speed(row),
                words.money(row.price_per_million_tokens) if priced else "",
                words.brief(row.settings),
            )
        )
    first = len(swept)
    if not priced:
        heads = (*heads[: first + 4], heads[-1])
        rows = [(*row[: first + 4], row[-1]) for row in rows]
    numeric = (*range(first), *range(first + 1, len(heads) - 1))
    print_table(heads, rows, numeric=numeric, optional=(first + 2, first + 3))


def print_sweep_rows(sweep: Sweep, separator: Literal["tsv", "csv"]) -> None:
    """Print the rows for programs (:func:`~fsdptool.report.console.tables.print_rows`)."""
    print_rows(*_table(sweep), separator=separator)


def sweep_csv(sweep: Sweep) -> str:
    """Return the rows as CSV."""
    stream = io.StringIO()
    print_rows(*_table(sweep), separator="csv", stream=stream)
    return stream.getvalue()


def _table(sweep: Sweep) -> tuple[Sequence[str], Iterable[Sequence[object]]]:
    names = sweep.options
    own = tuple(name for name in _SETTINGS if name not in names)
    rows = (
        (
            *(row.values[name] for name in names),
            *(getattr(row, name) for name in _FIGURES),
            *(getattr(row.settings, name, None) for name in own),
            row.reason,
        )
        for row in sweep.rows
    )
    return (*names, *_FIGURES, *own, "reason"), rows


def print_changes(path: str, changes: Sequence[tuple[str, Any, Any]]) -> None:
    """Print what changed since a plan was saved, one row each."""
    if not changes:
        print_line(f"{path}: no changes", style="bold green")
        return
    count = f"{len(changes)} value{'s' if len(changes) != 1 else ''} changed"
    print_line(f"{path}: {count}", style="bold red")
    print_table(("value", "saved", "now"), [(what, _value(a), _value(b)) for what, a, b in changes])


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def print_comparison(comparison: Comparison, *, explain: bool = False) -> None:
    """Print a comparison comparison: figures, then phases; ``explain`` adds every moment of a step."""
    run = comparison.kind == "run"
    heads = ("predicted", "measured", "measured over predicted") if run else ("left", "right", "difference")
    print_line(headline(comparison), style="bold")
    print_line()
    print_table(("", *heads), [figure_cells(row) for row in comparison.rows], numeric=(1, 2, 3))
    every = comparison.moments
    moments = every if run or explain else [row for row in every if row.what.startswith("phase ")]
    if moments:
        print_line()
        title = "" if run else "moment"
        print_table((title, *heads), [figure_cells(row) for row in moments], numeric=(1, 2, 3))
    if len(every) > len(moments):
        print_line(f"--explain shows {len(every) - len(moments)} moments of a step", style="dim")
    for note in comparison.notes:
        print_line(f"note: {note}")
