"""``fsdptool share``: a measured run as a row for the public collection."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.options import given_file, print_document, say, write_file
from fsdptool.errors import ExitCode
from fsdptool.files.values import load_json


def command(
    source: Annotated[
        Path,
        typer.Argument(
            help="Run folder of fsdptool train, or a log of torchtitan, AutoModel, Trainer or axolotl."
        ),
    ],
    gpu: Annotated[str, typer.Option(help="GPU of the run, for example H100-80GB-SXM.")],
    config: Annotated[
        Path | None, typer.Option(help="Configuration that the log's run was started with.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs per node.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes.")] = 1,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; default: standard output.", callback=given_file),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> int:
    """Write a measured run as a row for the public collection, without names and data.

    Read the row before you send it. benchmarks/planning/add_row.py checks rows and adds them.
    """
    from fsdptool.planning.share import row_text, share

    text = row_text(share(source, gpu=gpu, gpus=gpus, nodes=nodes, config=config))
    if output is None:
        print_document(load_json(text))
    else:
        write_file(output, text, force=force)
        say(f"wrote {output}")
    return int(ExitCode.CLEAN)
