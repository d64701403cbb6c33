"""Fit the machine table of plans to measured runs; see it before it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fsdptool.errors import FsdptoolError
from fsdptool.files.text import SourceText
from fsdptool.planning.calibrate import calibrate, read_sample
from fsdptool.planning.clusters import parse_size
from fsdptool.planning.hardware import all_entries, read_table, write_table
from fsdptool.records.cluster import Machine
from fsdptool.records.schema import field_documentation
from fsdptool.report.machine import machine_figures
from fsdptool.web.changes import FileChange, content_of, target_of
from fsdptool.web.forms import Field, FieldKind
from fsdptool.web.page import render, services
from fsdptool.web.pages.cache import page as cache
from fsdptool.web.roots import Roots
from fsdptool.web.source_view import DiffLine, address_of, command_path, diff_lines

ADDRESS = f"{cache.path}/calibrate"
_NAMES = ("gpu", "runs", "context", "communicator", "machine", "output")


async def show(request: Request) -> Response:
    """Return the page, or write the table that it shows."""
    if request.method != "POST":
        return await run_in_threadpool(_page, request, dict(request.query_params))
    form = {key: value for key, value in (await request.form()).items() if isinstance(value, str)}
    return await run_in_threadpool(_write, request, form)


class _Calibration:
    """What a form asks for, and the answer.

    Args:
        roots: The folders that may be read and written.
        values: Texts of the form.

    Attributes:
        row: The fitted row.
        text: The table.
        change: What would be written; None without a file.
        command: The command that does the same.

    Raises:
        FsdptoolError: It cannot be calibrated; the message says why.
    """

    def __init__(self, roots: Roots, values: Mapping[str, str]) -> None:
        self.command: list[str] = ["fsdptool", "calibrate", "--gpu", values["gpu"]]
        runs = [roots.resolve(part.strip()) for part in values["runs"].split(",") if part.strip()]
        for run in runs:
            roots.check_links(run)
        table = roots.resolve(values["machine"]) if values["machine"] else None
        with roots.confine():
            self.row: Machine = calibrate(
                values["gpu"],
                [read_sample(run) for run in runs],
                context_bytes=parse_size(values["context"] or None),
                communicator_bytes=parse_size(values["communicator"] or None),
                table=table,
            )
            kept = read_table(table) if table is not None else ()
        self.text = write_table((self.row, *(item for item in kept if item.match != self.row.match)))
        for name in ("context", "communicator"):
            self.command += [f"--{name}", values[name]] if values[name] else []
        self.command += ["--machine", command_path(table)] if table is not None else []
        self.command += map(command_path, runs)
        self.change: FileChange | None = None
        self.changed_lines: tuple[DiffLine, ...] = ()
        if values["output"]:
            path = target_of(roots, values["output"])
            self._compare(path, roots.name_of(path))

    def _compare(self, path: Path, name: str) -> None:
        before = content_of(path)
        self.change = FileChange(path, before, self.text.encode())
        text = SourceText((before or b"").decode("utf-8", errors="replace"), name)
        self.changed_lines = diff_lines(text, self.text, name)
        self.command += ["-o", command_path(path), *(() if before is None else ("--force",))]


def _page(request: Request, given: Mapping[str, str], error: FsdptoolError | None = None) -> Response:
    values = {name: given.get(name, "").strip() for name in _NAMES}
    answer: _Calibration | None = None
    conflict = error is not None
    if values["gpu"]:
        try:
            answer = _Calibration(services(request).roots, values)
        except FsdptoolError as problem:
            error = error or problem
    return render(
        request,
        "calibrate.html",
        page=cache,
        status=(409 if conflict else 400) if error is not None else 200,
        command=answer.command if answer is not None else (),
        fields=_fields(values),
        values=values,
        answer=answer,
        figures=_figures(answer.row) if answer is not None else (),
        error=error,
        written=given.get("written", ""),
    )


def _write(request: Request, form: Mapping[str, str]) -> Response:
    values = {name: form.get(name, "").strip() for name in _NAMES}
    try:
        change = _Calibration(services(request).roots, values).change
        if change is None:
            return _page(request, form)
        change.write(form.get("shown", ""))
    except FsdptoolError as error:
        return _page(request, form, error)
    return RedirectResponse(address_of(ADDRESS, **{**values, "output": "", "written": values["output"]}), 303)


def _figures(row: Machine) -> list[tuple[str, str, str]]:
    """Return the name, the value and the meaning of each figure."""
    meanings = field_documentation(Machine)
    return [(name, value, meanings[name]) for name, value in machine_figures(row)]


def _fields(values: Mapping[str, str]) -> tuple[Field, ...]:
    file = partial(Field, kind=FieldKind.TEXT)
    fields = (
        Field(
            "gpu",
            "GPU",
            help="GPU on which the runs were measured.",
            required=True,
            suggestions=tuple(entry.gpu.name for entry in all_entries()),
        ),
        file("runs", "Runs", help="Run folders, separated by commas."),
        file("context", "Context", help="Memory before the first tensor.", placeholder="480 MiB"),
        file(
            "communicator",
            "Communicator",
            help="Memory that the first communicator adds.",
            placeholder="600 MiB",
        ),
        file("machine", "Table to extend", help="Existing machine table; its other rows are kept."),
        file("output", "File", help="Machine table to write, for plans.", placeholder="machine.json"),
    )
    return tuple(replace(field, value=values[field.name]) for field in fields)


routes = [Route(ADDRESS, show, methods=["GET", "POST"])]
