"""Runs, lists of runs, the queue and diagnoses of failed runs, in terminals and pipes. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from fsdptool.formatting import amount, elapsed, printable
from fsdptool.records.diagnosis import (
    AllocatedTensor,
    Allocation,
    Divergence,
    FailureDiagnosis,
    LogFacts,
    RecognisedFailure,
    TensorWidth,
)
from fsdptool.records.queue import QueueEntry, QueueReport
from fsdptool.records.run import PhaseMemory, RankProgress, RunList, RunView
from fsdptool.report.console.tables import print_line, print_rows, print_table
from fsdptool.report.console.train import memory_text

if TYPE_CHECKING:
    from rich.console import RenderableType


_STYLES = {
    "running": "bold cyan",
    "completed": "bold green",
    "stopped": "yellow",
    "failed": "bold red",
    "dead": "bold red",
    "interrupted": "yellow",
}

_SHOWN_RANKS = 16
"""Ranks that have a line of their own; of more, those that have been silent longest."""

_BAR_WIDTH = 60

_BARS = "▁▂▃▄▅▆▇█"


def print_runs(runs: RunList) -> None:
    """Print a list of runs, one row each."""
    now = time.time()
    if not runs.runs:
        print_line("no runs were found")
    else:
        heads = ("run", "state", "step", "loss", "time", "memory", "ranks", "GPUs", "model")
        rows = [_row(run, now) for run in runs.runs]
        print_table(heads, rows, numeric=(2, 3), optional=(8, 6, 5, 3))
    for run in runs.runs:
        if run.state in ("failed", "dead"):
            print_line(f"{_shown(run.folder)}: {_end(run)}")
    for text in runs.unreadable:
        print_line(f"warning: {text}")


def print_run_rows(runs: RunList, separator: Literal["tsv", "csv"]) -> None:
    """Print a list of runs as rows for programs."""
    names = (
        *("folder", "state", "step", "total_steps", "loss", "eta_seconds", "tokens_per_second"),
        *("samples_per_second", "predicted_peak_bytes", "measured_peak_bytes", "world_size", "device"),
        *("started", "updated", "exit_code", "model"),
    )
    rows = [(*(getattr(run, name) for name in names), " ".join(run.gpus)) for run in runs.runs]
    print_rows((*names, "gpus"), rows, separator=separator)


def _row(run: RunView, now: float) -> tuple[str, ...]:
    place = " ".join(run.gpus) if run.gpus else run.device
    peak = run.measured_peak_bytes
    return (
        _shown(run.folder),
        run.state,
        _steps(run),
        f"{run.loss:.4f}" if run.loss is not None else "",
        _when(run, now),
        amount(peak) if peak is not None else "",
        str(run.world_size),
        place,
        run.model or "",
    )


def _when(run: RunView, now: float) -> str:
    if run.state == "running":
        eta = run.eta_seconds
        return f"{elapsed(eta)} left" if eta is not None else f"started {elapsed(now - run.started)} ago"
    return f"{elapsed(now - (run.updated or run.started))} ago"


def _steps(run: RunView) -> str:
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)


def _shown(folder: str) -> str:
    try:
        return str(Path(folder).relative_to(Path.cwd())) or "."
    except ValueError:
        return folder


def _end(run: RunView) -> str:
    """Return how a run that is not running ended, in one line."""
    if run.failure:
        return str(run.failure.message)
    if run.state == "dead":
        return "its processes are gone, and no summary says how it ended"
    return str(run.state)


def run_lines(run: RunView, *, now: float | None = None) -> list[str]:
    """Return the state of a run, as lines of text."""
    now = time.time() if now is None else now
    lines = [f"{_shown(run.folder)}: {_headline(run, now)}"]
    figures = _figures(run)
    if figures:
        lines.append(f"  {figures}")
    for phase in run.memory:
        parts = [
            f"{word} {amount(size)}"
            for word, size in (("planned", phase.predicted_bytes), ("measured", phase.measured_bytes))
            if size is not None
        ]
        error = _error(phase)
        lines.append(f"  memory in {phase.name}: {', '.join(parts)}{f' ({error})' if error else ''}")
    if run.state in ("running", "dead"):
        lines += [f"  {_rank_text(rank, now)}" for rank in _shown_ranks(run.ranks)]
    if run.state not in ("running", "completed"):
        lines.append(f"  {_end(run)}")
        if run.failure and run.failure.help:
            lines.append(f"  help: {run.failure.help}")
    if run.state != "running" and (advice := continuation(run.resumable, run.lost_steps)):
        lines.append(f"  {advice}")
    return lines


def continuation(resumable: bool, lost: int) -> str | None:
    """Return how a run that has ended goes on, or None if there is nothing to go on with.

    Args:
        resumable: Whether ``--resume auto`` has a checkpoint to continue from.
        lost: Steps that another start makes again because there is none.
    """
    if lost:
        count = f"{lost} step{'s are' if lost > 1 else ' is'} lost"
        return f"no checkpoint exists: {count}; --resume auto --start-over starts over"
    return "continue with --resume auto" if resumable else None


def print_run(run: RunView, stream: TextIO | None = None) -> None:
    """Print the state of a run."""
    for line in run_lines(run):
        print_line(line, stream=stream)


def _headline(run: RunView, now: float) -> str:
    parts = [f"{run.state}, step {_steps(run)}"]
    if run.state == "running":
        parts.append(f"{elapsed(now - run.started)} since its start")
        parts.append(f"{elapsed(run.eta_seconds)} left" if run.eta_seconds is not None else "ETA unknown")
    place = f"GPU {', '.join(run.gpus)}" if run.gpus else run.device.upper()
    parts.append(f"{run.world_size} rank{'s' if run.world_size != 1 else ''} on {place}")
    if run.model:
        parts.append(run.model)
    return ", ".join(parts)


def _figures(run: RunView) -> str:
    parts = []
    if run.loss is not None:
        parts.append(f"loss {run.loss:.4f}")
    if run.grad_norm is not None:
        parts.append(f"grad norm {run.grad_norm:.3f}")
    if run.lr is not None:
        parts.append(f"lr {run.lr:.2e}")
    if run.tokens_per_second is not None:
        parts.append(f"{run.tokens_per_second:,.0f} tokens/s")
    elif run.samples_per_second is not None:
        parts.append(f"{run.samples_per_second:,.2f} samples/s")
    if run.step_seconds is not None:
        parts.append(f"{run.step_seconds:.3g} s per step")
    if run.last_checkpoint is not None:
        parts.append(f"checkpoint at step {run.last_checkpoint}")
    return "  ".join(parts)


def _error(phase: PhaseMemory) -> str:
    return f"{phase.error_percent:+.1f} %" if phase.error_percent is not None else ""


def _shown_ranks(ranks: Sequence[RankProgress]) -> list[RankProgress]:
    silent = sorted(ranks, key=lambda rank: rank.progressed)[:_SHOWN_RANKS]
    return sorted(silent, key=lambda rank: rank.rank)


def _rank_text(rank: RankProgress, now: float) -> str:
    step = f" (step {rank.step})" if rank.step is not None else ""
    waits = ", waiting for other ranks" if rank.waiting else ""
    ago = elapsed(now - rank.progressed)
    return f"rank {rank.rank}: {rank.phase}{step}{waits}, last progress {ago} ago"


def sparkline(values: Iterable[float | None], width: int = _BAR_WIDTH - 5) -> str:
    """Return values as a line of bars, the latest ``width`` of them; a gap where one is not finite."""
    recent = list(values)[-width:]
    known = [value for value in recent if value is not None]
    if len(known) < 2:
        return ""
    low, span = min(known), (max(known) - min(known)) or 1.0
    return "".join(
        " " if value is None else _BARS[min(int((value - low) / span * len(_BARS)), len(_BARS) - 1)]
        for value in recent
    )


def run_panel(run: RunView, losses: Sequence[float | None], *, now: float) -> RenderableType:
    """Return the state of a run for a live display.

    Args:
        run: A :class:`~fsdptool.records.run.RunView` as a runs.
        losses: Losses of the latest steps.
        now: Seconds since 1970.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    style = _STYLES[run.state]
    parts: list[RenderableType] = [
        Text(printable(_shown(run.folder)), style="bold"),
        Text(printable(_headline(run, now)), style=style),
    ]
    if run.total_steps:
        share = min(run.step / run.total_steps, 1.0)
        done = round(_BAR_WIDTH * share)
        parts.append(Text("━" * done, style="cyan") + Text("━" * (_BAR_WIDTH - done), style="dim"))
    parts.append(Text(_figures(run)))
    if line := sparkline(losses):
        parts.append(Text(f"loss {line}"))
    if run.memory:
        table = Table("memory per rank", "planned", "measured", "", box=None, pad_edge=False)
        for phase in run.memory:
            seen = phase.measured_bytes
            table.add_row(
                printable(phase.name),
                amount(phase.predicted_bytes),
                amount(seen) if seen is not None else "",
                _error(phase),
            )
        parts += [Text(), table]
    parts.append(Text())
    parts += [Text(printable(_rank_text(rank, now))) for rank in _shown_ranks(run.ranks)]
    if len(run.ranks) > _SHOWN_RANKS:
        parts.append(Text(f"and {len(run.ranks) - _SHOWN_RANKS} ranks with later progress", style="dim"))
    return Group(*parts)


