"""``fsdptool export``: write a run's checkpoint in a format that other libraries load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fsdptool.api.options import ExportOptions
from fsdptool.cli.options import (
    Format,
    FormatOption,
    answer_line,
    print_document,
    say,
    show_progress,
    takes,
)


@takes(ExportOptions)
def command(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; default: RUN/export.")
    ] = None,
    format: FormatOption = Format.TEXT,
    **options: Any,
) -> int:
    """Write the trained model of RUN for transformers, diffusers or peft."""
    from fsdptool.api.runs import export
    from fsdptool.runs.signals import handle_stop_signals

    stops = handle_stop_signals(
        "the export was complete", "run the same command again; the partial export was removed"
    )
    with stops, show_progress():
        exported = export(run, output, **options)
    if format is Format.JSON:
        from fsdptool.records.command_documents import ExportReport
        from fsdptool.records.diagnostic import envelope

        report = ExportReport(
            folder=str(exported.folder),
            kind=exported.kind,
            step=exported.step,
            checkpoint=str(exported.checkpoint),
            files=tuple(exported.files),
            bytes=exported.bytes,
        )
        print_document(envelope("export", report, report, unknowns=exported.notes))
        return 0
    answer_line(f"{exported.folder}: {exported.kind}, step {exported.step}, {exported.bytes:,} bytes")
    for name in exported.files:
        answer_line(f"  {name}")
    for note in exported.notes:
        say(f"note: {note}")
    return 0
