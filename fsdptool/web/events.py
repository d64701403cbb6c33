"""Server-sent events: a stream of named messages, kept alive, ended when the browser leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import StreamingResponse

HEARTBEAT_SECONDS = 15.0
"""A comment is sent after this time without a message, so that a browser that left is noticed."""


def message(name: str, data: str = "") -> str:
    """Return one event. ``data`` may have several lines; htmx swaps it in as HTML, so names are escaped."""
    lines = "".join(f"data: {line}\n" for line in data.splitlines() or [""])
    return f"event: {name}\n{lines}\n"


class Streams:
    """The open streams of one server. They end before it does, which would else report each as an error."""

    def __init__(self) -> None:
        self._ending = asyncio.Event()

    def end(self) -> None:
        """End every stream; from the event loop."""
        self._ending.set()

    def respond(self, source: AsyncIterator[tuple[str, str]]) -> StreamingResponse:
        """Return a response that sends the (name, data) pairs of ``source`` until it or the server ends."""
        return StreamingResponse(self._lines(source), media_type="text/event-stream")

    async def _lines(self, source: AsyncIterator[tuple[str, str]]) -> AsyncIterator[str]:
        pending: asyncio.Future[tuple[str, str]] | None = None
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            while not ending.done():
                if pending is None:
                    pending = asyncio.ensure_future(anext(source))
                waiting: set[asyncio.Future[Any]] = {pending, ending}
                await asyncio.wait(waiting, timeout=HEARTBEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if not pending.done():
                    yield ": still here\n\n"
                    continue
                try:
                    name, data = pending.result()
                except StopAsyncIteration:
                    return
                pending = None
                yield message(name, data)
        finally:
            ending.cancel()
            if pending is not None:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)
            close = getattr(source, "aclose", None)
            if close is not None:
                await close()
