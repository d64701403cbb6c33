"""``fsdptool compare``: two plans, or a plan and the run it predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.output import Format, print_document
from fsdptool.errors import ExitCode, PlanError


def command(
    left: Annotated[Path, typer.Argument(help="A plan (plan.json), or a run folder.")],
    right: Annotated[Path, typer.Argument(help="Another plan, or a run folder.")],
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Exit 1 if the predicted peak is off by more than this many percent, 5 if it is unknown."
        ),
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.TEXT,
) -> int:
    """Compare two plans, or a plan's prediction with what a run measured.

    A run folder given twice compares the run with its own prediction.
    """
    from fsdptool.planning.compare import compare
    from fsdptool.records.codec import to_json
    from fsdptool.records.document import envelope
    from fsdptool.report.compare import print_comparison

    found = compare(left, right)
    if tolerance is not None and found.kind == "plans":
        raise PlanError(
            "--tolerance is for a plan and a run", help="two plans have nothing that was measured"
        )
    document = envelope("compare", [str(left), str(right)], to_json(found))
    if format is Format.JSON:
        print_document(document)
    else:
        print_comparison(document)
    if tolerance is None:
        return int(ExitCode.CLEAN)
    if found.error_percent is None:
        return int(ExitCode.INCOMPLETE)
    return int(ExitCode.FINDINGS if abs(found.error_percent) > tolerance else ExitCode.CLEAN)
