"""Diagnoses of failed runs on the console, and the page of known failures. Reads the documents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdptool.formatting import amount, printable
from fsdptool.records.diagnosis import Signature
from fsdptool.report.run import run_lines
from fsdptool.report.tables import print_line
from fsdptool.report.train import memory_text


def print_diagnosis(document: Mapping[str, Any]) -> None:
    """Print a diagnosis: the cause, what shows it, what to change, and what followed from it."""
    if document["run"] is not None:
        print_line(run_lines(document["run"])[0], style="bold")
    causes = [item for item in document["failures"] if not item["consequence"]]
    for item in causes:
        print_line(f"{item['title']}{failure_place(item)} [{item['code']}]", style="bold red")
        print_line(f"  seen:    {item['file']}:{item['line']}: {item['text']}")
        if item["cause"] == "diverged_ranks" and document["divergence"] is not None:
            for line in divergence_lines(document["divergence"]):
                print_line(f"  ranks:   {line}")
        print_line(f"  cause:   {item['why']}")
        print_line(f"  change:  {item['change']}")
        print_line(f"  more:    fsdptool rule {item['code']}; source: {item['source']}")
    if document["memory"] is not None:
        for line in memory_text(document["memory"]).splitlines():
            print_line(line)
    if document["exception"] is not None:
        seen = document["exception"]
        print_line("no known failure explains this; the last exception is", style="yellow")
        print_line(f"  {seen['file']}:{seen['line']}: {seen['text']}")
    elif not causes:
        print_line("no known failure was found" if document["run"] is None else _nothing(document))
    for item in document["failures"]:
        if item["consequence"]:
            print_line(f"consequence: {item['title']}{failure_place(item)} [{item['code']}]", style="dim")
    for note in document["notes"]:
        print_line(f"note: {note}")
    if document["read_bytes"] < document["total_bytes"]:
        read, total = amount(document["read_bytes"]), amount(document["total_bytes"])
        print_line(f"note: read {read} of {total}, the beginning and the end of each log")


def _nothing(document: Mapping[str, Any]) -> str:
    if not document["failed"]:
        return "the run has not failed"
    failure = document["run"]["failure"]
    return f"no known failure explains this: {failure['message'] if failure else 'the logs contain no error'}"


def divergence_lines(divergence: Mapping[str, Any]) -> list[str]:
    """Return who called which collective, those first that differ from the others."""
    of_group = f" of process group {divergence['group']}" if divergence["group"] else ""
    counted = of_group if divergence["group_ranks"] else ""
    calls = sorted(divergence["calls"], key=lambda call: not call["odd"])
    lines = []
    for call in calls:
        sizes = ""
        if call["elements_in"] is not None:
            sizes = f" (NumelIn={call['elements_in']}, NumelOut={call['elements_out']})"
        lines.append(f"{_ranks(call['ranks'])}{counted} called {call['operation']}{sizes}")
    lines[0] += f" as collective {divergence['sequence']}{of_group if not counted else ''}"
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {shown}"


def failure_place(item: Mapping[str, Any]) -> str:
    """Return phase and ranks of a failure, as they follow its title: `` in backward (rank 3)``."""
    phase = f" in {item['phase']}" if item["phase"] else ""
    if not item["ranks"]:
        return phase
    return f"{phase} ({_ranks(item['ranks'])})"


def signatures_table(signatures: Iterable[Signature]) -> str:
    """Return the table of ``docs/diagnose.md``; a test holds the page against it."""
    rows = []
    for item in signatures:
        anchor = f"{item.code}: {item.title}".lower().replace(" ", "-")
        anchor = "".join(letter for letter in anchor if letter.isalnum() or letter in "-_")
        texts = ", ".join(f"`{printable(text)}`" for text in item.texts)
        cause = item.cause.value.replace("_", " ")
        rows.append(f"| [{item.code}](rules.md#{anchor}) | {item.title} | {cause} | {texts} |\n")
    return "| code | failure | cause | recognised by |\n|---|---|---|---|\n" + "".join(rows)
