"""Who may use the interface: one-time addresses, the session cookie and the token of writes."""

from __future__ import annotations

import hmac
import secrets
import threading
from dataclasses import dataclass, field

WRITE_HEADER = "x-fsdptool-token"
"""Header that scripts of the page send with every write."""
WRITE_FIELD = "write_token"
"""Hidden form field with the same token, for browsers without JavaScript."""


@dataclass(slots=True)
class Session:
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
