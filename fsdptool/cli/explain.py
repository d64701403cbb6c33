"""``fsdptool explain``: every effective setting of a file with its origin, and the run that it describes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.options import DialectOption, Format, FormatOption, TargetOption, print_document

_VARIABLES = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")


def command(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            help="The configuration file or script; - reads standard input. A command line stands after --."
        ),
    ],
    consumer: Annotated[
        str | None, typer.Option(help="Program that reads the file: accelerate, fsdptool, trainer, ...")
    ] = None,
    target: TargetOption = None,
    dialect: DialectOption = None,
    no_environment: Annotated[
        bool, typer.Option("--no-environment", help="Ignore the variables of this shell.")
    ] = False,
    format: FormatOption = Format.TEXT,
) -> int:
    """Show every effective setting with its value and origin, and the run that a training file describes."""
    from fsdptool.api.explain import explain_one
    from fsdptool.cli.validate import read_input
    from fsdptool.config.described import describe_command
    from fsdptool.report.console.findings import render_explanation
    from fsdptool.report.console.tables import terminal_width
    from fsdptool.scripts import SCRIPTS

    environment = {} if no_environment else {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)}
    words = context.args if str(file).endswith(SCRIPTS) else ()
    line = context.args and not words
    source = describe_command([str(file), *context.args])[0] if line else read_input(file)
    explained = explain_one(
        source or file,
        dialect=dialect,
        consumer=consumer,
        target=target,
        environment=environment,
        words=words,
    )
    if format is Format.JSON:
        print_document(explained.document())
    else:
        width = terminal_width(sys.stdout)
        sys.stdout.write(render_explanation(explained.reading, explained.run, width=width))
    return explained.exit_code()
