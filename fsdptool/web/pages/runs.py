"""Runs: what runs, the queue, and a new run, which is checked before it joins the queue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fsdptool.api.run_lists import list_runs
from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.text import is_file
from fsdptool.launch.machine import registry_folders
from fsdptool.launch.queue.entries import Direction
from fsdptool.records.codec import to_json
from fsdptool.records.queue import QueueEntry, RunRequest
from fsdptool.report.console.runs import needs_text, note_text
from fsdptool.runs.folder import RUN, default_folder
from fsdptool.web.forms import Field, parse_record, record_fields, with_error
from fsdptool.web.page import Page, group_of, render, render_part, services
from fsdptool.web.roots import Roots
from fsdptool.web.run_values import read_known_view


def moment_text(seconds: float) -> str:
    """Return a moment as ``2026-01-31 12:00:00 UTC``.

    Args:
        seconds: Since 1970.
    """
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


page = Page("Runs", "/runs", "See what runs, arrange the queue, and start a run.")

_LOOK_SECONDS = 1.0
_FILES = (".yaml", ".yml", ".json", ".toml")


def show(request: Request) -> Response:
    """Return the queue, and the runs below the roots."""
    roots = services(request).roots
    command = ("fsdptool", "runs", *map(str, roots.folders.values()))
    return render(request, "runs.html", page=page, command=command, refresh=True, **_values(request))


def _values(request: Request) -> dict[str, Any]:
    """Return what the tables of the page show."""
    shared = services(request)
    problem = shared.queue.problem
    entries: tuple[QueueEntry, ...] = ()
    scheduler: int | None = None
    try:
        report = shared.queue.queue.report()
        scheduler, entries = report.scheduler, report.entries
    except FsdptoolError as error:
        problem = error
    runs, unreadable = run_rows(shared.roots)
    lost = {run["folder"]: run["lost_steps"] for run in runs}
    return {
        "problem_of_queue": problem,
        "entries": [
            {
                **to_json(entry),
                "begun": is_file(Path(entry.folder) / RUN),
                "needs_text": needs_text(entry),
                "note": note_text(show_names(shared.roots, entry)),
                "name": _name(shared.roots, entry.folder),
                "when": moment_text(entry.ended or entry.started or entry.added),
                "pending": entry.state.pending,
                "active": entry.state.active,
                "lost_steps": lost.get(entry.folder, 0),
            }
            for entry in entries
        ],
        "scheduler": scheduler,
        "runs": runs,
        "unreadable": unreadable,
    }


def run_rows(roots: Roots) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the runs below the roots as a page lists them, and a line for each that cannot be read."""
    with roots.confine(*registry_folders()):
        listed = list_runs(tuple(roots.folders.values()), read=read_known_view)
    rows = [
        {**to_json(run), "name": _name(roots, run.folder), "when": moment_text(run.started)}
        for run in listed.runs
    ]
    return rows, tuple(listed.unreadable)


def show_names(roots: Roots, entry: QueueEntry) -> QueueEntry:
    """Return an entry that names the run it waits for as pages name it, where that is below a root."""
    if entry.wait is None:
        return entry
    holder = _name(roots, entry.wait.holder) or entry.wait.holder
    return replace(entry, wait=replace(entry.wait, holder=holder))


def _name(roots: Roots, folder: str) -> str | None:
    """Return the name of a run folder; None if it is outside the roots, so that no page shows it."""
    with contextlib.suppress(ConfigError):
        return roots.name_of(Path(folder))
    return None


async def events(request: Request) -> Response:
    """Stream the tables of the page whenever they change."""

    async def source() -> AsyncIterator[tuple[str, str]]:
        sent: dict[str, str] = {}
        while True:
            began = time.monotonic()
            values = await run_in_threadpool(_values, request)
            spent = time.monotonic() - began
            for name in ("queue", "list"):
                text = render_part(request, f"runs_{name}.html", **values)
                if sent.get(name) != text:
                    sent[name] = text
                    yield name, text
            # Many runs take long to read: a tenth of the time at most.
            await asyncio.sleep(max(_LOOK_SECONDS, 9.0 * spent))

    return services(request).streams.respond(source())


def new(request: Request) -> Response:
    """Return the form of a new run, and the answer of its dry run once the form is complete."""
    values = dict(request.query_params)
    shared = services(request)
    asked, fields = _read_form(request, values)
    job, result, error = None, None, None
    if asked is not None:
        arguments = {
            "recipe": asked.recipe,
            "config": asked.config,
            "output": asked.output,
            "cpu": asked.cpu,
            "version": [_version(Path(asked.recipe)), _version(Path(asked.config))],
        }
        job = shared.jobs.submit("dry_run", arguments, group=group_of(request, "dry-run"))
        result, error = job.result, job.error
    waiting = job is not None and result is None and error is None
    return render(
        request,
        "run_new.html",
        page=page,
        command=asked.command() if asked is not None else (),
        refresh=waiting,
        waiting=waiting,
        fields=fields,
        groups=_grouped(fields),
        values=values,
        request_of_run=asked,
        job=job,
        result=result,
        error=error,
    )


