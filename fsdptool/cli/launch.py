"""``fsdptool launch``: the lines that start a run on several machines, or a Slurm script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fsdptool.cli.options import (
    ConfigOption,
    Format,
    FormatOption,
    RecipeArgument,
    TrustOption,
    answer_line,
    print_document,
    refuse,
    takes,
    write_file,
)
from fsdptool.launch.options import SlurmOptions, StartOptions
from fsdptool.options import LAUNCH_ID, declared


@takes(SlurmOptions)
def command(
    context: typer.Context,
    recipe: RecipeArgument,
    config: ConfigOption,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Run folder, accessible from every node; default: runs/RECIPE."),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="Cluster file: nodes, NCCL settings.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Host name or address at which the other nodes reach node 0.")
    ] = "node0",
    launch_id: Annotated[str | None, typer.Option("--launch-id", help=LAUNCH_ID.help)] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a Slurm batch script.")] = False,
    script: Annotated[
        Path | None, typer.Option("--script", help="File to write the batch script to.")
    ] = None,
    max_restarts: Annotated[int, typer.Option("--max-restarts", help="Restarts within one launch.")] = 0,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help=declared(StartOptions)["timeout"].option.help)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing script.")] = False,
    trust_remote_code: TrustOption = False,
    format: FormatOption = Format.TEXT,
    **given: Any,
) -> int:
    """Print the command line of every node for RECIPE, or a Slurm script, without starting anything."""
    if not slurm:
        refuse(
            context,
            ("script", *declared(SlurmOptions)),
            "requires --slurm",
            "add --slurm, or remove the option",
        )
    from fsdptool.launch.job import node_lines, random_id
    from fsdptool.launch.prepare import absolute_job
    from fsdptool.launch.slurm import slurm_script

    options: tuple[str, ...] = ("--max-restarts", str(max_restarts)) if max_restarts else ()
    options += ("--timeout", f"{timeout:g}") if timeout is not None else ()
    job = absolute_job(
        recipe,
        config,
        output or Path("runs") / recipe.stem,
        cluster,
        options,
        trust_remote_code=trust_remote_code,
    )
    text = None
    if slurm:
        text = slurm_script(job, **cast("SlurmOptions", given))
        if script is not None:
            write_file(script, text, force=force)
            script.chmod(0o755)
    lines = node_lines(job, host, launch_id or random_id())
    if format is Format.JSON:
        print_document(_document(lines, dict(job.variables), str(job.output), text))
    elif text is not None and script is None:
        sys.stdout.write(text)
    elif text is not None:
        answer_line(f"{script}: submit it with sbatch {script}")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _document(lines: list[str], variables: dict[str, str], folder: str, script: str | None) -> dict[str, Any]:
    import shlex

    from fsdptool.records.command_documents import LaunchLines, NodeCommand
    from fsdptool.records.diagnostic import envelope

    nodes = (NodeCommand(tuple(shlex.split(line)[len(variables) :]), variables) for line in lines)
    report = LaunchLines(tuple(nodes), folder, script)
    return envelope("launch", report, report)
