"""``fsdptool diagnose``: why a run failed, from its log or its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.options import Format, FormatOption, print_document
from fsdptool.errors import ExitCode


def command(
    target: Annotated[
        Path,
        typer.Argument(
            help="A log of any program that trains with FSDP, or a run folder.", metavar="LOG|RUN"
        ),
    ],
    format: FormatOption = Format.TEXT,
) -> int:
    """Recognise known failures of FSDP runs: the cause, what to change, and the rule's page.

    Exits with 0 if a cause was recognised or the run has not failed, and with 5 if the cause is unknown.
    """
    from fsdptool.records.codec import to_json
    from fsdptool.records.diagnostic import envelope
    from fsdptool.runs.diagnose import diagnose

    diagnosis = diagnose(target)
    if format is Format.JSON:
        print_document(envelope("diagnose", str(target), diagnosis))
    else:
        from fsdptool.report.diagnosis import print_diagnosis

        print_diagnosis(to_json(diagnosis))
    if diagnosis.exception is not None or (diagnosis.failed and not diagnosis.failures):
        return int(ExitCode.INCOMPLETE)
    if diagnosis.run is None and not diagnosis.failures:
        return int(ExitCode.INCOMPLETE)
    return int(ExitCode.CLEAN)
