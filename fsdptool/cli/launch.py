"""``fsdptool launch``: the lines that start a run on several machines, or a Slurm script."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fsdptool.cli.cli_params import refuse
from fsdptool.cli.output import Format, print_document, write_file

_SLURM = ("script", "name", "time", "partition", "account", "cpus_per_task", "setup")
"""Options that mean something in a batch script alone."""


def command(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="The recipe (YAML).", metavar="RECIPE")],
    config: Annotated[Path, typer.Option("--config", help="The accelerate YAML (or another dialect).")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Run folder, seen by every node; default: runs/RECIPE."),
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", help="Cluster description: nodes, NCCL settings.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Node 0, as the other nodes reach it.")] = "node0",
    launch_id: Annotated[
        str, typer.Option("--launch-id", help="The same on every node, new for every launch.")
    ] = "launch-1",
    slurm: Annotated[bool, typer.Option("--slurm", help="Write a Slurm batch script.")] = False,
    script: Annotated[Path | None, typer.Option("--script", help="Write the script here.")] = None,
    name: Annotated[str | None, typer.Option("--name", help="Slurm job name; default: RECIPE.")] = None,
    time: Annotated[str | None, typer.Option("--time", help="Slurm time limit.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Slurm account.")] = None,
    cpus_per_task: Annotated[int | None, typer.Option("--cpus-per-task", help="Cores per node.")] = None,
    setup: Annotated[
        list[str] | None, typer.Option("--setup", help="Line to run first, for example 'module load cuda'.")
    ] = None,
    max_restarts: Annotated[int, typer.Option("--max-restarts", help="Relaunches within one launch.")] = 0,
    timeout: Annotated[
        float | None, typer.Option("--timeout", help="Seconds a collective may take, as for train.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the script file.")] = False,
    format: Annotated[Format, typer.Option("--format", help="text or json.")] = Format.TEXT,
) -> int:
    """Print what to run on every node for RECIPE; nothing is started."""
    if not slurm:
        refuse(context, _SLURM, "only a Slurm script has this", "add --slurm, or leave it out")
    from fsdptool.launch.prepare import absolute_job
    from fsdptool.launch.slurm import node_lines, slurm_script

    options: tuple[str, ...] = ("--max-restarts", str(max_restarts)) if max_restarts else ()
    options += ("--timeout", f"{timeout:g}") if timeout is not None else ()
    job = absolute_job(recipe, config, output or Path("runs") / recipe.stem, cluster, options)
    text = None
    if slurm:
        text = slurm_script(
            job,
            name=name or recipe.stem,
            time=time,
            partition=partition,
            account=account,
            cpus_per_task=cpus_per_task,
            setup=setup or (),
        )
        if script is not None:
            write_file(script, text, force=force)
            script.chmod(0o755)
    lines = node_lines(job, host, launch_id)
    if format is Format.JSON:
        print_document(_document(lines, dict(job.variables), str(job.output), text))
    elif text is not None and script is None:
        sys.stdout.write(text)
    elif text is not None:
        sys.stdout.write(f"{script}: submit it with sbatch {script}\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _document(lines: list[str], variables: dict[str, str], folder: str, script: str | None) -> dict[str, Any]:
    import shlex

    from fsdptool.records.document import envelope

    nodes = [{"argv": shlex.split(line)[len(variables) :], "environment": variables} for line in lines]
    body: dict[str, Any] = {"nodes": nodes, "folder": folder, "script": script}
    return envelope("launch", body, body)
