"""The server: the application of all pages, bound to loopback, opened by a one-time address."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
import webbrowser
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fsdptool.config.command_lines import ALLOWED
from fsdptool.errors import ConfigError, FsdptoolError, unusable_name
from fsdptool.files.values import PACKED
from fsdptool.report.page.parts import STYLE
from fsdptool.web.events import Streams
from fsdptool.web.jobs import CHILD, Jobs
from fsdptool.web.page import Page, Services, error_page, render
from fsdptool.web.roots import Roots
from fsdptool.web.scheduling import QueueRunner
from fsdptool.web.security import OPEN_PATH, Guard, Limits, Policy, WebSession

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
            Mount("/static", CompressedFiles(packages=[("fsdptool.web", "static")])),
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


class CompressedFiles(StaticFiles):
    """Sends static files; those that a wheel stores compressed are sent so, as every browser accepts."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        found, status = super().lookup_path(path)
        return (found, status) if status is not None else super().lookup_path(f"{path}{PACKED}")

    def file_response(
        self,
        full_path: str | os.PathLike[str],
        stat_result: os.stat_result,
        scope: Scope,
        status_code: int = 200,
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        if Path(full_path).suffix == PACKED:
            response.headers["Content-Encoding"] = "gzip"
        return response


async def style(_: Request) -> Response:
    """Return the one style sheet: the palette and charts of the written pages, and the interface's own."""
    own = files("fsdptool.web").joinpath("static", "interface.css").read_text(encoding="utf-8")
    return Response(f"{STYLE}\n{own}", media_type="text/css")


async def _os_error(request: Request, error: Any) -> Response:
    """Answer a name that no file can have, wherever it was used; other failures are internal errors."""
    if unusable_name(error) is None:
        raise error
    return error_page(request, error)


async def _http_error(request: Request, error: Any) -> Response:
    reason = FsdptoolError(f"{request.url.path}: {str(error.detail).lower()}", help="use the menu")
    return render(request, "error.html", status=error.status_code, error=reason)


UNHEARD_SECONDS = 20.0
"""How long a question is worked on that no page listens to."""
HEADER_SECONDS = 10.0
"""Time in which a client must send the head of a request."""
CONNECTIONS = 100
"""Connections and requests that are served at once."""
STRANGERS = 32
"""Connections among these that have not shown the session's cookie: any user of the machine can open them."""
SHORTEST_TOKEN = 16


@dataclass(frozen=True, slots=True)
class Address:
    """Where the interface listens.

    Attributes:
        host: An address of this machine.
        port: 0 takes a free one.
        token: Token that opens the interface repeatedly. Required where ``host`` is not loopback.
    """

    host: str = "127.0.0.1"
    port: int = 8400
    token: str | None = None

    def check(self) -> None:
        """Refuse addresses that other machines can reach, unless there is a token.

        Raises:
            ConfigError: The address is not served; the message says why.
        """
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            raise ConfigError(
                f"--host {self.host!r} is not an address", help="leave it out, or give an IP address"
            ) from None
        if self.token is not None and len(self.token) < SHORTEST_TOKEN:
            raise ConfigError(
                f"--token has {len(self.token)} characters; at least {SHORTEST_TOKEN} are required",
                help="python -c 'import secrets; print(secrets.token_urlsafe())' generates one",
            )
        if address.is_loopback:
            return
        if address.is_unspecified:
            raise ConfigError(
                f"--host {self.host} stands for every address of this machine",
                help="give the address by which browsers reach it, so that other host names are refused",
            )
        if self.token is None:
            raise ConfigError(
                f"--host {self.host} can be reached from other machines",
                help="leave --host out and use an SSH tunnel, or give --token as well",
            )


def listen(address: Address) -> socket.socket:
    """Return a socket that listens on an address.

    Raises:
        ConfigError: The address is refused or in use.
    """
    address.check()
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address.host, address.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port {address.port} of {address.host} cannot be opened: {error.strerror}",
            help="--port 0 selects a free port; another fsdptool ui may be running",
        ) from error
    listener.listen(128)
    return listener


