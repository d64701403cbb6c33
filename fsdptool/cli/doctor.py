"""``fsdptool doctor``: what this machine supports, and whether FSDP2 shards on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.options import Format, FormatOption, check_free, print_document, say, write_file
from fsdptool.errors import ConfigError, ExitCode


def command(
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Start two processes and test that FSDP2 shards.")
    ] = True,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Measure the GPUs: kernels, rates, collectives, offload and saves (under two minutes).",
        ),
    ] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="With --gpu: rehearse on the CPU.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="With --gpu: file for calibrate --measured and for bug reports."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    format: FormatOption = Format.TEXT,
) -> int:
    """Report versions, devices, plugins and the cache, and test FSDP2 on two processes."""
    if gpu:
        return _measure(cpu=cpu, output=output, force=force, format=format)
    if cpu or output is not None:
        raise ConfigError("--cpu and --output belong to --gpu", help="add --gpu")
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


def _measure(*, cpu: bool, output: Path | None, force: bool, format: Format) -> int:
    import json

    from fsdptool.launch.doctor import measure
    from fsdptool.records.diagnostic import envelope

    if output is not None:
        check_free(output, force=force)
    measured = measure(cpu=cpu)
    document = envelope("measurements", measured, measured)
    if output is not None:
        write_file(output, json.dumps(document, indent=1) + "\n", force=force)
        say(f"wrote {output}")
    if format is Format.JSON:
        print_document(document)
    else:
        from fsdptool.report.console.doctor import print_measurements

        print_measurements(measured)
    return int(ExitCode.CLEAN if measured.ok else ExitCode.FINDINGS)
