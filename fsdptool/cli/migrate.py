"""``fsdptool migrate``: FSDP1 to FSDP2 in any dialect and in scripts, and one program to another."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fsdptool.api.options import MigrationOptions
from fsdptool.cli.options import (
    ExcludeOption,
    Format,
    FormatOption,
    IsolatedOption,
    SkipUnknownOption,
    answer_line,
    check_free,
    complain,
    lost_lines,
    print_document,
    say,
    takes,
    write_file,
)
from fsdptool.errors import ConfigError, ExitCode, StorageError

if TYPE_CHECKING:
    from fsdptool.api.validate import Linter
    from fsdptool.config.migrate import Migrated


@takes(MigrationOptions)
def command(
    files: Annotated[list[Path], typer.Argument(help="Files or folders; - reads standard input.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write, instead of changing the input.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Do not write anything; fail if a file still runs FSDP1.")
    ] = False,
    diff: Annotated[
        bool, typer.Option("--diff", help="Show what would change, without writing anything.")
    ] = False,
    exclude: ExcludeOption = None,
    skip_unknown: SkipUnknownOption = False,
    isolated: IsolatedOption = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output file.")] = False,
    format: FormatOption = Format.TEXT,
    **given: Any,
) -> int:
    """Convert FSDP1 files to FSDP2 (in place, keeping comments), or files for another program."""
    from fsdptool.api.validate import Linter
    from fsdptool.config.migrate import check_target, migration_document

    options = cast("MigrationOptions", given)
    to, dialect = options["to"], options["dialect"]
    if to is not None:
        check_target(to)
    linter = Linter(exclude=exclude, skip_unknown=skip_unknown, isolated=isolated)
    results, skipped = _migrate(files, to, dialect, linter, check)
    if output is not None and len(results) > 1:
        raise ConfigError("--output accepts only one input file", help="migrate the files one by one")
    if output in (None, _STANDARD) and format is Format.TEXT and any(result.beside for result in results):
        raise ConfigError(f"--to {to} writes two files", help="name the first: -o FILE")
    if format is Format.JSON:
        print_document(migration_document(results))
    refused = [result for result in results if result.refusal is not None]
    for result in refused:
        say(f"error: {result.path}: {result.refusal}")
        if result.help:
            say(f"help: {result.help}")
    if check or diff:
        changed = [result for result in results if result.changed]
        if check and to is None:
            # What runs FSDP2 already and could state it is for `validate --fix`.
            changed = [result for result in changed if result.version == 1]
        if format is Format.TEXT:
            _show(changed, diff)
            if len(results) > 1 or skipped:
                counts = {
                    "would change": len(changed),
                    "stay as they are": len(results) - len(changed) - len(refused),
                }
                _say_counts({**counts, "refused": len(refused), _SKIPPED: skipped})
        return 1 if refused or changed else 0
    several = output is None and (len(results) > 1 or skipped > 0)
    failed = [result for result in results if not _write(result, to, output, force, format, several)]
    if several and format is Format.TEXT:
        migrated = sum(result.changed for result in results) - len(failed)
        unchanged = sum(result.after is not None and not result.changed for result in results)
        counts = {"migrated": migrated, "already up to date": unchanged, "refused": len(refused)}
        _say_counts({**counts, "could not be written": len(failed), _SKIPPED: skipped})
    return int(ExitCode.USAGE) if failed else 1 if refused else 0


_STANDARD = Path("-")
_SKIPPED = "of other programs or kinds skipped"


def _say_counts(counts: Mapping[str, int]) -> None:
    """Say in one line what became of the files, the first figure always."""
    first = next(iter(counts))
    say(", ".join(f"{count} {what}" for what, count in counts.items() if count or what == first))


def _migrate(
    files: list[Path], to: str | None, dialect: str | None, linter: Linter, check: bool
) -> tuple[list[Migrated], int]:
    """Migrate files, and what is a configuration in folders; the rest of a folder is skipped and counted.

    A check leaves out the files in which the project's settings do not report FSDP1.
    """
    from fsdptool.cli.validate import read_input
    from fsdptool.config.migrate import migrated_or_refused

    results, skipped = [], 0
    for path, named in linter.expand(files).items():
        if check and "FSD301" not in linter.codes(path):
            continue
        result = migrated_or_refused(path, to=to, dialect=dialect, source=read_input(path))
        must = named and not (linter.skip_unknown or linter.settings(path).skip_unknown)
        if must or result.dialect is not None:
            results.append(result)
        elif not named:
            skipped += 1
    return results, skipped


def _show(changed: list[Migrated], diff: bool) -> None:
    from fsdptool.files.text import decode
    from fsdptool.report.console.tables import unified

    for result in changed:
        if diff:
            name = "stdin" if str(result.path) == "-" else str(result.path)
            sys.stdout.write(unified(decode(result.original, name), result.after or ""))
        else:
            answer_line(f"{result.path} would change")


def _write(
    result: Migrated, to: str | None, output: Path | None, force: bool, format: Format, several: bool
) -> bool:
    """Write one result to its place; return whether that was possible (a refused one has no place).

    Several files are counted afterwards: each gets a line only where a person has to look.
    """
    from fsdptool.files.text import replace_file

    # Of several files, those that do not run FSDP need nobody's attention.
    passed = several and result.version is None and not result.changed
    for note in () if passed else result.notes:
        say(f"note: {result.path}: {note}")
    for line in lost_lines(result.losses):
        say(f"lost: {line}")
    if result.after is None:
        return True
    if output is not None and output != _STANDARD:
        named = {output: result.after}
        named |= {output.with_name(output.stem + suffix): text for suffix, text in result.beside.items()}
        for path in named:
            check_free(path, force=force)
        for path, text in named.items():
            write_file(path, text, force=force)
            say(f"wrote {path}")
    elif _STANDARD in (output, result.path) or (to is not None and to != result.dialect):
        if format is Format.TEXT:
            sys.stdout.write(result.after)
    elif result.changed:
        try:
            replace_file(result.path, result.encoded, before=result.original)
        except StorageError as error:
            complain(error)
            return False
        if not several:
            say(f"migrated {result.path}")
    elif not several:
        say(f"{result.path} is already up to date")
    return True
