"""Findings and effective settings as text: with source lines, or one line each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.config.rules import file_rules
from fsdptool.formatting import printable
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.report.code_scanning import listed
from fsdptool.report.console.tables import layout_table, wrap_line

if TYPE_CHECKING:
    from fsdptool.config.result import Reading, Verdict
    from fsdptool.records.config_documents import CodeCount
    from fsdptool.records.described_run import DescribedRun

_COLOURS = {"error": "31;1", "warning": "33;1", "info": "36"}
_WIDTH = 160


def colour_wanted() -> bool:
    """Whether to write colours: a terminal and no NO_COLOR (no-color.org), or FORCE_COLOR."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def render_text(
    readings: Iterable[Reading], *, colour: bool = False, quiet: bool = False, width: int | None = None
) -> str:
    """Return every finding with its place in the source.

    Args:
        readings: The files.
        colour: Write terminal colours.
        quiet: Leave out findings of severity ``info``.
        width: Columns of the terminal, to which lines are broken between words; None breaks none.
    """
    columns = width or sys.maxsize
    return "".join(_block(reading, item, colour, columns) for reading, item in listed(readings, quiet))


def _block(reading: Reading, item: Diagnostic, colour: bool, width: int) -> str:
    lines = wrap_line(_head(reading, item, colour), width)
    if item.line is not None and item.column is not None and reading.source is not None:
        lines.extend(_snippet(reading, item, colour, min(width, _WIDTH)))
    if item.help:
        lines.extend(wrap_line(f"  help: {printable(item.help)}", width))
    if item.fix is not None:
        option = "--fix" if item.fix.safe else "--unsafe-fixes"
        lines.extend(wrap_line(f"  fix ({option}): {printable(item.fix.description)}", width))
    return "\n".join(lines) + "\n\n"


def _head(reading: Reading, item: Diagnostic, colour: bool) -> str:
    severity = paint(item.severity, item.severity, colour)
    return f"{place(reading, item)}: {severity} {item.code} {printable(item.message)}"


def place(reading: Reading, item: Diagnostic) -> str:
    """Return ``file:line:column`` as far as it is known."""
    path = printable(item.path or reading.path or "<text>")
    return path if item.line is None else f"{path}:{item.line}:{item.column}"


def paint(text: str, severity: str, colour: bool) -> str:
    """Return the text in the colour of a severity."""
    return f"\x1b[{_COLOURS[severity]}m{text}\x1b[0m" if colour else text