def print_queue(report: QueueReport, *, now: float) -> None:
    """Print the queue as ``fsdptool queue list --format json`` prints it.

    Args:
        report: A :class:`~fsdptool.records.queue.QueueReport` as a report.
        now: Seconds since 1970.
    """
    entries = report.entries
    if not entries:
        print_line("the queue is empty")
    else:
        print_table(
            ("entry", "state", "needs", "since", "run", "note"),
            [
                (
                    str(entry.id),
                    entry.state,
                    needs_text(entry),
                    elapsed(max(now - (entry.ended or entry.started or entry.added), 0.0)),
                    printable(entry.folder),
                    printable(note_text(entry)),
                )
                for entry in entries
            ],
            numeric=(0,),
            optional=(5,),
        )
    if report.scheduler is None and any(entry.state == "waiting" for entry in entries):
        print_line("no program is running the queue; start one: `fsdptool queue run` or `fsdptool ui`")


def needs_text(entry: QueueEntry) -> str:
    """Return what an entry needs: ``GPUs 0,1`` or ``2 slots``."""
    if entry.gpus:
        return printable(_gpus(entry.gpus))
    return f"{entry.slots} slot{'s' if entry.slots != 1 else ''}"


def _gpus(names: Sequence[str]) -> str:
    return f"GPU{'s' if len(names) > 1 else ''} {','.join(names)}"


