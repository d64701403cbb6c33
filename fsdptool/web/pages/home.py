"""The first page: what there is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fsdptool.web.page import render


def show(request: Request) -> Response:
    """Return the list of pages."""
    return render(request, "home.html")


routes = [Route("/", show)]
