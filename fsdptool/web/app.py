"""The application: the pages of ``fsdptool.web.pages``, static files, errors, and the guard before them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from fsdptool.config.command_lines import ALLOWED
from fsdptool.errors import FsdptoolError, unusable_name
from fsdptool.report.page.run import RUN_STYLE
from fsdptool.report.page.style import STYLE
from fsdptool.web.events import Streams
from fsdptool.web.jobs import Jobs
from fsdptool.web.page import Page, Services, error_page, render
from fsdptool.web.roots import Roots
from fsdptool.web.scheduling import QueueRunner
from fsdptool.web.security import Guard, Policy

PAGES = (
    "home",
    "model",
    "hardware",
    "plan",
    "apply",
    "configs",
    "config_file",
    "runs",
    "run",
    "diagnose",
    "cache",
    "calibrate",
    "jobs",
)
"""Modules of ``fsdptool.web.pages``, in the order of the menu. Each has a list ``routes``; one that has a
place in the menu also has ``page``."""


def build_app(policy: Policy, roots: Roots, jobs: Jobs, queue: QueueRunner | None = None) -> Starlette:
    """Return the application.

    Args:
        policy: What the guard enforces.
        roots: The folders that pages may read and write.
        jobs: Background work; closed when the application ends.
        queue: The queue of runs, whose entries are started while the application lasts; that of this
            machine by default.
    """
    jobs.confine(roots)
    runner = queue if queue is not None else QueueRunner()
    modules = [import_module(f"fsdptool.web.pages.{name}") for name in PAGES]
    menu: tuple[Page, ...] = tuple(module.page for module in modules if hasattr(module, "page"))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        runner.start()
        yield
        runner.close()
        jobs.close()

    app = Starlette(
        routes=[
            Route("/static/style.css", style),
            *(route for module in modules for route in module.routes),
            Mount("/static", StaticFiles(packages=[("fsdptool.web", "static")])),
        ],
        middleware=[Middleware(Guard, policy=policy), Middleware(_WithinRoots, roots=roots)],
        exception_handlers={
            FsdptoolError: error_page,
            HTTPException: _http_error,
            OSError: _os_error,
            Exception: error_page,
        },
        lifespan=lifespan,
    )
    app.state.services = Services(roots, jobs, policy.session, menu, runner, Streams())
    return app


class _WithinRoots:
    """Lets files below the roots be read, and no others that a text of a page names."""

    def __init__(self, app: ASGIApp, roots: Roots) -> None:
        self._app = app
        self._roots = roots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        token = ALLOWED.set(self._roots.contains)
        try:
            await self._app(scope, receive, send)
        finally:
            ALLOWED.reset(token)


async def style(_: Request) -> Response:
    """Return the one style sheet: the palette and charts of the written pages, and the interface's own."""
    own = files("fsdptool.web").joinpath("static", "interface.css").read_text(encoding="utf-8")
    return Response(f"{STYLE}\n{RUN_STYLE}\n{own}", media_type="text/css")


async def _os_error(request: Request, error: Any) -> Response:
    """Answer a name that no file can have, wherever it was used; other failures are internal errors."""
    if unusable_name(error) is None:
        raise error
    return error_page(request, error)


async def _http_error(request: Request, error: Any) -> Response:
    reason = FsdptoolError(f"{request.url.path}: {str(error.detail).lower()}", help="use the menu")
    return render(request, "error.html", status=error.status_code, error=reason)
