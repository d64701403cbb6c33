"""``fsdptool explain``: every effective setting of a file, with where it came from."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.output import Format, print_document
from fsdptool.errors import ExitCode

_VARIABLES = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")


def command(
    file: Annotated[Path, typer.Argument(help="The configuration; - reads standard input.")],
    consumer: Annotated[
        str | None, typer.Option(help="Who reads it: accelerate, fsdptool, trainer, ...")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Version to judge for: accelerate==1.15.")] = None,
    dialect: Annotated[str | None, typer.Option(help="Force the dialect instead of detecting it.")] = None,
    no_environment: Annotated[
        bool, typer.Option("--no-environment", help="Leave this shell's variables out.")
    ] = False,
    format: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.TEXT,
) -> int:
    """Print every effective setting, its value, where it came from, and what was ignored."""
    from fsdptool.cli.validate import read_input
    from fsdptool.config import read_settings
    from fsdptool.config.result import explain_document
    from fsdptool.report.explain import render_explanation

    environment = {} if no_environment else {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)}
    reading = read_settings(
        read_input(file) or file, dialect=dialect, consumer=consumer, target=target, environment=environment
    )
    if format is Format.JSON:
        print_document(explain_document(reading))
    else:
        sys.stdout.write(render_explanation(reading))
    return int(ExitCode.FINDINGS if reading.errors else ExitCode.CLEAN)
