"""``fsdptool queue``: runs of this machine that start one after another when their GPUs are free."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdptool.cli.options import (
    ConfigOption,
    Format,
    FormatOption,
    RecipeArgument,
    StartOverOption,
    answer_line,
    print_document,
    say,
)
from fsdptool.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from fsdptool.launch.queue.entries import Queue

group = typer.Typer(help="Queue runs on this machine; runs that share GPUs run one after another.")

EntryArgument = Annotated[int, typer.Argument(help="Number of the entry.", metavar="ENTRY")]
FirstOption = Annotated[
    bool, typer.Option("--first", help="Start it before all entries that are already waiting.")
]


class Direction(StrEnum):
    """Where an entry moves."""

    UP = "up"
    DOWN = "down"
    FIRST = "first"
    LAST = "last"


def _queue() -> Queue:
    from fsdptool.launch.queue.entries import Queue

    return Queue()


@group.command("add")
def add(
    recipe: RecipeArgument,
    config: ConfigOption,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Run folder; default: runs/RECIPE.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the folder from its newest checkpoint.")
    ] = False,
    start_over: StartOverOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing run in the folder.")] = False,
    gpus: Annotated[
        str | None, typer.Option("--gpus", help="GPUs of the run (0,1), if the configuration has no gpu_ids.")
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Train on the CPU, whatever the configuration says.")
    ] = False,
    predict: Annotated[
        bool, typer.Option("--predict/--no-predict", help="Predict memory before the run starts.")
    ] = True,
    max_restarts: Annotated[
        int,
        typer.Option("--max-restarts", help="Restarts from the newest valid checkpoint before giving up."),
    ] = 0,
    hold: Annotated[bool, typer.Option("--hold", help="Do not start it before it is released.")] = False,
    first: FirstOption = False,
) -> int:
    """Append a run to the queue; `fsdptool queue run` or `fsdptool ui` starts it."""
    from fsdptool.records.queue import RunRequest

    request = RunRequest(
        recipe=str(recipe),
        config=str(config),
        output=str(output) if output is not None else None,
        gpus=tuple(part.strip() for part in (gpus or "").split(",") if part.strip()),
        cpu=cpu,
        predict=predict,
        max_restarts=max_restarts,
        resume=resume,
        start_over=start_over,
        force=force,
        hold=hold,
        first=first,
    )
    entry = _queue().submit(request)
    answer_line(f"{entry}")
    return int(ExitCode.CLEAN)


@group.command("list")
def listing(format: FormatOption = Format.TEXT) -> int:
    """List the entries: those that run, those that wait and why, and those that have ended."""
    from fsdptool.records.diagnostic import envelope
    from fsdptool.report.console.runs import print_queue

    report = _queue().report()
    if format is Format.JSON:
        print_document(envelope("queue", None, report))
    else:
        print_queue(report, now=time.time())
    return int(ExitCode.CLEAN)


@group.command("move")
def move(
    entry: EntryArgument,
    direction: Annotated[Direction, typer.Argument(help="up, down, first or last.", metavar="DIRECTION")],
) -> int:
    """Move a waiting entry to another place in the queue."""
    _queue().move(entry, direction.value)
    return int(ExitCode.CLEAN)


@group.command("hold")
def hold(entry: EntryArgument) -> int:
    """Hold a waiting entry: it does not start until it is released."""
    _queue().hold(entry)
    return int(ExitCode.CLEAN)


@group.command("release")
def release(entry: EntryArgument) -> int:
    """Release a held entry, so that it can start."""
    _queue().release(entry)
    return int(ExitCode.CLEAN)


@group.command("cancel")
def cancel(entry: EntryArgument) -> int:
    """Cancel an entry that was not started."""
    _queue().cancel(entry)
    return int(ExitCode.CLEAN)


@group.command("remove")
def remove(entry: EntryArgument) -> int:
    """Remove an entry that has ended from the list; its run folder stays."""
    _queue().remove(entry)
    return int(ExitCode.CLEAN)


@group.command("stop")
def stop(
    entry: EntryArgument,
    kill: Annotated[bool, typer.Option("--kill", help="End it at once, without a checkpoint.")] = False,
) -> int:
    """Ask a run to save a checkpoint and stop."""
    queue = _queue()
    if not (queue.kill(entry) if kill else queue.stop(entry)):
        say(f"entry {entry} has ended already")
    return int(ExitCode.CLEAN)


@group.command("resume")
def resume(entry: EntryArgument, first: FirstOption = False, start_over: StartOverOption = False) -> int:
    """Queue another start of a run that has ended, from its newest checkpoint."""
    answer_line(f"{_queue().resume(entry, first=first, start_over=start_over)}")
    return int(ExitCode.CLEAN)


@group.command("slots")
def slots(
    count: Annotated[
        int, typer.Argument(help="Most processes that all CPU runs together may have.", metavar="COUNT")
    ],
) -> int:
    """Set how many processes all CPU runs together may have; default: the number of cores."""
    _queue().set_slots(count)
    return int(ExitCode.CLEAN)


@group.command("run")
def run(
    until_idle: Annotated[
        bool, typer.Option("--until-idle", help="Exit when no entry waits or runs.")
    ] = False,
) -> int:
    """Start entries as soon as what they need is free. Ctrl-C ends this command; started runs continue."""
    import threading

    from fsdptool.launch.queue.scheduler import Scheduler

    scheduler = Scheduler(_queue())
    if not scheduler.acquire():
        raise ConfigError(
            "another program already starts the entries of the queue",
            help="`fsdptool queue list` names its process",
        )
    try:
        scheduler.run(threading.Event(), until_idle=until_idle)
    except KeyboardInterrupt:
        say("stopped; started runs continue, and waiting entries start with the next `queue run`")
        return int(ExitCode.INTERRUPTED)
    return int(ExitCode.CLEAN)
