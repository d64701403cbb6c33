"""The configurations of a folder: their status and how many findings each has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fsdptool.files.text import is_file
from fsdptool.formatting import printable
from fsdptool.web.judging import MOST_FILES, JudgedFile, judge_folder
from fsdptool.web.page import Page, render, services
from fsdptool.web.source_view import address_of, command_path

page = Page(
    "Configs", "/configs", "Check every configuration of a folder, apply fixes one by one, and migrate files."
)
FILE = "/configs/file"
"""Address of one file."""
SHOWN = ("error", "warning", "ok", "other")
"""What a list of files can be narrowed to: by their worst finding, or the files of other programs."""


TITLES = {
    "error": "With errors",
    "warning": "With warnings",
    "ok": "Without errors and warnings",
    "other": "Of other programs",
}
"""Headings of the list, what needs work first."""
_OPEN_ROWS, _GROUP_ROWS = 40, 50
"""Files up to which every group is open, and files of a group that are listed until it is shown alone."""


@dataclass(frozen=True, slots=True)
class FileRow:
    """One file of the list. ``status`` is one of ``SHOWN``."""

    name: str
    address: str
    status: str
    dialect: str
    consumer: str
    version: int | None
    errors: int
    warnings: int
    fixable: int


@dataclass(frozen=True, slots=True)
class FileGroup:
    """Files of one status: those that are listed, how many there are, and where all of them are listed."""

    title: str
    rows: tuple[FileRow, ...]
    count: int
    address: str
    open: bool


def show(request: Request) -> Response:
    """Return the list of a folder's files."""
    roots = services(request).roots
    folder = request.query_params.get("folder", "").strip()
    only = request.query_params.get("show", "")
    only = only if only in SHOWN else ""
    if not folder and len(roots.folders) == 1:
        folder = next(iter(roots.folders))
    rows: list[FileRow] = []
    command: tuple[str, ...] = ()
    if folder:
        path = roots.resolve(folder)
        if is_file(path):
            return Response(status_code=303, headers={"location": address_of(FILE, file=folder)})
        rows = [_row(item) for item in judge_folder(roots, folder)]
        command = ("fsdptool", "validate", command_path(path))
    counts = Counter(row.status for row in rows)
    return render(
        request,
        "configs.html",
        page=page,
        command=command,
        folder=folder,
        names=tuple(roots.folders),
        only=only,
        shown=counts[only] if only else len(rows),
        groups=_groups(rows, only, folder),
        filters=[
            (
                name or "all",
                counts[name] if name else len(rows),
                address_of(page.path, folder=folder, show=name),
            )
            for name in ("", *SHOWN)
        ],
        errors=sum(row.errors for row in rows),
        warnings=sum(row.warnings for row in rows),
        limited=len(rows) == MOST_FILES,
    )


def _groups(rows: Sequence[FileRow], only: str, folder: str) -> list[FileGroup]:
    """Return the files by what is wrong with them, most errors first, then most warnings, then by name."""
    groups = []
    for status in SHOWN:
        own = [row for row in rows if row.status == status]
        if not own or only not in ("", status):
            continue
        own.sort(key=lambda row: (-row.errors, -row.warnings, row.name))
        listed = own if only else own[:_GROUP_ROWS]
        unfolded = bool(only) or status in ("error", "warning") or len(rows) <= _OPEN_ROWS
        address = address_of(page.path, folder=folder, show=status)
        groups.append(FileGroup(TITLES[status], tuple(listed), len(own), address, unfolded))
    return groups


def _row(item: JudgedFile) -> FileRow:
    reading = item.reading
    severities = Counter(finding.severity for finding in reading.diagnostics)
    worst = next((name for name in ("error", "warning") if severities[name]), "ok")
    fixable = sum(f.fix is not None and f.severity != "info" for f in reading.diagnostics)
    return FileRow(
        name=printable(item.name.partition("/")[2]),
        address=address_of(FILE, file=item.name),
        status="other" if reading.passed_over else worst,
        dialect=reading.dialect or "",
        consumer=str(reading.consumer) if reading.dialect else "",
        version=reading.version,
        errors=severities["error"],
        warnings=severities["warning"],
        fixable=fixable,
    )


routes = [Route(page.path, show)]
