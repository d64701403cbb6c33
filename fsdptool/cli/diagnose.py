"""``fsdptool diagnose``: why a run failed, from its log or its folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdptool.cli.options import Format, FormatOption, print_document
from fsdptool.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from fsdptool.records.diagnosis import FailureDiagnosis


def command(
    targets: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Logs of one run of any program that trains with FSDP, or a run folder; - reads standard"
            " input.",
            metavar="LOG...|RUN",
        ),
    ] = None,
    format: FormatOption = Format.TEXT,
) -> int:
    """Recognise known failures of FSDP runs: the cause, what to change, and the rule's page.

    Exits with 0 if a cause was recognised or the run has not failed, and with 5 if the cause is unknown.
    """
    from fsdptool.records.diagnostic import envelope

    diagnosis = _diagnose(targets or [])
    if format is Format.JSON:
        print_document(envelope("diagnose", diagnosis.target, diagnosis))
    else:
        from fsdptool.report.console.runs import print_diagnosis

        print_diagnosis(diagnosis)
    if diagnosis.exception is not None or (diagnosis.failed and not diagnosis.failures):
        return int(ExitCode.INCOMPLETE)
    if diagnosis.run is None and not diagnosis.failures and not diagnosis.ended_well:
        return int(ExitCode.INCOMPLETE)
    return int(ExitCode.CLEAN)


def _diagnose(targets: list[Path]) -> FailureDiagnosis:
    """Diagnose what the command line names: files, a run folder, or what is piped into the command.

    Raises:
        ConfigError: Nothing is named and nothing is piped, or standard input is one of several.
    """
    from fsdptool.runs.diagnose import diagnose
    from fsdptool.runs.logs import read_stream
    from fsdptool.runs.recognition import diagnose_logs

    if any(str(target) == "-" for target in targets) and len(targets) > 1:
        raise ConfigError("- cannot be combined with files", help="name the files, or pipe them all")
    if targets and str(targets[0]) != "-":
        return diagnose(targets)
    if not targets and sys.stdin.isatty():
        raise ConfigError("no log is given", help="give a log, a run folder, or - and a log through a pipe")
    return diagnose_logs("-", (read_stream(sys.stdin.buffer, "standard input"),))