def note_text(entry: QueueEntry) -> str:
    """Return why an entry waits, or what went wrong; empty if there is nothing to say."""
    wait = entry.wait
    if wait is None:
        return entry.message or ""
    what = {
        "gpus": f"{_gpus(wait.gpus)} {'is' if len(wait.gpus) == 1 else 'are'} in use",
        "slots": "the process slots are in use",
        "folder": "the run folder is in use",
    }[wait.reason]
    if wait.queued:
        return f"starts after {wait.holder}"
    return f"{what}: {wait.holder}"


def print_diagnosis(diagnosis: FailureDiagnosis) -> None:
    """Print a diagnosis: the cause, what shows it, what to change, and what followed from it."""
    if diagnosis.run is not None:
        print_line(run_lines(diagnosis.run)[0], style="bold")
    causes = [item for item in diagnosis.failures if not item.consequence]
    for item in causes:
        _print_cause(item, diagnosis.divergence, diagnosis.allocation)
    if diagnosis.memory is not None:
        for line in memory_text(diagnosis.memory).splitlines():
            print_line(line)
    if diagnosis.exception is not None:
        seen = diagnosis.exception
        known = "also raised, and not known" if causes else "no known failure explains this; the run ended by"
        print_line(f"{known}:", style="yellow")
        print_line(f"  {seen.file}:{seen.line}: {seen.text}")
        if seen.frame is not None:
            print_line(f"  raised in {seen.frame}")
    elif not causes:
        print_line(_nothing(diagnosis))
    if not causes and not diagnosis.ended_well and diagnosis.facts is not None:
        for line in facts_lines(diagnosis.facts):
            print_line(line)
    for item in diagnosis.failures:
        if item.consequence:
            print_line(f"consequence: {item.title}{failure_place(item)} [{item.code}]", style="dim")
    for note in diagnosis.notes:
        print_line(f"note: {note}")
    if diagnosis.read_bytes < diagnosis.total_bytes:
        read, total = amount(diagnosis.read_bytes), amount(diagnosis.total_bytes)
        print_line(f"note: read {read} of {total}, the beginning and the end of each log")


