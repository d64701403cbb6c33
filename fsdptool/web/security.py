"""One ASGI middleware before every page: sessions, limits of a request, and what the answer may load."""

from __future__ import annotations

import asyncio
import hmac
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders, UploadFile
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

WRITE_HEADER = "x-fsdptool-token"
"""Header that scripts of the page send with every write."""
WRITE_FIELD = "write_token"
"""Hidden form field with the same token, for browsers without JavaScript."""


@dataclass(slots=True)
class WebSession:
    """The secrets of one server; all of them are new whenever it starts.

    Attributes:
        port: Port of the server. Cookies are shared by all ports of a host, so the cookie is named after it.
        fixed_token: Token of ``--token``, which opens the interface repeatedly; None: one-time tokens only.
    """

    port: int
    fixed_token: str | None = None
    _cookie: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    write_token: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)
    _unused: set[str] = field(default_factory=set, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def cookie_name(self) -> str:
        """Name of the session cookie."""
        return f"fsdptool_ui_{self.port}"

    def set_cookie(self) -> str:
        """Return the ``Set-Cookie`` header that logs a browser in until it closes."""
        return f"{self.cookie_name}={self._cookie}; Path=/; HttpOnly; SameSite=Strict"

    def new_token(self) -> str:
        """Return a token that opens the interface once."""
        token = secrets.token_urlsafe(24)
        with self._lock:
            self._unused.add(token)
        return token

    def redeem(self, token: str) -> bool:
        """Return whether a token opens the interface, and use it up."""
        if self.fixed_token is not None and _same(token, self.fixed_token):
            return True
        with self._lock:
            match = next((known for known in self._unused if _same(known, token)), None)
            if match is not None:
                self._unused.discard(match)
        return match is not None

    def knows(self, cookies: str) -> bool:
        """Return whether a ``Cookie`` header carries this session."""
        for part in cookies.split(";"):
            name, _, value = part.strip().partition("=")
            if name == self.cookie_name and _same(value, self._cookie):
                return True
        return False

    def may_write(self, token: str | None) -> bool:
        """Return whether the token of a write is the right one."""
        return token is not None and _same(token, self.write_token)


def _same(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode(), right.encode())


OPEN_PATH = "/open"
"""Where a one-time token becomes the session cookie."""

CONTENT_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Scripts, styles, pictures and streams from this server only; no inline script or style."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": CONTENT_POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # With no-referrer, browsers send "Origin: null" with forms (Fetch, "append a request Origin header").
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer."""

_READING = frozenset({"GET", "HEAD"})
_WRITING = frozenset({"POST"})


@dataclass(frozen=True, slots=True)
class Limits:
    """How much a client may take.

    Attributes:
        body_bytes: Longest body of a request.
        body_seconds: Time in which the whole body must arrive.
        send_seconds: Time in which a client must accept each part of an answer.
    """

    body_bytes: int = 8 << 20
    body_seconds: float = 20.0
    send_seconds: float = 20.0


@dataclass(frozen=True, slots=True)
class Policy:
    """What the middleware enforces.

    Attributes:
        session: The secrets of this server.
        hosts: Values of the Host header that are accepted, with the port: ``127.0.0.1:8400``. Any other name
            that resolves to this machine is refused (DNS rebinding).
        limits: How much a client may take.
    """

    session: WebSession
    hosts: frozenset[str]
    limits: Limits = field(default_factory=Limits)


class _RefusedError(Exception):
    """A request that is not answered; carries the answer instead."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.response = PlainTextResponse(f"{text}\n", status)


class Guard:
    """Middleware that lets a request pass only if it comes from a page of this server.

    The order is fixed: method, Host, origin of the request, cookie, size and time of the body, token of
    a write. Every answer gets the headers above.
    """

    def __init__(self, app: ASGIApp, policy: Policy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        send = self._guarded(send)
        try:
            headers = Headers(scope=scope)
            self._check_source(scope, headers)
            if scope["path"] == OPEN_PATH:
                response = self._open(scope)
            elif not self._policy.session.knows(headers.get("cookie", "")):
                raise _RefusedError(
                    401, "Open the interface by the address that `fsdptool ui` printed in its terminal."
                )
            else:
                if scope["method"] in _WRITING:
                    receive = await self._checked_write(scope, headers, receive)
                await self._app(scope, receive, send)
                return
        except _RefusedError as refused:
            response = refused.response
            # The rest of the body is not read, so the connection cannot be used again.
            response.headers["connection"] = "close"
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    def _check_source(self, scope: Scope, headers: Headers) -> None:
        if scope["method"] not in _READING | _WRITING:
            raise _RefusedError(405, "Only GET, HEAD and POST are supported.")
        if len(headers.getlist("host")) != 1 or headers["host"].lower() not in self._policy.hosts:
            raise _RefusedError(421, "This server does not answer for that host name.")
        opening = scope["path"] == OPEN_PATH and scope["method"] == "GET"
        site = headers.get("sec-fetch-site")
        # A link elsewhere may lead to the one-time address; it may lead to nothing else.
        if site not in (None, "same-origin", "none") and not opening:
            raise _RefusedError(403, "Requests from other pages are refused.")
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"http://{headers['host'].lower()}":
            raise _RefusedError(403, "Requests from other pages are refused.")
        if scope["method"] in _WRITING and origin is None and site != "same-origin":
            raise _RefusedError(403, "A write must come from a page of this server.")

    def _open(self, scope: Scope) -> Response:
        if scope["method"] != "GET":
            raise _RefusedError(405, "Only GET is supported.")
        session = self._policy.session
        query = parse_qs(scope["query_string"].decode("latin-1"), max_num_fields=8)
        if not session.redeem((query.get("token") or [""])[0]):
            raise _RefusedError(
                403, "This address has already been used. `fsdptool ui` has printed a new one."
            )
        response = RedirectResponse("/", 303)
        response.headers["set-cookie"] = session.set_cookie()
        return response

    async def _checked_write(self, scope: Scope, headers: Headers, receive: Receive) -> Receive:
        body = await self._body(headers, receive)
        if not self._policy.session.may_write(headers.get(WRITE_HEADER)):
            token = await _form_token(scope, body)
            if not self._policy.session.may_write(token):
                raise _RefusedError(403, "The write token is missing or old. Reload the page and try again.")
        return _replay(body, receive)

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        limits = self._policy.limits
        too_large = _RefusedError(413, f"The request is larger than {limits.body_bytes} bytes.")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18 or int(length) > limits.body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    body += message.get("body", b"")
                    if len(body) > limits.body_bytes:
                        raise too_large
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise _RefusedError(408, "The request took too long to arrive.") from None

    def _guarded(self, send: Send) -> Send:
        """Return ``send`` with the headers added, which gives up on a client that does not read."""
        seconds = self._policy.limits.send_seconds

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            try:
                await asyncio.wait_for(send(message), seconds)
            except TimeoutError:
                raise ClientDisconnect from None

        return guarded


async def _form_token(scope: Scope, body: bytes) -> str | None:
    """Return the hidden field of a form that carries the token of writes, if there is one."""
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip()
    if kind not in ("application/x-www-form-urlencoded", "multipart/form-data"):
        return None
    # Errors of the parser are the client's: no token, no write.
    try:
        form = await Request(scope, _replay(body, _gone)).form(max_files=8, max_fields=500)
    except Exception:
        return None
    token = form.get(WRITE_FIELD)
    await form.close()
    return None if isinstance(token, UploadFile) else token


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body that was read, then waits for the client to leave."""
    done = False

    async def replay() -> Message:
        nonlocal done
        if done:
            return await receive()
        done = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


async def _gone() -> Message:
    return {"type": "http.disconnect"}
