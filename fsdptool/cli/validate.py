"""``fsdptool validate``: how the consuming program interprets configurations."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fsdptool.cli.options import DialectOption, TargetOption, TrustOption, print_document, say
from fsdptool.errors import ConfigError, ExitCode, StorageError

if TYPE_CHECKING:
    from fsdptool.config.fixes import Repaired
    from fsdptool.config.result import Reading
    from fsdptool.files.text import SourceText


class FindingFormat(StrEnum):
    """Output format of findings."""

    TEXT = "text"
    CONCISE = "concise"
    JSON = "json"
    GITHUB = "github"
    SARIF = "sarif"


def command(
    files: Annotated[list[Path], typer.Argument(help="Files or folders; - reads standard input.")],
    consumer: Annotated[
        str | None, typer.Option(help="Program that reads the files: accelerate, fsdptool, trainer, ...")
    ] = None,
    target: TargetOption = None,
    dialect: DialectOption = None,
    model: Annotated[str | None, typer.Option(help="Also check against this model.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Also check against this GPU.")] = None,
    gpus: Annotated[int | None, typer.Option(help="Total number of GPUs.")] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Host memory per node, for example '512 GiB'.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Also fail on warnings.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Apply safe fixes: the run stays the same.")] = False,
    unsafe_fixes: Annotated[
        bool, typer.Option("--unsafe-fixes", help="Apply all fixes, including those that change the run.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what the fixes would change, without writing anything.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Omit notes (severity info).")] = False,
    trust_remote_code: TrustOption = False,
    format: Annotated[FindingFormat, typer.Option("--format", help="Output format.")] = FindingFormat.TEXT,
) -> int:
    """Check how the consuming program will interpret a configuration: errors, dropped settings, fixes."""
    from fsdptool.api.validate import as_folder_member, conditions, expand
    from fsdptool.config.result import Verdict
    from fsdptool.report import findings

    judged = conditions(model, gpu, gpus, host_memory, trust_remote_code=trust_remote_code)
    judged["target"] = target
    readings = []
    for path, named in expand(files).items():
        reading = _read(path, dialect, consumer, judged)
        readings.append(reading if named else as_folder_member(reading))
    code = ExitCode.CLEAN
    if fix or unsafe_fixes or diff:
        repaired = [_repair(reading, unsafe_fixes, judged) for reading in readings]
        after = [
            result.reading if result is not None else reading
            for result, reading in zip(repaired, readings, strict=True)
        ]
        if diff:
            changed = _show(repaired)
            left = Verdict(tuple(after))
            sys.stderr.write(findings.render_concise(left.readings, quiet=True))
            return max(int(changed), left.exit_code(strict=strict))
        readings, code = _write(repaired, readings)
    verdict = Verdict(tuple(readings))
    _print(verdict, format, quiet)
    return max(int(code), verdict.exit_code(strict=strict))


def _read(path: Path, dialect: str | None, consumer: str | None, judged: dict[str, Any]) -> Reading:
    from fsdptool.config import read_settings

    source = read_input(path)
    return read_settings(path if source is None else source, dialect=dialect, consumer=consumer, **judged)


def read_input(path: Path) -> SourceText | None:
    """Return standard input where the path is ``-``, else None.

    Raises:
        ConfigError: The input is not text, or is too long.
    """
    from fsdptool.files.text import UnreadableError, decode

    if str(path) != "-":
        return None
    try:
        return decode(sys.stdin.buffer.read((1 << 20) + 1), None)
    except UnreadableError as error:
        raise ConfigError(f"standard input: {error.message}") from error


def _repair(reading: Reading, unsafe: bool, judged: dict[str, Any]) -> Repaired | None:
    from fsdptool.config.fixes import repair

    if reading.source is None or reading.dialect is None:
        return None
    return repair(reading, unsafe=unsafe, **judged)


def _show(repaired: list[Repaired | None]) -> bool:
    from fsdptool.report.findings import unified

    text = "".join(unified(result.before, result.after.text) for result in repaired if result is not None)
    sys.stdout.write(text)
    return bool(text)


def _write(repaired: list[Repaired | None], readings: list[Reading]) -> tuple[list[Reading], ExitCode]:
    """Write what was fixed; a file that cannot be written is said, and does not keep the others from it."""
    from fsdptool.cli.app import complain
    from fsdptool.files.text import replace_file

    left, code = list(readings), ExitCode.CLEAN
    for index, result in enumerate(repaired):
        if result is None or result.after.text == result.before.text:
            continue
        if result.before.path is None:
            say("standard input is not rewritten; --diff shows the fixes")
            continue
        try:
            replace_file(Path(result.before.path), result.after.encode(), before=result.before.encode())
        except StorageError as error:
            complain(error)
            code = error.exit_code
            continue
        left[index] = result.reading
        for item in result.applied:
            where = f"{result.before.path}:{item.line}" if item.line else result.before.path
            changed = "".join(
                f"; {key} becomes {value}"
                for key, value in item.changes.items()
                if key != "*" and value is not None
            )
            say(f"fixed {where}: {item.code} {item.description}{changed}")
    return left, code


def _print(verdict: Any, format: FindingFormat, quiet: bool) -> None:
    from fsdptool.report import findings

    colour = findings.colour_wanted()
    if format is FindingFormat.JSON:
        print_document(verdict.document())
    elif format is FindingFormat.SARIF:
        from fsdptool.report.findings import sarif_document

        print_document(sarif_document(verdict.readings))
    elif format is FindingFormat.GITHUB:
        from fsdptool.report.findings import render_github

        sys.stdout.write(render_github(verdict.readings, quiet=quiet))
    else:
        render = findings.render_text if format is FindingFormat.TEXT else findings.render_concise
        sys.stdout.write(render(verdict.readings, colour=colour, quiet=quiet))
        sys.stdout.write(
            findings.render_summary(len(verdict.readings), verdict.errors, verdict.warnings, verdict.fixable)
        )
