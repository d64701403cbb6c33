"""The state of a run, and lists of runs, in terminals and pipes. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from fsdptool.formatting import amount, elapsed, printable
from fsdptool.records.run import PhaseMemory, RankProgress, RunList, RunView
from fsdptool.report.console.tables import print_line, print_rows, print_table

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
