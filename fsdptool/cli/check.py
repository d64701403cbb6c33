"""``fsdptool check``: whether the runs of a repository's training files fit, in CI and before a commit."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fsdptool.api.check import CheckOptions
from fsdptool.cli.options import answer_line, print_document, show_progress, takes


class CheckFormat(StrEnum):
    """Output format of ``check``."""

    TEXT = "text"
    JSON = "json"
    GITHUB = "github"
    MARKDOWN = "markdown"
    SARIF = "sarif"


@takes(CheckOptions)
def command(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Files or folders; by default everything below the working directory."),
    ] = None,
    format: Annotated[
        CheckFormat,
        typer.Option(
            "--format",
            help="Output format: github annotates lines, markdown is a comment, sarif is for code scanning.",
        ),
    ] = CheckFormat.TEXT,
    **options: Any,
) -> int:
    """Plan the training files of a repository, and say for each whether it fits its hardware.

    Examples:

      fsdptool check --base origin/main --format github

      fsdptool check train.yaml --gpu A100-80GB-SXM --gpus 4

    The files are those that plan reads. Exit status: 1 if a run certainly does not fit, else 0. Files whose
    verdict is unknown, or that cannot be planned, are listed and do not fail.
    """
    from fsdptool.api.check import check, exit_code
    from fsdptool.records.diagnostic import answer
    from fsdptool.report import checks

    given = cast("CheckOptions", options)
    with show_progress() as progress:
        report = check(files or [Path()], given, progress)
    if format is CheckFormat.JSON:
        named = [str(path) for path in files or ()]
        print_document(answer("check", [named, options], report).document())
    elif format is CheckFormat.SARIF:
        print_document(checks.sarif_document(report))
    elif format is CheckFormat.TEXT:
        for line in checks.text_lines(report):
            answer_line(line)
    else:
        lines = checks.github_lines if format is CheckFormat.GITHUB else checks.markdown_lines
        sys.stdout.write("".join(f"{line}\n" for line in lines(report)))
    return exit_code(report)
