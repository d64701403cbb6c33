"""``fsdptool train``: prepare, write the run folder, launch, show progress, summarise."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fsdptool.cli.options import (
    ConfigOption,
    Format,
    FormatOption,
    RecipeArgument,
    print_document,
    say,
    show_progress,
    takes,
)
from fsdptool.errors import ConfigError
from fsdptool.launch.options import StartOptions

if TYPE_CHECKING:
    from fsdptool.launch.outcome import RunOutcome
    from fsdptool.launch.start import ReadyRun
    from fsdptool.report.console.train import Progress


@takes(StartOptions)
def command(
    recipe: RecipeArgument,
    config: ConfigOption,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the command line and environment, without starting anything."),
    ] = False,
    format: FormatOption = Format.TEXT,
    **given: Any,
) -> int:
    """Train RECIPE with the processes, mesh and wrapping of the configuration."""
    from contextlib import ExitStack

    from fsdptool.launch.start import has_other_run, open_run, run_folder

    options = cast("StartOptions", given)
    if options["resume"] == "auto" and not (options["start_over"] or options["node_rank"]):
        options["start_over"] = _starts_over(run_folder(recipe, options["output"]))
    start = open_run(recipe, config, options, dry_run=dry_run)
    with ExitStack() as stack:
        with show_progress():
            ready = stack.enter_context(start)
        if dry_run:
            _print_dry_run(ready, format)
            if has_other_run(ready.folder, options):
                _say_other_run(ready.folder)
            return 0
        return _run(ready, format)


def _say_other_run(folder: Path) -> None:
    from fsdptool.launch.start import has_damaged_record

    if has_damaged_record(folder):
        say(
            f"note: {folder / 'run.json'} is damaged, so that the run in this folder cannot be continued: add"
            " --force to replace it, or choose another folder with --output"
        )
    else:
        say(f"note: {folder} already contains a run: add --resume auto to continue it")


def _starts_over(folder: Path) -> bool:
    """Ask, where somebody can answer, whether a run starts over that has no checkpoint to continue from."""
    from fsdptool.launch.start import check_loss

    try:
        check_loss(folder)
    except ConfigError as error:
        if sys.stdin.isatty() and sys.stderr.isatty():
            say(error.message)
            return typer.confirm("start over?", err=True)
    return False


_UNCHECKED = {
    "gpus": "GPUs (this machine has none)",
    "memory": "memory (`fsdptool plan --recipe RECIPE --config CONFIG --gpu GPU` predicts it)",
    "data": "data after the first row (the start of the run reads all of it)",
    "rendezvous": "the address of node 0, here node0 (give --rendezvous, or set main_process_ip)",
}


def _print_dry_run(ready: ReadyRun, format: Format) -> None:
    from fsdptool.records.command_documents import LaunchLines, NodeCommand
    from fsdptool.records.diagnostic import envelope

    command_line, unchecked = ready.command_line, ready.prepared.unchecked
    if format is Format.JSON:
        node = NodeCommand(tuple(command_line.argv), command_line.environment)
        report = LaunchLines((node,), str(ready.folder), None, unchecked)
        print_document(envelope("launch", report, report))
        return
    prepared = ready.prepared
    for finding in prepared.diagnostics:
        if finding.severity == "warning":
            say(f"warning: {finding.message}")
    say(
        f"checked: recipe, configuration, model, {len(prepared.units.units)} FSDP units, mesh and batch of"
        f" {prepared.world_size} processes, first row of the data"
    )
    for item in unchecked:
        say(f"not checked: {_UNCHECKED[item]}")
    # The answer first: the line of environment variables is long.
    sys.stderr.flush()
    sys.stdout.write(command_line.shell() + "\n")


def _run(ready: ReadyRun, format: Format) -> int:
    from fsdptool.launch.outcome import exit_status
    from fsdptool.report.console.train import Progress, plan_text

    prepared = ready.prepared
    progress = Progress(prepared.recipe.steps, every=max(prepared.recipe.tracking.log_every, 1))
    for note in (
        *(item.message for item in prepared.diagnostics if item.severity == "warning"),
        *prepared.notes,
    ):
        progress.say(f"warning: {note}")
    if ready.leads:
        progress.show(plan_text(prepared.prediction))
    try:
        outcome = ready.supervise(progress if ready.leads else _silent)
    finally:
        progress.close()
    if not ready.leads:
        # The first machine sums up, if it is there to do it; this one says how it ended.
        _say_failure(outcome, progress)
        return int(exit_status(outcome))
    return _close(ready, outcome, progress, format)


def _close(ready: ReadyRun, outcome: RunOutcome, progress: Progress, format: Format) -> int:
    from fsdptool.errors import ExitCode
    from fsdptool.formatting import printable
    from fsdptool.records.codec import to_json
    from fsdptool.report.console.runs import continuation
    from fsdptool.report.console.tables import print_lines
    from fsdptool.report.console.train import closing_text, memory_text
    from fsdptool.runs.events import read_lines
    from fsdptool.runs.folder import METRICS
    from fsdptool.runs.manifest import lost_steps

    folder = ready.folder
    conclusion = ready.conclude(outcome)
    summary, document, account = conclusion.summary, conclusion.document, conclusion.account
    if (problem := conclusion.unwritten) is not None:
        progress.say(f"warning: summary.json cannot be written: {problem.strerror or problem}")
    if format is Format.JSON:
        print_document(document)
    else:
        losses = [line.get("loss") for line in read_lines(folder / METRICS)]
        print_lines(closing_text(summary, printable(_shown(folder)), losses))
    if account is not None:
        progress.show(memory_text(to_json(account)))
    _say_failure(outcome, progress)
    if summary.exit_code == ExitCode.WORKER_FAILED:
        progress.say(f"help: fsdptool diagnose {_shown(folder)} names known causes and what to change")
    if advice := continuation(summary.resumable, lost_steps(folder)):
        progress.say(advice if outcome.failure is not None else f"stopped; {advice}")
    return summary.exit_code


def _say_failure(outcome: RunOutcome, progress: Progress) -> None:
    if outcome.failure is not None:
        progress.say(f"error: {outcome.failure.message}")
        if outcome.failure.help:
            progress.say(f"help: {outcome.failure.help}")


def _silent(event: Mapping[str, Any]) -> None:
    """Show nothing: another machine shows the run."""


def _shown(folder: Path) -> str:
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