class Interface:
    """One server and its addresses.

    Args:
        roots: The folders that pages may read and write.
        address: Where to listen.
        announce: Is called with an address that opens the interface, at the start and whenever one was used.
        limits: How much a client may take.
        header_seconds: Time in which a client must send the head of a request.
        queue: The queue of runs; that of this machine by default.

    Attributes:
        port: The port that is listened on.

    Raises:
        ConfigError: The address is refused or in use.
    """

    def __init__(
        self,
        roots: Roots,
        address: Address,
        *,
        announce: Callable[[str], None],
        limits: Limits | None = None,
        header_seconds: float = HEADER_SECONDS,
        queue: QueueRunner | None = None,
    ) -> None:
        self._socket = listen(address)
        self.port: int = self._socket.getsockname()[1]
        self._address, self._announce = address, announce
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._origin = f"{host}:{self.port}"
        names = {self._origin, f"localhost:{self.port}"} if _is_loopback(address.host) else {self._origin}
        self._session = _AnnouncingSession(self.port, address.token)
        self._session.used = lambda: announce(self.new_address())
        self.jobs = Jobs(unheard_seconds=UNHEARD_SECONDS, child=(*CHILD, *map(str, roots.folders.values())))
        app = build_app(Policy(self._session, frozenset(names), limits or Limits()), roots, self.jobs, queue)
        self.server = _Server(
            app.state.services.streams,
            uvicorn.Config(
                app,
                http=_protocol(header_seconds, self._session),
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                limit_concurrency=CONNECTIONS,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=1,
            ),
        )

    def new_address(self) -> str:
        """Return an address that opens the interface: once, unless the token was given."""
        token = self._address.token or self._session.new_token()
        return f"http://{self._origin}{OPEN_PATH}?token={token}"

    def run(self, *, browser: bool = False, warm: bool = True) -> None:
        """Serve until Ctrl-C or SIGTERM.

        Args:
            browser: Whether to open a browser.
            warm: Whether to load PyTorch in the background at once.
        """
        first = self.new_address()
        self._announce(first)
        if warm:
            self.jobs.warm()
        try:
            # uvicorn raises the signal that ended it again (0.54, Server.capture_signals).
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(self._serve(first if browser else None))
        finally:
            self.jobs.close()

    async def _serve(self, opened: str | None) -> None:
        if opened is not None:
            asyncio.get_running_loop().run_in_executor(None, _open_browser, opened)
        await self.server.serve(sockets=[self._socket])


class _Server(uvicorn.Server):
    """A server that ends its streams of events first."""

    def __init__(self, streams: Streams, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._streams = streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._streams.end()
        await super().shutdown(sockets)


class _AnnouncingSession(WebSession):
    """A session that tells when a one-time address was used, so that there is another one."""

    used: Callable[[], None]

    def redeem(self, token: str) -> bool:
        right = super().redeem(token)
        if right and self.fixed_token is None:
            self.used()
        return right


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


def _open_browser(address: str) -> None:
    try:
        webbrowser.open(address)
    except webbrowser.Error as error:
        sys.stderr.write(f"no browser could be opened: {error}\n")


def _protocol(seconds: float, session: WebSession) -> type[asyncio.Protocol]:
    """Return uvicorn's HTTP protocol with limits on the heads of requests, and on who sends none.

    uvicorn 0.54 ends a connection that is idle after an answer, but waits without limit for a head that has
    begun, or for the first one. It refuses everybody once there are too many connections, whoever holds them.
    """
    strangers: dict[H11Protocol, None] = {}

    class HeadLimited(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            strangers[self] = None
            if len(strangers) > STRANGERS:
                oldest = next(iter(strangers))
                del strangers[oldest]
                oldest.transport.close()
            self._watch()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            cookies = [value.decode("latin-1") for name, value in self.headers or () if name == b"cookie"]
            if self in strangers and any(map(session.knows, cookies)):
                del strangers[self]
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            strangers.pop(self, None)
            self._stop()
            super().connection_lost(exc)

        def _watch(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._stop()
            elif self._timer is None:
                self._timer = self.loop.call_later(seconds, self._end)

        def _stop(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _end(self) -> None:
            self._timer = None
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self.transport.close()

    return HeadLimited
