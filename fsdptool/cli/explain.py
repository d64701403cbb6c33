"""``fsdptool explain``: every effective setting of a file, with where it came from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.options import DialectOption, Format, FormatOption, TargetOption, print_document
from fsdptool.errors import ExitCode

_VARIABLES = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")


def command(
    file: Annotated[Path, typer.Argument(help="The configuration file; - reads standard input.")],
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
    """Show every effective setting with its value and origin, and the settings that are ignored."""
    from fsdptool.cli.validate import read_input
    from fsdptool.config import read_settings
    from fsdptool.config.result import explain_document
    from fsdptool.report.console.findings import render_explanation
    from fsdptool.report.console.tables import terminal_width

    environment = {} if no_environment else {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)}
    reading = read_settings(
        read_input(file) or file, dialect=dialect, consumer=consumer, target=target, environment=environment
    )
    if format is Format.JSON:
        print_document(explain_document(reading))
    else:
        sys.stdout.write(render_explanation(reading, width=terminal_width(sys.stdout)))
    return int(ExitCode.FINDINGS if reading.errors else ExitCode.CLEAN)
