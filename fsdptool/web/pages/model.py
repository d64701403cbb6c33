"""The page of a model: wrap classes with reasons, the units they make, tree, leaves and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any
from urllib.parse import urlencode

from markupsafe import Markup
from starlette.datastructures import QueryParams, UploadFile
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fsdptool.api.options import DivisionOptions
from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.records.detection import ConsideredClass, Detection
from fsdptool.records.diagnostic import read_answer
from fsdptool.report.page.detection import detection_body
from fsdptool.web import references
from fsdptool.web.forms import Field, option_fields, parse
from fsdptool.web.jobs import JobState
from fsdptool.web.page import Page, error_page, group_of, render, services

page = Page("Model", "/model", "Wrap classes and FSDP units of a model, with reasons.")

QUICK_SECONDS = 0.25
"""Answers that come within this time are shown at once."""

_DETAILS = ("layout", "revision", "component")


def show(request: Request) -> Response:
    """Answer ``/model?reference=…&wrap=…&world_size=…``."""
    query = request.query_params
    fields = _fields(query)
    common: dict[str, Any] = {"page": page, "upload_bytes": references.LARGEST_BYTES}
    if not query.get("reference"):
        return render(request, "model.html", fields=fields, **common)
    values, fields = parse(fields)
    common["fields"] = fields
    if any(field.error for field in fields):
        return render(request, "model.html", status=400, **common)
    wrap = _wrap(query, values["reference"])
    common["address"] = f"/model?{urlencode({**values, 'wrap': wrap}, doseq=True)}"
    try:
        reference = references.allowed(services(request).roots, values["reference"])
        job = services(request).jobs.submit(
            "detect",
            {
                "reference": reference,
                "wrap": wrap,
                "world_size": values.get("world_size"),
                "layout": values.get("layout", "native"),
                "revision": values.get("revision"),
                "component": values.get("component"),
                "stamp": references.stamp(reference),
            },
            group=group_of(request, "model"),
        )
    except FsdptoolError as error:
        return render(request, "model.html", status=400, error=error, **common)
    common["command"] = _command(reference, wrap, values)
    job.wait(QUICK_SECONDS)
    if job.state is JobState.FAILED:
        return render(request, "model.html", status=400, error=job.error, job=job, **common)
    if job.state is not JobState.DONE:
        return render(request, "model.html", job=job, refresh=True, **common)
    answer = read_answer(Detection, job.result["document"])
    body = Markup(detection_body(answer.body, answer.envelope.diagnostics, _box))
    plan = "/plan?" + urlencode(
        {"reference": values["reference"], **{k: values[k] for k in _DETAILS if k in values}}
    )
    return render(
        request, "model.html", body=body, **job.result, plan=plan, shown=values["reference"], **common
    )


async def upload(request: Request) -> Response:
    """Keep a dropped ``config.json`` and show its model."""
    form = await request.form(max_files=1, max_fields=20)
    file, text = form.get("file"), form.get("text")
    data = await file.read() if isinstance(file, UploadFile) else str(text or "").encode()
    try:
        if not data.strip():
            raise ConfigError("the file is empty", help="choose the config.json of a model")
        reference = references.save(data)
    except FsdptoolError as error:
        return error_page(request, error)
    return RedirectResponse(f"/model?{urlencode({'reference': reference})}", 303)


def _fields(query: Mapping[str, str]) -> tuple[Field, ...]:
    reference, *details = option_fields(("reference", *_DETAILS), query)
    (ranks,) = option_fields(("world_size",), query, of=DivisionOptions)
    layout, *rest = details
    return (
        replace(reference, required=True, suggestions=references.known()),
        replace(ranks, label="Ranks"),
        replace(layout, empty="(native)"),
        *rest,
    )


def _wrap(query: QueryParams, reference: str) -> list[str]:
    """Return the classes to wrap; none if the boxes are another model's, or equal what is detected."""
    wrap = sorted(set(query.getlist("wrap")))
    if query.get("wrap_of", reference) != reference or wrap == sorted(query.getlist("detected")):
        return []
    return wrap


def _command(reference: str, wrap: list[str], values: Mapping[str, Any]) -> list[str]:
    words = ["fsdptool", "detect", reference]
    if wrap:
        words += ["--wrap", ",".join(wrap)]
    for name, flag in (("world_size", "--world-size"), *((name, f"--{name}") for name in _DETAILS)):
        if name in values:
            words += [flag, str(values[name])]
    return words


def _box(item: ConsideredClass) -> str:
    """Return the box that wraps a class or not."""
    name = escape(item.name, quote=True)
    checked = " checked" if item.chosen else ""
    attributes = f'form="question" name="wrap" value="{name}" aria-label="wrap {name}"{checked}'
    return f'<input type="checkbox" {attributes}>'


routes = [Route("/model", show), Route("/model/upload", upload, methods=["POST"])]
