"""The first page: one question to plan, the latest runs, and the other pages."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fsdptool.web.page import render, services
from fsdptool.web.pages.runs import run_rows
from fsdptool.web.plans import first_fields

RECENT = 5
"""Runs that are listed: those that are running first, then the latest."""


def show(request: Request) -> Response:
    """Return the form of the question, which the page of plans answers, and recent runs."""
    shared = services(request)
    runs = run_rows(shared.roots)[0]
    return render(
        request,
        "home.html",
        fields=first_fields(),
        runs=runs[:RECENT],
        more=len(runs) - RECENT,
        unreadable=(),
    )


routes = [Route("/", show)]
