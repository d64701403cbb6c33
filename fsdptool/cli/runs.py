"""``fsdptool runs``, ``watch`` and ``report``: the list of runs, the state of one, and its page."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdptool.cli.options import (
    Format,
    FormatOption,
    RowFormat,
    RowFormatOption,
    print_document,
    say,
    write_file,
)
from fsdptool.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from fsdptool.records.run import RunView

RunArgument = Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")]

_POLL_SECONDS = 0.5


def command(
    roots: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders to look in; default: runs/, the working directory, and live runs on this machine.",
            metavar="ROOT",
        ),
    ] = None,
    format: RowFormatOption = RowFormat.TEXT,
) -> int:
    """List the runs in folders and on this machine: their state, their GPUs and how they ended."""
    from fsdptool.api.run_lists import list_runs
    from fsdptool.records.diagnostic import envelope
    from fsdptool.report.console.runs import print_run_rows, print_runs

    found = list_runs(roots or ())
    if format is RowFormat.JSON:
        print_document(envelope("runs", [str(root) for root in roots or ()], found))
    elif format is RowFormat.TEXT:
        print_runs(found)
    else:
        print_run_rows(found, "tsv" if format is RowFormat.TSV else "csv")
    return int(ExitCode.CLEAN)


def watch(
    run: RunArgument,
    once: Annotated[bool, typer.Option("--once", help="Print the state of the run, and exit.")] = False,
    format: FormatOption = Format.TEXT,
) -> int:
    """Show a run while it is running: loss, throughput, memory against the plan, time left and ranks.

    Ends when the run ends, with the exit status of the run. Ctrl-C leaves the run alone.
    """
    from fsdptool.api.run_lists import view_run
    from fsdptool.records.diagnostic import envelope
    from fsdptool.report.console.runs import print_run

    if once or format is Format.JSON:
        view = view_run(run)
        if format is Format.JSON:
            print_document(envelope("watch", str(run), view))
        else:
            print_run(view)
        return _status(view)
    try:
        view = _show_live(run) if sys.stdout.isatty() else _follow(run)
    except KeyboardInterrupt:
        say("stopped watching; the run continues")
        return int(ExitCode.INTERRUPTED)
    print_run(view)
    return _status(view)


def _status(view: RunView) -> int:
    return int(ExitCode.CLEAN) if view.exit_code is None else view.exit_code


def _show_live(run: Path) -> RunView:
    """Redraw the run in place until it ends; return its last state."""
    from rich.live import Live

    from fsdptool.api.run_lists import view_run
    from fsdptool.files.values import number
    from fsdptool.report.console.runs import run_panel
    from fsdptool.runs.view import latest_steps

    view = view_run(run)
    with Live(auto_refresh=False, transient=True) as live:
        while view.state == "running":
            losses = [number(line.get("loss")) for line in latest_steps(run)]
            live.update(run_panel(view, losses, now=time.time()), refresh=True)
            # Every rank's file is read each time.
            time.sleep(max(_POLL_SECONDS, view.world_size / 128.0))
            view = view_run(run)
    return view


def _follow(run: Path) -> RunView:
    """Write a line for each event of the run until it ends; return its last state."""
    from fsdptool.api.run_lists import view_run
    from fsdptool.report.console.runs import print_run
    from fsdptool.report.console.train import Progress
    from fsdptool.runs.events import Follower

    follower = Follower(run)
    view = view_run(run)
    if view.state != "running":
        return view
    print_run(view)
    sys.stdout.flush()
    progress = Progress(view.total_steps, stream=sys.stdout)
    running = True
    while running:
        time.sleep(max(_POLL_SECONDS, view.world_size / 128.0))
        # The state first: what was written before the end is still shown.
        view = view_run(run)
        running = view.state == "running"
        for event in follower.news():
            progress(event)
    return view


def report(
    source: Annotated[Path, typer.Argument(help="A run folder, or a saved plan.", metavar="RUN|PLAN.json")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Page to write (.html); for a plan, also a picture (.svg).")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> int:
    """Write a run or a saved plan as one self-contained page.

    The page of a run has its curves, its memory against the plan, and its events.
    """
    from fsdptool.files.text import exists, is_file

    if is_file(source):
        from fsdptool.planning.plan import read_plan
        from fsdptool.report.page.plan import plan_file

        write_file(output, plan_file(read_plan(source), output.suffix), force=force)
        say(f"wrote {output}")
        return int(ExitCode.CLEAN)
    if not exists(source):
        raise ConfigError(f"{source} does not exist", help="give a run folder, or a plan that plan -o wrote")
    return _report_run(source, output, force=force)


def _report_run(run: Path, output: Path, *, force: bool) -> int:
    from fsdptool.api.run_lists import view_run
    from fsdptool.records.diagnostic import answer
    from fsdptool.report.page.run import run_page
    from fsdptool.runs.view import read_history

    if output.suffix != ".html":
        raise ConfigError(f"{output}: the page of a run is written as .html", help="choose this suffix")
    shown = answer("watch", str(run), view_run(run))
    write_file(output, run_page(shown, read_history(run)), force=force)
    say(f"wrote {output}")
    return int(ExitCode.CLEAN)