def _snippet(reading: Reading, item: Diagnostic, colour: bool, width: int) -> list[str]:
    assert reading.source is not None and item.line is not None and item.column is not None
    source = reading.source.line(item.line)
    if not source.strip():
        return []
    start = item.column - 1
    end = len(source)
    if item.end_line == item.line and item.end_column is not None:
        end = max(item.end_column - 1, start + 1)
    number = str(item.line)
    # A caret under a long line: show the part around it.
    room = max(width - len(number) - len("   | "), 20)
    offset = max(0, start - room // 2) if len(source) > room else 0
    shown = printable(source[offset : offset + room])
    caret = " " * (start - offset) + "^" * max(1, min(end, offset + room) - start)
    return [f"  {number} | {shown}", f"  {' ' * len(number)} | {paint(caret, item.severity, colour)}"]


def render_concise(readings: Iterable[Reading], *, colour: bool = False, quiet: bool = False) -> str:
    """Return one line per finding: ``file:line:column: severity CODE message``; [*] marks a safe fix."""
    lines = []
    for reading, item in listed(readings, quiet):
        mark = " [*]" if item.fix is not None and item.fix.safe else ""
        named = paint(f"{item.severity} {item.code}", item.severity, colour)
        lines.append(f"{place(reading, item)}: {named}{mark} {printable(item.message)}\n")
    return "".join(lines)


def render_statistics(
    counts: Iterable[CodeCount], *, colour: bool = False, quiet: bool = False, width: int | None = None
) -> str:
    """Return one line per code: how often it was found, its severity, and its title.

    Args:
        counts: The codes, in the order of the table.
        colour: Write terminal colours.
        quiet: Leave out those of severity ``info``.
        width: Columns of the terminal, to which lines are broken between words; None breaks none.
    """
    rows = [row for row in counts if not (quiet and row.severity == "info")]
    digits = max((len(str(row.count)) for row in rows), default=0)
    lines = []
    for row in rows:
        fixable = f" ({row.fixable} with a fix)" if row.fixable else ""
        severity = paint(f"{row.severity:<7}", row.severity, colour)
        line = f"{row.count:>{digits}}  {severity}  {row.code}  {file_rules()[row.code].title}{fixable}"
        lines.extend(wrap_line(line, width) if width is not None else [line])
    return "".join(f"{line}\n" for line in lines)


def render_summary(verdict: Verdict, accepted: int = 0) -> str:
    """Return the closing line.

    Args:
        verdict: All files.
        accepted: Number of findings that a baseline holds back.
    """
    judged = len(verdict.readings) - verdict.passed_over
    text = f"{judged} file{'s' * (judged != 1)}: "
    if verdict.errors or verdict.warnings:
        text += (
            f"{verdict.errors} error{'s' * (verdict.errors != 1)}, "
            f"{verdict.warnings} warning{'s' * (verdict.warnings != 1)}"
        )
        text += f", {verdict.fixable} fixable (--fix, --unsafe-fixes)" if verdict.fixable else ""
    else:
        text += "no errors, no warnings"
    foreign = verdict.passed_over - verdict.unreadable
    if foreign:
        text += f"; {foreign} of other programs skipped"
    if verdict.unreadable:
        text += f"; {verdict.unreadable} not UTF-8 skipped"
    if accepted:
        text += f"; {accepted} old finding{'s' * (accepted != 1)} in the baseline"
    return text + "\n"


DTYPE_WORDS = {
    "stored": "trained parameters and optimizer states",
    "gathered": "parameters after the all-gather",
    "computed": "layers",
    "reduced": "gradients while they are reduced",
    "outputs": "outputs of the model, and a loss that its forward computes",
    "saved": "trained parameters in checkpoints",
}
_AS_LOADED = "as loaded"


def _room(width: int | None) -> int | None:
    return width - 2 if width is not None else None


def reader_lines(reading: Reading, *, described: bool = False) -> list[str]:
    """Return who reads a file and whether FSDP runs; ``described``: its run is told below."""
    if reading.dialect is None and described:
        return [f"{reading.path or '<text>'}: no dialect of FSDP's settings; the run is described"]
    if reading.dialect is None:
        return [f"{reading.path or '<text>'}: not explained"]
    lines = [f"{reading.path or '<text>'}: {reading.dialect} file, read by {reading.consumer}"]
    if reading.version is not None:
        lines.append(f"FSDP version {reading.version} runs")
    elif any(item.code == "FSD116" for item in reading.diagnostics):
        lines.append("Whether FSDP runs is not known: a file was not read")
    elif "fsdp_version" in reading.open or "fsdp" in reading.open:
        what = "Whether FSDP runs" if "fsdp" in reading.open else "The version of FSDP"
        lines.append(f"{what} is not known: a variable of the shell decides")
    elif reading.dialect != "python":
        lines.append("FSDP does not run")
    return lines


def render_explanation(reading: Reading, run: DescribedRun | None = None, *, width: int | None = None) -> str:
    """Return settings, values and origins in columns, then what was ignored, the run, and the findings.

    Args:
        reading: What was read.
        run: The run that the file describes, or None.
        width: Columns of the terminal; None is as many as the text needs.
    """
    lines = reader_lines(reading, described=run is not None)
    findings = render_concise([reading]).splitlines()
    if reading.dialect is None:
        findings += [f"help: {item.help}" for item in reading.errors if item.help]
    if reading.effective:
        lines.append("")
        rows = [(item.key, printable(shown(item.value)), item.origin) for item in reading.effective]
        cells = [("setting", "value", "origin"), *rows]
        lines.extend(f"  {line.text}" for line in layout_table(cells, optional=(2,), width=_room(width)))
    if reading.dtypes is not None:
        lines.append("")
        pairs = [(name, getattr(reading.dtypes, name) or _AS_LOADED) for name in DTYPE_WORDS]
        described = [(name, dtype, DTYPE_WORDS[name]) for name, dtype in pairs]
        cells = [("dtype", "value", "of"), *described]
        lines.extend(f"  {line.text}" for line in layout_table(cells, optional=(2,), width=_room(width)))
    if reading.ignored:
        lines.append("")
        lines.append("ignored:")
        lines.extend(
            f"  {f'line {item.line}: ' if item.line else ''}{item.key} = {shown(item.value)} ({item.reason})"
            for item in reading.ignored
        )
    if run is not None:
        lines += ["", *_described(run, width)]
    if findings:
        lines += ["", *findings]
    printed = (wrap_line(printable(line), width or sys.maxsize) for line in lines)
    return "".join(f"{line}\n" for part in printed for line in part)


_APART = frozenset({"program", "program_version", "keys", "defaults", "notes", "problems", "mesh"})


def _described(run: DescribedRun, width: int | None) -> list[str]:
    """Return the facts of a run, and what becomes of the keys of its file."""
    lines = [f"run described for {run.program} {run.program_version}"]
    facts = {name: getattr(run, name) for name in run.__dataclass_fields__ if name not in _APART}
    sizes = {name: getattr(run.mesh, name) for name in run.mesh.__dataclass_fields__}
    facts["mesh"] = (
        " x ".join(f"{name} {size}" for name, size in sizes.items() if size not in (None, 1)) or None
    )
    rows = [(name, printable(shown(value))) for name, value in facts.items() if value not in (None, (), {})]
    cells = [("fact", "value"), *rows]
    lines.extend(f"  {line.text}" for line in layout_table(cells, width=_room(width)))
    lines.append(keys_line(run))
    taken = ", ".join(f"{item.key} = {shown(item.value)}" for item in run.defaults)
    if taken:
        lines.append(f"defaults of {run.program} {run.program_version}: {taken}")
    lines.extend(f"note: {note}" for note in run.notes)
    lines.extend(f"problem: {problem}" for problem in run.problems)
    return lines


def keys_line(run: DescribedRun) -> str:
    """Return how many keys of a file are used, and which are not modelled, in one line."""
    keys = run.keys
    line = f"used {len(keys.used)} keys; {len(keys.no_effect)} change neither memory nor speed"
    if keys.not_modelled:
        listed = keys.unmodelled_by_section()
        named = ", ".join(f"{keys.placed(item.key)} ({_CHANGES[item.changes]})" for item in listed)
        line += f"; cannot model {len(keys.not_modelled)}: {named}"
    return line


_CHANGES = {
    "memory": "changes memory",
    "time": "changes the time of a step",
    "numbers": "no effect on memory",
}


def shown(value: Any) -> str:
    """Return a value as a person would write it."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "-"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value)) or "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {shown(item)}" for key, item in value.items()) or "-"
    return str(value)