def _print_cause(
    item: RecognisedFailure, divergence: Divergence | None, allocation: Allocation | None
) -> None:
    print_line(f"{item.title}{failure_place(item)} [{item.code}]", style="bold red")
    print_line(f"  seen:    {item.file}:{item.line}: {item.text}")
    for text in item.also:
        print_line(f"           {text}")
    if item.cause == "diverged_ranks" and divergence is not None:
        for line in divergence_lines(divergence):
            print_line(f"  ranks:   {line}")
    print_line(f"  cause:   {item.why}")
    if item.requested is not None and allocation is not None:
        for line in allocation_lines(allocation):
            print_line(f"  request: {line}")
        if (change := allocation_change(allocation)) is not None:
            print_line(f"  change:  {change}")
    print_line(f"  change:  {item.change}")
    print_line(f"  more:    fsdptool rule {item.code}; source: {item.source}")


_WIDTHS = {
    TensorWidth.VOCABULARY: ("words", "the logits"),
    TensorWidth.HIDDEN: ("channels", "the hidden states"),
    TensorWidth.INTERMEDIATE: ("channels", "the inside of a feed-forward layer"),
}


def allocation_lines(allocation: Allocation) -> list[str]:
    """Return which tensors are as large as a failed allocation."""
    asked = amount(allocation.requested.bytes)
    if not allocation.tensors:
        return [f"{asked} is not recognised as logits, hidden states or the inside of a feed-forward layer"]
    return [f"{asked} is {_product(tensor)}" for tensor in allocation.tensors]


def allocation_change(allocation: Allocation) -> str | None:
    """Return what makes the tensors smaller that are as large as a failed allocation; None without any."""
    if not allocation.tensors:
        return None
    smaller = "take a smaller micro-batch or shorter sequences"
    if all(tensor.width is not TensorWidth.VOCABULARY for tensor in allocation.tensors):
        return f"recompute activations (gradient checkpointing), or {smaller}"
    if allocation.fused:
        return f"{smaller}: the file already avoids whole logits in its loss"
    how = f" ({allocation.switch})" if allocation.switch else ""
    return f"fuse the loss with the head{how} or compute it in chunks: whole logits never exist; or {smaller}"


def _product(tensor: AllocatedTensor) -> str:
    what, name = _WIDTHS[tensor.width]
    rows = f"{tensor.tokens:,} tokens"
    if tensor.micro_batch is not None and tensor.sequence_length is not None:
        rows = f"{tensor.micro_batch} × {tensor.sequence_length:,} tokens"
    dtype = "fp32" if tensor.dtype == "float32" else "16 bits"
    return f"{rows} × {tensor.elements:,} {what} in {dtype}: {name}"


def _nothing(diagnosis: FailureDiagnosis) -> str:
    if diagnosis.ended_well:
        return "the run ended well; nothing failed"
    if diagnosis.run is None:
        return "no known failure was found"
    if not diagnosis.failed:
        return "the run has not failed"
    failure = diagnosis.run.failure if diagnosis.run is not None else None
    return f"no known failure explains this: {failure.message if failure else 'the logs contain no error'}"


def facts_lines(facts: LogFacts) -> list[str]:
    """Return what is known of a log that nothing was recognised in."""
    lines = []
    if facts.programs:
        lines.append(f"programs: {', '.join(facts.programs)}")
    if facts.versions:
        lines.append(f"versions: {', '.join(f'{name} {number}' for name, number in facts.versions.items())}")
    if facts.ranks:
        lines.append(f"{_ranks(facts.ranks)} wrote lines; the last of each:")
        lines += [f"  {item.file}:{item.line}: {item.text}" for item in facts.last_lines]
    return lines


def divergence_lines(divergence: Divergence) -> list[str]:
    """Return who called which collective, those first that differ from the others."""
    of_group = f" of process group {divergence.group}" if divergence.group else ""
    counted = of_group if divergence.group_ranks else ""
    calls = sorted(divergence.calls, key=lambda call: not call.odd)
    lines = []
    for call in calls:
        sizes = ""
        if call.elements_in is not None:
            dtype = f", {call.dtype}" if call.dtype is not None else ""
            sizes = f" (NumelIn={call.elements_in}, NumelOut={call.elements_out}{dtype})"
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