_GROUPS: Mapping[str, tuple[str, ...]] = {
    "What to train": ("recipe", "config", "output"),
    "How it runs": ("gpus", "cpu", "predict", "max_restarts"),
    "When to start": ("hold", "first"),
    "If the folder holds a run": ("resume", "start_over", "force"),
}
"""Fields of the form by heading."""


def _grouped(fields: Sequence[Field]) -> dict[str, list[Field]]:
    by_name = {field.name: field for field in fields}
    return {title: [by_name[name] for name in names] for title, names in _GROUPS.items()}


def _version(path: Path) -> list[float]:
    with contextlib.suppress(OSError):
        seen = path.stat()
        return [seen.st_mtime, seen.st_size]
    return []


def _read_form(request: Request, values: Mapping[str, str]) -> tuple[RunRequest | None, tuple[Field, ...]]:
    """Return the run that a form describes, with absolute paths, or None, and the form's fields."""
    roots = services(request).roots
    fields = record_fields(RunRequest, values)
    files = tuple(roots.files(_FILES))
    fields = tuple(
        replace(field, suggestions=files) if field.name in ("recipe", "config") else field for field in fields
    )
    if not values.get("recipe") and not values.get("config"):
        return None, fields
    asked, fields = parse_record(RunRequest, fields)
    if asked is None:
        return None, fields
    places: dict[str, Any] = {}
    for name in ("recipe", "config", "output"):
        try:
            places[name] = _place(roots, asked, name)
        except ConfigError as error:
            fields = tuple(
                replace(field, error=error.message) if field.name == name else field for field in fields
            )
    if len(places) < 3:
        return None, fields
    return replace(asked, **places), fields


def _place(roots: Roots, asked: RunRequest, name: str) -> str:
    if name != "output":
        return str(roots.resolve(getattr(asked, name)))
    if asked.output:
        return str(roots.resolve(asked.output, exists=False, parents=False))
    first = next(iter(roots.folders.values()))
    return str(default_folder(roots.resolve(asked.recipe), first / "runs"))


async def add(request: Request) -> Response:
    """Append the run of a form to the queue."""
    form = await request.form()
    values = {name: str(value) for name, value in form.items()}
    return await run_in_threadpool(_add, request, values)


def _add(request: Request, values: Mapping[str, str]) -> Response:
    asked, fields = _read_form(request, values)
    error = None
    if asked is not None:
        try:
            services(request).queue.queue.submit(asked)
            return RedirectResponse("/runs", 303)
        except FsdptoolError as problem:
            fields, found = with_error(fields, problem)
            error = None if found else problem
    return render(
        request,
        "run_new.html",
        page=page,
        status=400,
        command=asked.command() if asked is not None else (),
        fields=fields,
        groups=_grouped(fields),
        values=values,
        request_of_run=asked,
        job=None,
        waiting=False,
        result=None,
        error=error,
    )


async def act(request: Request) -> Response:
    """Change an entry of the queue, and return to the page that asked."""
    form = await request.form()
    entry, action = request.path_params["entry"], str(form.get("act", ""))
    # The database counts in 64 bits.
    if not (entry.isascii() and entry.isdecimal() and len(entry) <= 18):
        raise HTTPException(404, "the queue has no such entry")
    await run_in_threadpool(_act, request, int(entry), action)
    return RedirectResponse("/runs", 303)


def _act(request: Request, entry: int, action: str) -> None:
    queue = services(request).queue.queue
    simple: Mapping[str, Callable[[int], object]] = {
        "hold": queue.hold,
        "release": queue.release,
        "cancel": queue.cancel,
        "remove": queue.remove,
        "stop": queue.stop,
        "kill": queue.kill,
        "resume": queue.resume,
        "resume-first": partial(queue.resume, first=True),
        "start-over": partial(queue.resume, start_over=True),
        "start-over-first": partial(queue.resume, first=True, start_over=True),
    }
    if action in simple:
        simple[action](entry)
    elif action in ("up", "down", "first", "last"):
        queue.move(entry, cast("Direction", action))
    else:
        raise ConfigError(f"{action!r} is not an action of the queue", help="use the buttons of the page")


def new_address(**values: str) -> str:
    """Return the address of the form of a new run with these values."""
    return f"/runs/new?{urlencode(values)}"


routes = [
    Route("/runs", show),
    Route("/runs/events", events),
    Route("/runs/new", new),
    Route("/runs/add", add, methods=["POST"]),
    Route("/runs/entry/{entry}", act, methods=["POST"]),
]
