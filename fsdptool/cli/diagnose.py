"""``fsdptool diagnose``: why a run failed, from its log or its folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdptool.cli.options import Format, FormatOption, TrustOption, print_document, write_file
from fsdptool.errors import ConfigError, ExitCode
from fsdptool.files.text import is_file

if TYPE_CHECKING:
    from fsdptool.records.diagnosis import FailureDiagnosis
    from fsdptool.records.plan import Candidate


def command(
    targets: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Logs of one run of any program that trains with FSDP, or a run folder; - reads standard"
            " input. Or traces of torch's profiler or flight records, one of each rank; or a memory"
            " snapshot.",
            metavar="LOG...|RUN|RECORDING...",
        ),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Compare recordings with this plan.", metavar="PLAN.json")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Compare recordings with the prediction of this run folder.", metavar="RUN"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Explain a failed allocation by this training file or recipe.", metavar="FILE"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Explain it by the sizes of this model.", metavar="MODEL")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write the page of a memory snapshot.", metavar="FILE.html")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing page.")] = False,
    trust_remote_code: TrustOption = False,
    format: FormatOption = Format.TEXT,
) -> int:
    """Recognise known failures of FSDP runs: the cause, what to change, and the rule's page.

    Of a lack of memory, with --config or --model: which tensor has the size that was not available.
    Of traces of torch's profiler: where the time of a step goes, and which rank the others wait for.
    Of a memory snapshot (torch.cuda.memory._dump_snapshot): what holds the memory, and what would free it.

    Exits with 0 if a cause was recognised or the run has not failed, and with 5 if the cause is unknown.
    """
    from fsdptool.records.diagnostic import envelope

    if plan is not None and run is not None:
        raise ConfigError("--plan and --run are given", help="compare with one of them")
    explained = config is not None or model is not None
    if explained and (_is_snapshot(targets or []) or _are_traces(targets or [])):
        raise ConfigError("--config and --model explain logs only", help="leave them out")
    if _is_snapshot(targets or []):
        return _memory((targets or [])[0], plan, run, html, force, format)
    if html is not None:
        raise ConfigError("--html is for a memory snapshot", help="give one, or leave the option out")
    if _are_traces(targets or []):
        return _profile(targets or [], plan, run, format)
    if plan is not None or run is not None:
        raise ConfigError(
            "--plan and --run are compared with recordings only", help="give one, or leave them out"
        )
    diagnosis = _diagnose(targets or [])
    if explained:
        from fsdptool.runs.allocations import explain_allocation

        found = explain_allocation(diagnosis, config, model, trusted=trust_remote_code)
        diagnosis = replace(diagnosis, allocation=found)
    if format is Format.JSON:
        print_document(envelope("diagnose", diagnosis.target, diagnosis))
    else:
        from fsdptool.report.console.runs import print_diagnosis

        print_diagnosis(diagnosis)
    if any(not item.consequence for item in diagnosis.failures):
        return int(ExitCode.CLEAN)
    if diagnosis.exception is not None or (diagnosis.failed and not diagnosis.failures):
        return int(ExitCode.INCOMPLETE)
    if diagnosis.run is None and not diagnosis.failures and not diagnosis.ended_well:
        return int(ExitCode.INCOMPLETE)
    return int(ExitCode.CLEAN)


def _are_traces(targets: list[Path]) -> bool:
    """Say whether the command line names traces of torch's profiler.

    Raises:
        ConfigError: Some of the files are traces, and others are not.
    """
    from fsdptool.runs.recordings.traces import is_trace

    # What a shell substitutes can be read only once.
    kinds = {is_file(target) and is_trace(target) for target in targets}
    if len(kinds) > 1:
        raise ConfigError("traces and other files are given", help="diagnose the traces on their own")
    return True in kinds


def _is_snapshot(targets: list[Path]) -> bool:
    """Say whether the command line names a memory snapshot.

    Raises:
        ConfigError: It is one of several files.
    """
    from fsdptool.runs.recordings.snapshots import is_snapshot

    if not any(map(is_snapshot, targets)):
        return False
    if len(targets) > 1:
        raise ConfigError("a memory snapshot and other files are given", help="diagnose it on its own")
    return True


def _planned(plan: Path | None, run: Path | None) -> Candidate | None:
    """Return what recordings are compared with."""
    if plan is not None:
        from fsdptool.planning.plan import chosen_candidate, read_plan

        return chosen_candidate(read_plan(plan))
    if run is not None:
        from fsdptool.planning.compare import required_prediction

        return required_prediction(run)
    return None


def _memory(
    target: Path, plan: Path | None, run: Path | None, html: Path | None, force: bool, format: Format
) -> int:
    """Print what holds the memory of a GPU, by a snapshot."""
    from fsdptool.records.diagnostic import answer
    from fsdptool.runs.recordings.snapshots import describe_snapshot

    snapshot = describe_snapshot(target, _planned(plan, run))
    answered = answer("memory-snapshot", str(target), snapshot)
    if html is not None and html.suffix != ".html":
        raise ConfigError(f"{html}: the page is written as .html", help="choose this suffix")
    if html is not None:
        from fsdptool.report.page.snapshot import snapshot_page

        write_file(html, snapshot_page(answered), force=force)
    if format is Format.JSON:
        print_document(answered.document())
    else:
        from fsdptool.report.console.snapshots import print_snapshot

        print_snapshot(snapshot)
    return int(ExitCode.CLEAN)


def _profile(targets: list[Path], plan: Path | None, run: Path | None, format: Format) -> int:
    """Print where the time of steps goes, by traces."""
    from fsdptool.records.diagnostic import envelope
    from fsdptool.runs.recordings.step_times import profile_traces

    profile = profile_traces(targets, _planned(plan, run))
    if format is Format.JSON:
        print_document(envelope("profile", " ".join(map(str, targets)), profile))
    else:
        from fsdptool.report.console.profiles import print_profile

        print_profile(profile)
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
