"""``fsdptool audit``: the known bugs of library versions that affect the runs of files."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fsdptool.api.audit import AuditOptions
from fsdptool.cli.options import answer_line, print_document, takes


class AuditFormat(StrEnum):
    """Output format of ``audit``."""

    TEXT = "text"
    JSON = "json"
    SARIF = "sarif"
    GITHUB = "github"


@takes(AuditOptions)
def command(
    files: Annotated[list[Path], typer.Argument(help="Files or folders.")],
    format: Annotated[AuditFormat, typer.Option("--format", help="Output format.")] = AuditFormat.TEXT,
    **options: Any,
) -> int:
    """Name the known bugs of library versions that affect a run.

    Examples:

      fsdptool audit fsdp.yaml train.yaml --lock uv.lock

      fsdptool audit train.sh --target accelerate==1.13.0 --target transformers==5.5.0

    Versions are those of --lock and --target, or the installed ones. Exit status: 1 if an advisory applies
    that changes results, memory or speed or ends the run, else 0.
    """
    from fsdptool.api.audit import audit, exit_code
    from fsdptool.records.diagnostic import answer
    from fsdptool.report import audits

    report = audit(files, **cast("AuditOptions", options))
    if format is AuditFormat.JSON:
        named = [str(path) for path in files]
        print_document(answer("audit", [named, report.versions, report.ignored], report).document())
    elif format is AuditFormat.SARIF:
        print_document(audits.sarif_document(report))
    elif format is AuditFormat.GITHUB:
        sys.stdout.write(audits.render_github(report))
    else:
        for line in audits.text_lines(report):
            answer_line(line)
    return exit_code(report)
