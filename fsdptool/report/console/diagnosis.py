"""Diagnoses of failed runs on the console, and the table of known failures."""

from __future__ import annotations

from collections.abc import Sequence

from fsdptool.formatting import amount
from fsdptool.records.diagnosis import Divergence, FailureDiagnosis, RecognisedFailure
from fsdptool.report.console.runs import run_lines
from fsdptool.report.console.tables import print_line
from fsdptool.report.console.train import memory_text


def print_diagnosis(diagnosis: FailureDiagnosis) -> None:
    """Print a diagnosis: the cause, what shows it, what to change, and what followed from it."""
    if diagnosis.run is not None:
        print_line(run_lines(diagnosis.run)[0], style="bold")
    causes = [item for item in diagnosis.failures if not item.consequence]
    for item in causes:
        print_line(f"{item.title}{failure_place(item)} [{item.code}]", style="bold red")
        print_line(f"  seen:    {item.file}:{item.line}: {item.text}")
        if item.cause == "diverged_ranks" and diagnosis.divergence is not None:
            for line in divergence_lines(diagnosis.divergence):
                print_line(f"  ranks:   {line}")
        print_line(f"  cause:   {item.why}")
        print_line(f"  change:  {item.change}")
        print_line(f"  more:    fsdptool rule {item.code}; source: {item.source}")
    if diagnosis.memory is not None:
        for line in memory_text(diagnosis.memory).splitlines():
            print_line(line)
    if diagnosis.exception is not None:
        seen = diagnosis.exception
        print_line("no known failure explains this; the last exception is", style="yellow")
        print_line(f"  {seen.file}:{seen.line}: {seen.text}")
    elif not causes:
        print_line("no known failure was found" if diagnosis.run is None else _nothing(diagnosis))
    for item in diagnosis.failures:
        if item.consequence:
            print_line(f"consequence: {item.title}{failure_place(item)} [{item.code}]", style="dim")
    for note in diagnosis.notes:
        print_line(f"note: {note}")
    if diagnosis.read_bytes < diagnosis.total_bytes:
        read, total = amount(diagnosis.read_bytes), amount(diagnosis.total_bytes)
        print_line(f"note: read {read} of {total}, the beginning and the end of each log")


def _nothing(diagnosis: FailureDiagnosis) -> str:
    if not diagnosis.failed:
        return "the run has not failed"
    failure = diagnosis.run.failure if diagnosis.run is not None else None
    return f"no known failure explains this: {failure.message if failure else 'the logs contain no error'}"


def divergence_lines(divergence: Divergence) -> list[str]:
    """Return who called which collective, those first that differ from the others."""
    of_group = f" of process group {divergence.group}" if divergence.group else ""
    counted = of_group if divergence.group_ranks else ""
    calls = sorted(divergence.calls, key=lambda call: not call.odd)
    lines = []
    for call in calls:
        sizes = ""
        if call.elements_in is not None:
            sizes = f" (NumelIn={call.elements_in}, NumelOut={call.elements_out})"
        lines.append(f"{_ranks(call.ranks)}{counted} called {call.operation}{sizes}")
    lines[0] += f" as collective {divergence.sequence}{of_group if not counted else ''}"
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}"


def failure_place(item: RecognisedFailure) -> str:
    """Return phase and ranks of a failure, as they follow its title: `` in backward (rank 3)``."""
    phase = f" in {item.phase}" if item.phase else ""
    if not item.ranks:
        return phase
    return f"{phase} ({_ranks(item.ranks)})"
