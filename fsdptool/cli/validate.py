"""``fsdptool validate``: how the consuming program interprets configurations."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fsdptool.api.validate import Linter, LintOptions, conditions
from fsdptool.cli.options import (
    complain,
    print_document,
    say,
    takes,
)
from fsdptool.errors import ConfigError, ExitCode, FsdptoolError, StorageError

if TYPE_CHECKING:
    from fsdptool.config.lint_settings import FindingSelector
    from fsdptool.config.migrate import Repaired
    from fsdptool.config.result import Conditions, Reading, Verdict
    from fsdptool.files.text import SourceText


class FindingFormat(StrEnum):
    """Output format of findings."""

    TEXT = "text"
    CONCISE = "concise"
    JSON = "json"
    GITHUB = "github"
    SARIF = "sarif"


@takes(LintOptions)
def command(
    files: Annotated[list[Path], typer.Argument(help="Files or folders; - reads standard input.")],
    strict: Annotated[bool, typer.Option("--strict", help="Also fail on warnings.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Apply safe fixes: the run stays the same.")] = False,
    unsafe_fixes: Annotated[
        bool, typer.Option("--unsafe-fixes", help="Apply all fixes, including those that change the run.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what the fixes would change, without writing anything.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", help="Findings to fix: a code, or one place (FSD203:12, FSD203:12:3)."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Omit notes (severity info).")] = False,
    write_baseline: Annotated[
        bool, typer.Option("--write-baseline", help="Store the current findings in the baseline.")
    ] = False,
    statistics: Annotated[
        bool, typer.Option("--statistics", help="Count the findings by code instead of listing them.")
    ] = False,
    format: Annotated[FindingFormat, typer.Option("--format", help="Output format.")] = FindingFormat.TEXT,
    **options: Any,
) -> int:
    """Check how the consuming program will interpret a configuration: errors, dropped settings, fixes."""
    from fsdptool.config.result import Verdict
    from fsdptool.report.console import findings

    if statistics and format in (FindingFormat.GITHUB, FindingFormat.SARIF):
        raise ConfigError(f"--statistics has no form for {format.value}", help="use text, concise or json")
    given = cast("LintOptions", options)
    against, linter = conditions(given), Linter.of(given)
    if write_baseline:
        return _accept(linter, files, against)
    readings = [
        linter.judge(path, named, against, read_input(path)) for path, named in linter.expand(files).items()
    ]
    code = ExitCode.CLEAN
    if only and not (fix or unsafe_fixes or diff):
        raise ConfigError("--only chooses what is fixed", help="add --fix, --unsafe-fixes or --diff")
    if fix or unsafe_fixes or diff:
        selectors = _selectors(only, readings, unsafe_fixes) if only else None
        accepted = dict(linter.held_back)
        repaired = [_repair(reading, unsafe_fixes, linter, selectors) for reading in readings]
        after = [
            linter.sift(result.reading, _path(reading)) if result is not None else reading
            for result, reading in zip(repaired, readings, strict=True)
        ]
        if diff:
            changed = _show(repaired)
            left = Verdict(tuple(after))
            sys.stderr.write(findings.render_concise(left.readings, quiet=True))
            return max(int(changed), left.exit_code(strict=strict))
        written, code = _write(repaired, readings, after)
        for reading, kept in zip(readings, written, strict=True):
            if kept is reading and _path(reading) in accepted:  # nothing of the file was written
                linter.held_back[_path(reading)] = accepted[_path(reading)]
        readings = written
        if gone := sum(accepted.values()) - linter.accepted:
            say(f"note: the baseline accepts {gone} of the fixed findings; --write-baseline renews it")
    verdict = Verdict(tuple(readings))
    strict = strict or any(linter.settings(_path(reading)).strict for reading in readings)
    _print(verdict, format, quiet, statistics, linter.accepted)
    return max(int(code), verdict.exit_code(strict=strict))


def _path(reading: Reading) -> Path:
    return Path(reading.path or "-")


def _accept(linter: Linter, files: list[Path], against: Conditions) -> int:
    """Store the current findings in the baseline; its entries for other files stay."""
    from fsdptool.config.lint_settings import BASELINE, Baseline, read_baseline
    from fsdptool.files.text import exists

    settings = linter.settings(files[0])
    file = linter.baseline_file(settings) or settings.root / BASELINE
    linter.baseline, stored = None, read_baseline(file) if exists(file) else Baseline(file)
    fresh = replace(linter, with_baseline=False)
    paths = fresh.expand(files)
    count = stored.take(fresh.judge(path, named, against, read_input(path)) for path, named in paths.items())
    stored.save()
    say(f"wrote {file}: {count} finding{'s' * (count != 1)} accepted in {len(paths)} files")
    if settings.baseline is None:
        say(f'note: give --baseline {file}, or write baseline = "{file.name}" in the project\'s settings')
    return 0


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


def _selectors(only: list[str], readings: list[Reading], unsafe: bool) -> tuple[FindingSelector, ...]:
    """Return what ``--only`` names.

    Raises:
        ConfigError: A finding does not exist or cannot be fixed, or a line is named for several files.
    """
    from fsdptool.config.lint_settings import read_selectors
    from fsdptool.config.migrate import selected

    selectors = read_selectors(only, "--only")
    if len(readings) > 1 and any(selector.line is not None for selector in selectors):
        raise ConfigError("--only names a line, which needs one file", help="name one file, or codes alone")
    for selector in selectors:
        findings = [item for reading in readings for item in selected(reading, [selector])]
        fixes = [item.fix for item in findings if item.fix is not None]
        if not fixes:
            reason = "this finding has no fix" if findings else "no finding has this code and place"
            raise ConfigError(
                f"--only {selector}: {reason}", help="run without fixes to list the findings and their places"
            )
        if not unsafe and not any(fix.safe for fix in fixes):
            raise ConfigError(
                f"--only {selector}: the fix changes the run", help="use --unsafe-fixes to apply it"
            )
    return selectors


def _repair(
    reading: Reading,
    unsafe: bool,
    linter: Linter,
    selectors: tuple[FindingSelector, ...] | None,
) -> Repaired | None:
    """Fix what is reported; the code of a finding decides in later passes, too."""
    from fsdptool.config.migrate import repair, repair_selected

    if reading.source is None or reading.dialect is None:
        return None
    try:
        if selectors is not None:
            return repair_selected(reading, selectors, unsafe=unsafe)
        return repair(reading, unsafe=unsafe, only=linter.codes(_path(reading)))
    except FsdptoolError:
        raise
    except Exception as error:
        # Whatever one file holds, the others are fixed.
        say(f"warning: {_path(reading)} is not fixed: internal error: {type(error).__name__}: {error}")
        return None


def _show(repaired: list[Repaired | None]) -> bool:
    from fsdptool.report.console.tables import unified

    text = "".join(unified(result.before, result.after.text) for result in repaired if result is not None)
    sys.stdout.write(text)
    return bool(text)


def _write(
    repaired: list[Repaired | None], readings: list[Reading], after: list[Reading]
) -> tuple[list[Reading], ExitCode]:
    """Write what was fixed; a file that cannot be written is reported, and the others are still written."""
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
        left[index] = after[index]
        for item in result.applied:
            where = f"{result.before.path}:{item.line}" if item.line else result.before.path
            changed = "".join(
                f"; {key} becomes {value}"
                for key, value in item.changes.items()
                if key != "*" and value is not None
            )
            say(f"fixed {where}: {item.code} {item.description}{changed}")
    return left, code


def _print(verdict: Verdict, format: FindingFormat, quiet: bool, statistics: bool, accepted: int) -> None:
    from fsdptool.report.code_scanning import render_github, sarif_document
    from fsdptool.report.console import findings

    colour = findings.colour_wanted()
    if format is FindingFormat.JSON:
        print_document(verdict.document())
    elif format is FindingFormat.SARIF:
        print_document(sarif_document(verdict.readings))
    elif format is FindingFormat.GITHUB:
        sys.stdout.write(render_github(verdict.readings, quiet=quiet))
    else:
        from fsdptool.report.console.tables import print_lines, terminal_width

        width = terminal_width(sys.stdout)
        if statistics:
            text = findings.render_statistics(verdict.by_code(), colour=colour, quiet=quiet, width=width)
        elif format is FindingFormat.TEXT:
            text = findings.render_text(verdict.readings, colour=colour, quiet=quiet, width=width)
        else:
            text = findings.render_concise(verdict.readings, colour=colour, quiet=quiet)
        sys.stdout.write(text)
        print_lines(findings.render_summary(verdict, accepted))
