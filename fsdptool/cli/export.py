"""``fsdptool export``: write a run's checkpoint in a format that other libraries load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.options import (
    Format,
    FormatOption,
    TrustOption,
    answer_line,
    print_document,
    say,
    show_progress,
)


def command(
    run: Annotated[Path, typer.Argument(help="A run folder.", metavar="RUN")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; default: RUN/export.")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="Checkpoint folder; default: the newest valid one.")
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge LoRA adapters into the base.")] = False,
    ema: Annotated[bool, typer.Option("--ema", help="Export the moving average of the weights.")] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="dtype of the weights: float32, bfloat16, float16 or float64."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", help="Maximum size of a file, for example 5GB or 500MB.")
    ] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing export.")] = False,
    trust_remote_code: TrustOption = False,
    format: FormatOption = Format.TEXT,
) -> int:
    """Write the trained model of RUN for transformers, diffusers or peft."""
    from fsdptool.api.runs import export
    from fsdptool.runs.signals import handle_stop_signals

    stops = handle_stop_signals(
        "the export was complete", "run the same command again; the partial export was removed"
    )
    with stops, show_progress():
        exported = export(
            run,
            output,
            checkpoint=checkpoint,
            merge=merge,
            ema=ema,
            dtype=dtype,
            max_shard_size=max_shard_size,
            force=force,
            trust_remote_code=trust_remote_code,
        )
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
