"""``fsdptool migrate``: FSDP1 to FSDP2 in any dialect, and one dialect to another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdptool.cli.output import Format, print_document, write_file
from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from fsdptool.config.migration import Migrated


def command(
    files: Annotated[list[Path], typer.Argument(help="Files to migrate.")],
    to: Annotated[
        str | None, typer.Option(help="Write another dialect: accelerate, trainer, axolotl, flags, env, ...")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write instead of the one read.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail if a file would change.")
    ] = False,
    diff: Annotated[bool, typer.Option("--diff", help="Write nothing; show what would change.")] = False,
    dialect: Annotated[str | None, typer.Option(help="Force the dialect instead of detecting it.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output file.")] = False,
    format: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.TEXT,
) -> int:
    """Turn FSDP1 files into FSDP2 (in place, comments kept), or one dialect into another."""
    from fsdptool.cli.validate import read_input
    from fsdptool.config.migration import migrate_file, migration_document
    from fsdptool.report.diff import unified

    if output is not None and len(files) > 1:
        raise ConfigError("--output takes one file", help="migrate the files one by one")
    results = [migrate_file(path, to=to, dialect=dialect, source=read_input(path)) for path in files]
    refused = [result for result in results if result.refusal is not None]
    changed = [result for result in results if result.changed]
    if format is Format.JSON:
        print_document(migration_document(results))
    for result in refused:
        sys.stderr.write(f"error: {result.path}: {result.refusal}\n")
        if result.help:
            sys.stderr.write(f"help: {result.help}\n")
    if check or diff:
        if format is Format.TEXT:
            for result in changed:
                if diff:
                    sys.stdout.write(unified(result.before, result.after or "", str(result.path)))
                else:
                    sys.stdout.write(f"{result.path} would change\n")
        return 1 if refused or changed else 0
    for result in results:
        if result.refusal is None:
            _write(result, to, output, force, format)
    return 1 if refused else 0


def _write(result: Migrated, to: str | None, output: Path | None, force: bool, format: Format) -> None:
    from fsdptool.config.storage import replace_file

    for note in result.notes:
        sys.stderr.write(f"note: {result.path}: {note}\n")
    if result.after is None:
        return
    if output is not None:
        write_file(output, result.after, force=force)
        sys.stderr.write(f"wrote {output}\n")
    elif str(result.path) == "-" or (to is not None and to != result.dialect):
        if format is Format.TEXT:
            sys.stdout.write(result.after)
    elif result.changed:
        replace_file(result.path, result.encoded)
        sys.stderr.write(f"migrated {result.path}\n")
    else:
        sys.stderr.write(f"{result.path} needs nothing\n")
