"""``fsdptool calibrate``: fit the machine table to measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdptool.cli.options import Format, FormatOption, print_document, say, write_file
from fsdptool.errors import ConfigError, ExitCode
from fsdptool.files.text import is_file

if TYPE_CHECKING:
    from fsdptool.records.measurements import Measurements


def command(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders of fsdptool train, or more traces.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="GPU of the runs; by default that of --measured or of the traces."),
    ] = None,
    measured: Annotated[Path | None, typer.Option(help="What fsdptool doctor --gpu -o wrote.")] = None,
    from_trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Trace of torch's profiler; name those of other ranks after it.",
            metavar="TRACE",
        ),
    ] = None,
    probe: Annotated[
        bool,
        typer.Option("--probe", help="Time operators by size on this machine's GPUs (ten minutes at most)."),
    ] = False,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="With --probe: time them on one thread of the CPU.")
    ] = False,
    context: Annotated[
        str | None, typer.Option(help="Memory of a process before its first tensor, for example '480 MiB'.")
    ] = None,
    communicator: Annotated[
        str | None, typer.Option(help="Memory that the first communicator adds, for example '600 MiB'.")
    ] = None,
    gpus_file: Annotated[
        Path | None, typer.Option(help="JSON or YAML file with extra GPU definitions.")
    ] = None,
    machine: Annotated[Path | None, typer.Option(help="Existing machine table to extend.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Machine table to write, for plan --machine.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    format: FormatOption = Format.TEXT,
) -> int:
    """Fit the machine table of plan --machine to runs, traces, what doctor --gpu measured, or a probe.

    Without -o, the table is printed. Rows of the table given with --machine are kept.
    """
    import json

    from fsdptool.planning.calibrate import calibrate, read_sample
    from fsdptool.planning.clusters import parse_size
    from fsdptool.planning.hardware import read_table, write_table
    from fsdptool.report.console.tables import print_line, print_table
    from fsdptool.report.machine import machine_figures

    traces = [*(from_trace or []), *(run for run in runs or [] if from_trace and is_file(run))]
    if cpu and not probe:
        raise ConfigError("--cpu belongs to --probe", help="add --probe, or leave --cpu out")
    if probe and measured is not None:
        raise ConfigError("--probe measures what --measured would give", help="give one of them")
    row = calibrate(
        gpu,
        [read_sample(run) for run in runs or [] if run not in traces],
        context_bytes=parse_size(context),
        communicator_bytes=parse_size(communicator),
        measured=_probed(cpu) if probe else measured,
        traces=traces,
        gpus_file=gpus_file,
        table=machine,
    )
    kept = read_table(machine) if machine is not None else ()
    rows = (row, *(item for item in kept if item.match != row.match))
    if output is not None:
        write_file(output, write_table(rows), force=force)
        say(f"wrote {output}")
    if format is Format.JSON:
        print_document(json.loads(write_table(rows)))
    else:
        print_line(f"{row.name}: {row.source}")
        print_table(("figure", "value"), machine_figures(row))
    return int(ExitCode.CLEAN)


def _probed(cpu: bool) -> Measurements:
    """Return what a probe of this machine measured."""
    from fsdptool.launch.doctor import measure

    say("timing operators by size on " + ("one thread of the CPU" if cpu else "the GPUs of this machine"))
    return measure(cpu=cpu, kernels=True)
