"""``fsdptool train``: prepare, write the run folder, launch, show progress, summarise."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdptool.cli.options import (
    ConfigOption,
    Format,
    FormatOption,
    RecipeArgument,
    TrustOption,
    print_document,
)

if TYPE_CHECKING:
    from fsdptool.launch.command import LaunchCommand
    from fsdptool.launch.outcome import Outcome
    from fsdptool.launch.prepare import Prepared
    from fsdptool.report.train import Progress
    from fsdptool.runs.signals import StopSignals


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
    from dataclasses import replace

    from fsdptool.errors import ConfigError
    from fsdptool.launch.command import build_command
    from fsdptool.launch.create import check_folder, check_unlocked, lock_run, wait_for_run, write_run
    from fsdptool.launch.machine import claim_gpus
    from fsdptool.launch.prepare import place_nodes, prepare
    from fsdptool.runs.folder import ACCELERATE
    from fsdptool.runs.signals import handle_stop_signals

    if launcher not in ("torchrun", "accelerate"):
        raise ConfigError(f"--launcher {launcher!r} is not supported", help="choose torchrun or accelerate")
    folder = (output or Path("runs") / recipe.stem).absolute()
    first = not node_rank
    with handle_stop_signals("the run was started", "start it again with --resume auto") as stops:
        if first:
            check_unlocked(folder)
            check_folder(folder, resume=resume, force=force)
        prepared = prepare(
            recipe,
            config,
            processes=processes,
            cpu=cpu,
            with_prediction=predict and first and not dry_run,
            with_data=first and not dry_run,
            trust_remote_code=trust_remote_code,
        )
        nodes = place_nodes(prepared.settings, node_rank, rendezvous, launch_id)
        if rendezvous is not None:
            # The command line gives the rendezvous, so the finding about the file does not apply.
            remaining = tuple(item for item in prepared.diagnostics if item.code != "FSD329")
            prepared = replace(prepared, diagnostics=remaining)
        command_line = build_command(
            folder,
            prepared.settings,
            processes=prepared.per_machine,
            device=prepared.device,
            launcher="accelerate" if launcher == "accelerate" else "torchrun",
            nodes=nodes,
            max_restarts=max_restarts,
            grace_seconds=grace,
            timeout_seconds=timeout,
            config=folder / ACCELERATE,
            trust_remote_code=trust_remote_code,
        )
        if dry_run:
            _print_dry_run(command_line, folder, format)
            return 0
        if not first:
            wait_for_run(folder, launch_id)
            with claim_gpus(prepared.settings, prepared.device, folder):
                return _run(prepared, folder, command_line, max_restarts, stops, format, quiet=True)
        with lock_run(folder), claim_gpus(prepared.settings, prepared.device, folder):
            # Again: another start may have come and gone while this one prepared.
            number = check_folder(folder, resume=resume, force=force)
            write_run(
                folder,
                prepared,
                resume=resume,
                number=number,
                argv=sys.argv,
                force=force,
                launch_id=launch_id,
            )
            return _run(prepared, folder, command_line, max_restarts, stops, format)


def _print_dry_run(command_line: LaunchCommand, folder: Path, format: Format) -> None:
    from fsdptool.records.command_documents import LaunchLines, NodeCommand
    from fsdptool.records.diagnostic import envelope

    if format is Format.JSON:
        node = NodeCommand(tuple(command_line.argv), command_line.environment)
        report = LaunchLines((node,), str(folder), None)
        print_document(envelope("launch", report, report))
        return
    sys.stdout.write(command_line.shell() + "\n")


def _run(
    prepared: Prepared,
    folder: Path,
    command_line: LaunchCommand,
    max_restarts: int,
    stops: StopSignals,
    format: Format,
    *,
    quiet: bool = False,
) -> int:
    from fsdptool.launch.outcome import exit_status
    from fsdptool.launch.supervise import Supervisor
    from fsdptool.records.codec import to_json
    from fsdptool.report.train import Progress, plan_text

    progress = Progress(prepared.recipe.steps, every=max(prepared.recipe.tracking.log_every, 1))
    for note in (
        *(item.message for item in prepared.diagnostics if item.severity == "warning"),
        *prepared.notes,
    ):
        progress.say(f"warning: {note}")
    on_event = _silent if quiet else progress
    if not quiet:
        progress.show(plan_text(to_json(prepared.prediction)))
    # From here on a signal has somebody to reach; once they have ended, it changes nothing.
    stops.collect()
    supervisor = Supervisor(
        folder, command_line, max_restarts=max_restarts, signals=stops.taken, on_event=on_event
    )
    try:
        outcome = supervisor.run()
    finally:
        progress.close()
    if quiet:
        # The first machine sums up, if it is there to do it; this one says how it ended.
        _say_failure(outcome, progress)
        return int(exit_status(outcome))
    return _close(prepared, folder, outcome, progress, format)


def _close(prepared: Prepared, folder: Path, outcome: Outcome, progress: Progress, format: Format) -> int:
    from dataclasses import asdict, replace

    from fsdptool.formatting import printable, printable_lines
    from fsdptool.launch.outcome import account_for_memory, summarise, write_report, write_summary
    from fsdptool.records.codec import to_json
    from fsdptool.report.train import closing_text, memory_text
    from fsdptool.runs.events import read_lines
    from fsdptool.runs.folder import METRICS

    mesh = asdict(prepared.settings.mesh.resolve(prepared.world_size))
    summary = summarise(folder, outcome, units=len(prepared.units.units), mesh=mesh)
    account = account_for_memory(prepared, outcome.failure) if outcome.failure is not None else None
    try:
        if account is not None:
            summary = replace(summary, memory_report=write_report(folder, account))
        document = write_summary(folder, summary)
    except OSError as error:
        progress.say(f"warning: summary.json cannot be written: {error.strerror or error}")
        document = asdict(summary)
    if format is Format.JSON:
        print_document(document)
    else:
        losses = [line.get("loss") for line in read_lines(folder / METRICS)]
        sys.stdout.write(printable_lines(closing_text(document, printable(_shown(folder)), losses)))
    if account is not None:
        progress.show(memory_text(to_json(account)))
    _say_failure(outcome, progress)
    if outcome.failure is None and summary.resumable:
        progress.say("stopped; continue with --resume auto")
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
