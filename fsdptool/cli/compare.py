"""``fsdptool compare``: two plans, or a plan and the run it predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.options import Format, FormatOption, check_output, print_document, write_answer
from fsdptool.errors import ExitCode, PlanError
from fsdptool.files.text import is_folder


def command(
    left: Annotated[
        Path,
        typer.Argument(help="A plan (plan.json), a run folder, or a training file, on the plan's hardware."),
    ],
    right: Annotated[
        Path | None, typer.Argument(help="Another plan or run folder; a run alone is compared with its plan.")
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            help="Exit with 1 if the predicted peak is off by more than this percentage, with 5 if unknown."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write comparison.json or comparison.html.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show every moment of a step of two plans.")
    ] = False,
    format: FormatOption = Format.TEXT,
) -> int:
    """Compare two plans, or a plan with the measurements of a run.

    A run folder alone, or given twice, is compared with its own prediction.
    """
    from fsdptool.planning.compare import compare
    from fsdptool.records.diagnostic import answer
    from fsdptool.report.console.plan import print_comparison

    check_output(output, force, {"a comparison": (".json", ".html")})
    if right is None:
        if not is_folder(left):
            raise PlanError(f"{left} is compared with nothing", help="give a second plan or a run folder")
        right = left
    comparison = compare(left, right)
    if tolerance is not None and comparison.kind == "plans":
        raise PlanError("--tolerance requires a plan and a run", help="two plans do not contain measurements")
    compared = answer("compare", [str(left), str(right)], comparison)
    if format is Format.JSON:
        print_document(compared.document())
    else:
        print_comparison(comparison, explain=explain)
    if output is not None:
        from fsdptool.report.page.plan import comparison_page

        write_answer(output, compared, comparison_page, force=force)
    if tolerance is None:
        return int(ExitCode.CLEAN)
    if comparison.error_percent is None:
        return int(ExitCode.INCOMPLETE)
    return int(ExitCode.FINDINGS if abs(comparison.error_percent) > tolerance else ExitCode.CLEAN)
