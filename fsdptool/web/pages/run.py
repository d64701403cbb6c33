"""One run: live while it lasts, and what is known of it afterwards."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from fsdptool.errors import ConfigError
from fsdptool.files.text import is_file
from fsdptool.launch.processes import stop_run
from fsdptool.report.console.runs import note_text
from fsdptool.runs.folder import RUN
from fsdptool.runs.manifest import is_plain_file
from fsdptool.web.page import render, render_part, services
from fsdptool.web.pages.runs import new_address, show_names
from fsdptool.web.pages.runs import page as menu_entry
from fsdptool.web.run_values import (
    SAMPLE_NAME,
    SAMPLE_STEP,
    SAMPLES,
    inputs_of,
    points,
    printed,
    read_run,
    run_values,
    signature,
)

_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 15.0
"""How long the page stays as it is while nothing changes in the folder."""

_PARTS = ("head", "actions", "failure", "memory", "ranks", "checkpoints", "samples", "events")
"""Templates ``run_NAME.html``, each replaced when it changes."""


def _folder(request: Request, name: str) -> Path:
    """Return the run folder that a page names.

    Raises:
        ConfigError: It is outside the roots, or not a run folder.
    """
    folder = services(request).roots.resolve(name, exists=False, parents=False)
    if not is_file(folder / RUN):
        raise ConfigError(f"{name} is not a run folder", help="choose a run on the page Runs")
    return folder


def show(request: Request) -> Response:
    """Return the page of a run."""
    name = request.query_params.get("run", "")
    shared = services(request)
    if (waiting := _not_begun(request, name)) is not None:
        return render(
            request,
            "run_waiting.html",
            page=menu_entry,
            command=("fsdptool", "queue", "list"),
            refresh=True,
            **waiting,
        )
    folder = _folder(request, name)
    if request.headers.get("hx-request"):
        # The page of an entry that had not begun asks: now there is more to load.
        return Response(headers={"HX-Refresh": "true"})
    view, history = read_run(shared.roots, folder)
    job = shared.jobs.get(request.query_params.get("job", ""))
    values = run_values(shared.roots, folder, shared.queue.queue, view, history)
    return render(
        request,
        "run.html",
        page=menu_entry,
        command=("fsdptool", "watch", str(folder)),
        refresh=view.state == "running" or (job is not None and not job.state.ended),
        name=shared.roots.name_of(folder),
        job=job,
        parts_of_page=_PARTS,
        **values,
    )


def _not_begun(request: Request, name: str) -> dict[str, Any] | None:
    """Return the values of the page of an entry whose run folder is not written yet; None for other runs."""
    shared = services(request)
    folder = shared.roots.resolve(name, exists=False, parents=False)
    if is_file(folder / RUN):
        return None
    queue = shared.queue.queue
    row = queue.latest(folder)
    if row is None:
        return None
    entry = show_names(shared.roots, next(item for item in queue.report().entries if item.id == row.id))
    return {
        "name": shared.roots.name_of(folder),
        "entry": entry,
        "note": note_text(entry),
        "log": printed(queue, row.id),
    }


async def events(request: Request) -> Response:
    """Stream the parts of the page that change, and the curves."""
    name = request.query_params.get("run", "")
    if await run_in_threadpool(_not_begun, request, name) is not None:
        return services(request).streams.respond(_begin(request, name))
    folder = await run_in_threadpool(_folder, request, name)

    async def source() -> AsyncIterator[tuple[str, str]]:
        sent: dict[str, str] = {}
        before: tuple[object, ...] = ()
        looked = 0.0
        while True:
            began = time.monotonic()
            now = await run_in_threadpool(signature, folder)
            # A run on another machine that writes nothing any more is dead after a while.
            if now != before or began - looked > _SILENT_SECONDS:
                before, looked = now, began
                for part, text in (await run_in_threadpool(_parts, request, folder)).items():
                    if sent.get(part) != text:
                        sent[part] = text
                        yield part, text
            spent = time.monotonic() - began
            # A run of many ranks takes long to read: a tenth of the time at most.
            await asyncio.sleep(max(_LOOK_SECONDS, 9.0 * spent))

    return services(request).streams.respond(source())


async def _begin(request: Request, name: str) -> AsyncIterator[tuple[str, str]]:
    """Yield how an entry of the queue stands until its run folder is written."""
    sent = ""
    while (values := await run_in_threadpool(_not_begun, request, name)) is not None:
        text = render_part(request, "run_entry.html", **values)
        if text != sent:
            sent = text
            yield "waiting", text
        await asyncio.sleep(_LOOK_SECONDS)
    yield "begun", ""


def _parts(request: Request, folder: Path) -> dict[str, str]:
    shared = services(request)
    view, history = read_run(shared.roots, folder)
    values = run_values(shared.roots, folder, shared.queue.queue, view, history)
    name = shared.roots.name_of(folder)
    texts = {part: render_part(request, f"run_{part}.html", name=name, **values) for part in _PARTS}
    return {**texts, "points": json.dumps(points(history, view))}


def curve(request: Request) -> Response:
    """Return the curves as columns."""
    folder = _folder(request, request.query_params.get("run", ""))
    view, history = read_run(services(request).roots, folder)
    return JSONResponse(points(history, view))


def sample(request: Request) -> Response:
    """Return a picture that the model drew."""
    folder = _folder(request, request.query_params.get("run", ""))
    step, file = request.query_params.get("step", ""), request.query_params.get("file", "")
    path = folder / SAMPLES / step / file
    if not SAMPLE_STEP.fullmatch(step) or not SAMPLE_NAME.fullmatch(file) or path.suffix != ".png":
        raise HTTPException(404, "it is not a picture of this run")
    # Links are resolved: what they lead to must be below a root as well.
    resolved = services(request).roots.resolve(str(path))
    if resolved != path or not is_plain_file(path):
        raise HTTPException(404, "it is not a picture of this run")
    return FileResponse(path, media_type="image/png")


async def act(request: Request) -> Response:
    """Stop, kill, resume or export a run."""
    form = {name: str(value) for name, value in (await request.form()).items()}
    address = await run_in_threadpool(_act, request, request.path_params["act"], form)
    return RedirectResponse(address, 303)


def _act(request: Request, action: str, form: dict[str, str]) -> str:
    """Do what a button says; return the address of the page that shows the consequence."""
    shared = services(request)
    folder = _folder(request, form.get("run", ""))
    queue, name = shared.queue.queue, shared.roots.name_of(folder)
    row = queue.latest(folder)
    own: dict[str, Any] = {"run": name}
    if action in ("stop", "kill"):
        kill = action == "kill"
        if row is not None and row.stage == "started":
            (queue.kill if kill else queue.stop)(row.id)
        else:
            stop_run(folder, kill=kill)
    elif action in ("resume", "resume-first"):
        start_over = form.get("start-over") == "yes"
        if row is None or row.stage not in ("started", "ended"):
            recipe, config = inputs_of(folder) or ("", "")
            accepted = {"start_over": "yes"} if start_over else {}
            return new_address(recipe=recipe, config=config, output=name, resume="yes", **accepted)
        queue.resume(row.id, first=action == "resume-first", start_over=start_over)
        return "/runs"
    elif action == "export":
        arguments = {
            "run": str(folder),
            **{option: form.get(option) == "yes" for option in ("merge", "ema", "force")},
            "number": time.time(),
        }
        own["job"] = shared.jobs.submit("export", arguments, lasting=True).id
    else:
        raise ConfigError(f"{action!r} is not an action of a run", help="use the buttons of the page")
    return f"/run?{urlencode(own)}"


routes = [
    Route("/run", show),
    Route("/run/events", events),
    Route("/run/curve", curve),
    Route("/run/sample", sample),
    Route("/run/{act}", act, methods=["POST"]),
]
