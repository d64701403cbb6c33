"""``fsdptool calibrate``: measured runs into the machine's table."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.output import Format, print_document, write_file
from fsdptool.errors import ExitCode


def command(
    gpu: Annotated[str, typer.Option(help="GPU they were made on.")],
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders of fsdptool train.")] = None,
    context: Annotated[
        str | None, typer.Option(help="Memory of a process before its first tensor: '480 MiB'.")
    ] = None,
    communicator: Annotated[
        str | None, typer.Option(help="What the first communicator added: '600 MiB'.")
    ] = None,
    gpus_file: Annotated[Path | None, typer.Option(help="Further GPUs, as data.")] = None,
    machine: Annotated[Path | None, typer.Option(help="A table to start from.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Table to write; it is read by plan --machine.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    format: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.TEXT,
) -> int:
    """Turn measured runs into the table that plan --machine reads.

    Without -o the table is printed. Rows of a table named by --machine are kept.
    """
    import json

    from fsdptool.planning.calibrate import calibrate, read_sample
    from fsdptool.planning.clusters import parse_size
    from fsdptool.planning.machine import read_table, write_table
    from fsdptool.records.codec import to_json
    from fsdptool.report.tables import print_line, print_table

    row = calibrate(
        gpu,
        [read_sample(run) for run in runs or []],
        context_bytes=parse_size(context),
        communicator_bytes=parse_size(communicator),
        gpus_file=gpus_file,
        table=machine,
    )
    kept = read_table(machine) if machine is not None else ()
    rows = (row, *(item for item in kept if item.match != row.match))
    if output is not None:
        write_file(output, write_table(rows), force=force)
        sys.stderr.write(f"wrote {output}\n")
    if format is Format.JSON:
        print_document(json.loads(write_table(rows)))
    else:
        print_line(f"{row.name}: {row.source}")
        print_table(("figure", "value"), [(name, str(value)) for name, value in to_json(row).items()])
    return int(ExitCode.CLEAN)
