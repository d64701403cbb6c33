"""``fsdptool train``: prepare, write the run folder, launch, show progress, summarise."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdptool.cli.options import (
    ConfigOption,
    Format,
    FormatOption,
    RecipeArgument,
    StartOverOption,
    TrustOption,
    print_document,
    say,
    show_progress,
)
from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from fsdptool.launch.outcome import Outcome
    from fsdptool.launch.start import ReadyRun
    from fsdptool.report.console.train import Progress


def command(
    recipe: RecipeArgument,
    config: ConfigOption,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Run folder; default: runs/RECIPE.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", help="auto (the newest valid checkpoint) or a checkpoint folder."),
    ] = None,
    start_over: StartOverOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing run in the folder.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the command line and environment, without starting anything."),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option("--processes", help="Total number of processes; must agree with the configuration."),
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Train on the CPU, whatever the configuration says.")
    ] = False,
    launcher: Annotated[
        str, typer.Option("--launcher", help="Launcher: torchrun or accelerate.")
    ] = "torchrun",
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", help="Restarts from the newest valid checkpoint before giving up."),
    ] = 0,
    timeout: Annotated[float, typer.Option("--timeout", help="Timeout of a collective, in seconds.")] = 600.0,
    grace: Annotated[
        int, typer.Option("--grace", help="Time that workers have to save after a signal, in seconds.")
    ] = 600,
    node_rank: Annotated[int | None, typer.Option("--node-rank", help="Rank of this node.")] = None,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", help="HOST:PORT of node 0, for several nodes.")
    ] = None,
    launch_id: Annotated[
        str | None, typer.Option("--launch-id", help="Launch ID, identical on all nodes, unique per launch.")
    ] = None,
    predict: Annotated[
        bool, typer.Option("--predict/--no-predict", help="Predict memory before the run starts.")
    ] = True,
    trust_remote_code: TrustOption = False,
    format: FormatOption = Format.TEXT,
) -> int:
    """Train RECIPE with the processes, mesh and wrapping of the configuration."""
    from contextlib import ExitStack

    from fsdptool.launch.start import StartOptions, open_run, run_folder

    options = StartOptions.of(locals())
    if resume == "auto" and not (start_over or node_rank):
        options = replace(options, start_over=_starts_over(run_folder(recipe, output)))
    start = open_run(recipe, config, options, dry_run=dry_run)
    with ExitStack() as stack:
        with show_progress():
            ready = stack.enter_context(start)
        if dry_run:
            _print_dry_run(ready, format)
            return 0
        return _run(ready, format)


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
    sys.stdout.write(command_line.shell() + "\n")
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


def _close(ready: ReadyRun, outcome: Outcome, progress: Progress, format: Format) -> int:
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


def _say_failure(outcome: Outcome, progress: Progress) -> None:
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
