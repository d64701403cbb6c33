"""``fsdptool doctor``: what this machine supports, and whether FSDP2 shards on it."""

from __future__ import annotations

from typing import Annotated

import typer

from fsdptool.cli.options import Format, FormatOption, print_document
from fsdptool.errors import ExitCode


def command(
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Start two processes and test that FSDP2 shards.")
    ] = True,
    format: FormatOption = Format.TEXT,
) -> int:
    """Report versions, devices, plugins and the cache, and test FSDP2 on two processes."""
    from fsdptool.launch.doctor import examine
    from fsdptool.records.diagnostic import answer

    health, diagnostics = examine(with_probe=probe)
    examined = answer("doctor", health, health, diagnostics=diagnostics)
    if format is Format.JSON:
        print_document(examined.document())
    else:
        from fsdptool.report.console.doctor import print_doctor

        print_doctor(examined)
    failed = any(item.severity == "error" for item in diagnostics)
    return int(ExitCode.FINDINGS if failed else ExitCode.CLEAN)
