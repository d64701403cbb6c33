"""What every page is made from: its entry in the menu, its template, the command that does the same."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from fsdptool.errors import ExitCode, FsdptoolError, unusable_name
from fsdptool.formatting import amount, printable, printable_lines
from fsdptool.report.page.parts import breaking
from fsdptool.web.events import Streams
from fsdptool.web.jobs import Jobs
from fsdptool.web.roots import Roots
from fsdptool.web.scheduling import QueueRunner
from fsdptool.web.security import WRITE_FIELD, WRITE_HEADER, WebSession


@dataclass(frozen=True, slots=True)
class Page:
    """One entry of the menu.

    Attributes:
        title: Its name.
        path: Its address.
        summary: What it answers, in one sentence.
    """

    title: str
    path: str
    summary: str


@dataclass(frozen=True, slots=True)
class Services:
    """What pages share; ``request.app.state.services``.

    Attributes:
        roots: The folders that pages may read and write.
        jobs: Background work.
        session: The secrets of this server.
        menu: Every page, in order.
        queue: The queue of runs.
        streams: Open streams of events.
    """

    roots: Roots
    jobs: Jobs
    session: WebSession
    menu: tuple[Page, ...]
    queue: QueueRunner
    streams: Streams


def services(request: Request) -> Services:
    """Return what the pages of this server share."""
    found: Services = request.app.state.services
    return found


@cache
def environment() -> Environment:
    """Return the templates. Every value is escaped unless it is ``Markup``."""
    templates = Environment(
        loader=PackageLoader("fsdptool.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters["amount"] = amount
    templates.filters["breaking"] = lambda text: Markup(breaking(text))
    templates.filters["command"] = shlex.join
    templates.filters["lines"] = printable_lines
    templates.filters["marked"] = marked
    templates.filters["printable"] = printable
    return templates


def marked(text: str) -> Markup:
    """Return a text in which what stands between backticks is code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if index % 2 else escape(piece)
        for index, piece in enumerate(pieces)
    )


def render(
    request: Request,
    template: str,
    *,
    page: Page | None = None,
    command: Sequence[str] = (),
    status: int = 200,
    refresh: bool = False,
    address: str | None = None,
    **values: Any,
) -> Response:
    """Return a page.

    Args:
        request: What is answered.
        template: File name below ``templates``; it extends ``base.html``.
        page: The entry of the menu that is marked.
        command: The command that does the same as this page, as words.
        status: HTTP status.
        refresh: Whether browsers without JavaScript load the page again after two seconds.
        address: Path and query that reproduce the page; None is the request's own.
        **values: For the template.
    """
    address = address or request.url.path + (f"?{request.url.query}" if request.url.query else "")
    text = render_part(
        request,
        template,
        page=page,
        menu=services(request).menu,
        command=tuple(command),
        refresh=refresh,
        here=address,
        **values,
    )
    # The address bar shows it when htmx swaps a part of the page.
    return HTMLResponse(text, status, {"hx-push-url": address} if "hx-request" in request.headers else None)


def render_part(request: Request, template: str, **values: Any) -> str:
    """Return a template as text: a page, or a part of one that a stream of events replaces."""
    shared = services(request)
    return (
        environment()
        .get_template(template)
        .render(
            write_token=shared.session.write_token,
            write_header=WRITE_HEADER,
            write_field=WRITE_FIELD,
            **values,
        )
    )


def group_of(request: Request, name: str) -> str | None:
    """Return whose question a request is: that of a browser's tab; None where no script tells it.

    Two browsers without JavaScript, which load their pages again and again, must not overtake each other.
    """
    tab = request.headers.get("x-fsdptool-tab", "")
    return f"{name}:{tab}" if tab.isalnum() and len(tab) <= 32 else None


def return_address(form: FormData) -> str:
    """Return the page that a form names in its field ``back``, or the first page."""
    target = str(form.get("back", "/"))
    # A path of this server, never another one: //host/ and /\\host/ would lead there.
    safe = target.startswith("/") and not target.startswith(("//", "/\\")) and target.isprintable()
    return target if safe else "/"


STATUS = {ExitCode.INTERNAL: 500, ExitCode.WORKER_FAILED: 500}
"""HTTP status of an error by its exit code; 400 for all others."""


def error_page(request: Request, error: Exception) -> Response:
    """Return the page of an error; anything that is not a user's error is an internal one."""
    error = unusable_name(error) or error
    if not isinstance(error, FsdptoolError):
        text = printable(f"{type(error).__name__}: {error}")
        error = FsdptoolError(f"internal error: {text}", help="report it, with what led to it")
        error.exit_code = ExitCode.INTERNAL
    status = STATUS.get(error.exit_code, 400)
    return render(request, "error.html", status=status, error=error)
