"""``fsdptool cache``: inspect, verify and clear the cache of results."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from fsdptool.cli.options import Format, FormatOption, answer_line, print_document
from fsdptool.errors import ConfigError, ExitCode
from fsdptool.files.text import exists, is_folder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fsdptool.records.command_documents import CacheReport, PathProblem

group = typer.Typer(help="Inspect, verify and clear the cache of results.")


@group.command("dir")
def folder() -> int:
    """Print the path of the cache folder."""
    from fsdptool.cache import cache_folder

    answer_line(f"{cache_folder()}")
    return int(ExitCode.CLEAN)


@group.command("ls")
def listing(
    format: FormatOption = Format.TEXT,
) -> int:
    """List the entries, newest first."""
    from fsdptool.cache import Store
    from fsdptool.formatting import amount
    from fsdptool.records.command_documents import CacheReport
    from fsdptool.report.console.tables import print_line, print_table

    store = Store()
    entries = store.entries()
    if format is Format.JSON:
        _print(CacheReport(str(store.folder), entries=entries))
        return int(ExitCode.CLEAN)
    if not entries:
        print_line(f"no entries in {store.folder}")
        return int(ExitCode.CLEAN)
    print_table(
        ("kind", "about", "size", "age", "key"),
        [(e.kind, e.about, amount(e.bytes), _age(e.created), e.key[:12]) for e in entries],
        numeric=(2, 3),
        optional=(4,),
    )
    return int(ExitCode.CLEAN)


@group.command("verify")
def verify(
    format: FormatOption = Format.TEXT,
) -> int:
    """Check every entry against its checksum; exit with 1 if one is corrupt."""
    from fsdptool.cache import Store

    report = Store().verify()
    bad = report.bad or ()
    if format is Format.JSON:
        _print(report)
    else:
        _list(f"{report.good} good, {len(bad)} corrupt in {report.folder}", "corrupt", bad)
    return int(ExitCode.FINDINGS if bad else ExitCode.CLEAN)


@group.command("prune")
def prune(
    older_than: Annotated[
        float | None, typer.Option("--older-than", min=0, help="Remove entries older than this many days.")
    ] = None,
    max_mib: Annotated[
        float | None, typer.Option("--max-mib", min=0, help="Keep the newest entries, up to this many MiB.")
    ] = None,
    format: FormatOption = Format.TEXT,
) -> int:
    """Remove temporary files, corrupt entries, and the entries that the options select."""
    from fsdptool.cache import Store

    store = Store()
    limit = int(max_mib * 2**20) if max_mib is not None else None
    return _removed(store.prune(older_than_days=older_than, max_bytes=limit), format)


@group.command("clear")
def clear(
    format: FormatOption = Format.TEXT,
) -> int:
    """Remove every entry; exit with 1 and list any that could not be deleted."""
    from fsdptool.cache import Store

    store = Store()
    if exists(store.folder) and not is_folder(store.folder):
        raise ConfigError(f"{store.folder} is not a folder", help="set FSDPTOOL_CACHE to a folder")
    return _removed(store.clear(), format)


def _removed(report: CacheReport, format: Format) -> int:
    from fsdptool.formatting import amount

    failed = report.failed or ()
    if format is Format.JSON:
        _print(report)
    else:
        summary = f"removed {report.removed} files, {amount(report.bytes)}, from {report.folder}"
        _list(summary, "not removed", failed)
    return int(ExitCode.FINDINGS if failed else ExitCode.CLEAN)


def _print(report: CacheReport) -> None:
    from fsdptool.records.diagnostic import envelope

    print_document(envelope("cache", report.folder, report))


def _list(summary: str, label: str, problems: Iterable[PathProblem]) -> None:
    from fsdptool.report.console.tables import print_line

    print_line(summary)
    for problem in problems:
        print_line(f"{label}: {problem.path}: {problem.reason}")


def _age(created: float) -> str:
    seconds = max(time.time() - created, 0)
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
