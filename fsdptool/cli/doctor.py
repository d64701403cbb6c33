"""``fsdptool doctor``: what this machine offers, and whether FSDP2 really shards on it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fsdptool.cli.output import Format, print_document
from fsdptool.errors import ExitCode


def command(
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Start two processes and really shard.")
    ] = True,
    format: Annotated[Format, typer.Option("--format", help="text or json.")] = Format.TEXT,
) -> int:
    """Report versions, devices, plugins, the cache and a two-process FSDP2 probe."""
    from fsdptool.launch.doctor import examine
    from fsdptool.records.document import envelope

    health = examine(with_probe=probe)
    body = {name: value for name, value in asdict(health).items() if name != "diagnostics"}
    document = envelope("doctor", body, body, diagnostics=health.diagnostics)
    if format is Format.JSON:
        print_document(document)
    else:
        from fsdptool.report.doctor import print_doctor

        print_doctor(document)
    failed = any(item.severity == "error" for item in health.diagnostics)
    return int(ExitCode.FINDINGS if failed else ExitCode.CLEAN)
