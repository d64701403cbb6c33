"""What ``plan`` does with its answer: prints it, writes it, checks a saved one, picks the exit status."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fsdptool.cli.options import Format
from fsdptool.cli.output import check_free, print_document, say, write_file
from fsdptool.errors import ExitCode, PlanError, StorageError

if TYPE_CHECKING:
    from fsdptool.records.plan import Plan


def exit_code(plan: Plan) -> ExitCode:
    """Return the status a verdict leaves with."""
    codes = {"fits": ExitCode.CLEAN, "does_not_fit": ExitCode.FINDINGS, "unknown": ExitCode.INCOMPLETE}
    return codes[plan.verdict]


def answer(plan: Plan, output: Path | None, *, force: bool, format: Format, explain: bool) -> None:
    """Print the plan and write it to the output file."""
    import json

    from fsdptool.planning.plan_document import plan_document
    from fsdptool.report.plan import print_plan

    document = plan_document(plan)
    if output is not None and output.suffix == ".html":
        from fsdptool.report.html import plan_page

        write_file(output, plan_page(document), force=force)
    elif output is not None:
        write_file(output, json.dumps(document, indent=1, ensure_ascii=False) + "\n", force=force)
    if format is Format.JSON:
        print_document(document)
    else:
        print_plan(document, explain=explain)
    if output is not None:
        say(f"wrote {output}")


def check_saved(path: Path, format: Format, *, trust_remote_code: bool = False) -> int:
    """Derive a saved plan anew, print what changed and return the exit status."""
    from fsdptool.planning.plan_check import check_plan
    from fsdptool.planning.plan_document import plan_document
    from fsdptool.report.plan import print_changes

    after, changes = check_plan(path, trust_remote_code=trust_remote_code, progress=progress)
    if format is Format.JSON:
        document = plan_document(after)
        document["details"]["changes"] = [
            {"what": change.what, "before": change.before, "after": change.after} for change in changes
        ]
        print_document(document)
    else:
        print_changes(str(path), [(c.what, c.before, c.after) for c in changes])
    return int(ExitCode.FINDINGS if changes else exit_code(after))


def check_output(output: Path | None, force: bool) -> None:
    """Refuse before the work, not after it."""
    if output is None:
        return
    if output.suffix not in (".json", ".html"):
        raise PlanError(
            f"{output}: a plan is written as .json or .html", help="choose one of the two suffixes"
        )
    check_free(output, force=force)
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"{output} cannot be written: {folder} takes no files", help="choose another path")


def progress(line: str) -> None:
    """Say on standard error what is being done."""
    say(f"{line}")
