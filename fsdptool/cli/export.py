"""``fsdptool export``: write a run's checkpoint in a format that other libraries load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.options import Format, FormatOption, TrustOption, answer_line, print_document, say


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
    from fsdptool.errors import ConfigError
    from fsdptool.runs.folder import RUN
    from fsdptool.runs.signals import handle_stop_signals
    from fsdptool.training.export.api import export_run

    if not (run / RUN).exists():
        raise ConfigError(f"{run} is not a run folder", help="give the folder that fsdptool train wrote")
    if dtype not in (None, "float32", "bfloat16", "float16", "float64"):
        raise ConfigError(
            f"--dtype {dtype!r} is not supported", help="choose float32, bfloat16, float16 or float64"
        )
    with handle_stop_signals(
        "the export was complete", "run the same command again; the partial export was removed"
    ):
        exported = export_run(
            run,
            output,
            checkpoint=checkpoint,
            merge=merge,
            average=ema,
            dtype=dtype,  # type: ignore[arg-type]
            shard_bytes=parse_size(max_shard_size),
            force=force,
            trust_remote_code=trust_remote_code,
        )
        _note_in_summary(run, exported.folder)
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


def parse_size(text: str) -> int:
    """Return bytes from ``5GB``, ``500MB``, ``2GiB`` or a plain number.

    Raises:
        ConfigError: It is not a size.
    """
    import re

    from fsdptool.errors import ConfigError

    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", text, re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--max-shard-size {text!r} is not a size", help="write it as 5GB or 500MB")
    power = " kmgt".index(match[2].lower() or " ")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def _note_in_summary(run: Path, folder: Path) -> None:
    """Name the export in the run's summary, if there is one."""
    import contextlib

    from fsdptool.runs.folder import SUMMARY, read_json, write_json

    path = run / SUMMARY
    if path.exists():
        with contextlib.suppress(OSError):
            inside = folder.is_relative_to(run)
            write_json(path, read_json(path) | {"export": str(folder.relative_to(run) if inside else folder)})
