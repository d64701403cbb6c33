"""Server-sent events: a stream of named messages, kept alive, ended when the browser leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse

HEARTBEAT_SECONDS = 15.0
"""A comment is sent after this time without a message, so that a browser that left is noticed."""


def message(name: str, data: str = "") -> str:
    """Return one event. ``data`` may have several lines; htmx swaps it in as HTML, so names are escaped."""
    lines = "".join(f"data: {line}\n" for line in data.splitlines() or [""])
    return f"event: {name}\n{lines}\n"


def stream(source: AsyncIterator[tuple[str, str]]) -> StreamingResponse:
    """Return a response that sends the (name, data) pairs of ``source`` until it ends."""
    return StreamingResponse(_lines(source), media_type="text/event-stream")


async def _lines(source: AsyncIterator[tuple[str, str]]) -> AsyncIterator[str]:
    pending: asyncio.Future[tuple[str, str]] | None = None
    try:
        while True:
            if pending is None:
                pending = asyncio.ensure_future(anext(source))
            done, _ = await asyncio.wait({pending}, timeout=HEARTBEAT_SECONDS)
            if not done:
                yield ": still here\n\n"
                continue
            try:
                name, data = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield message(name, data)
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        close = getattr(source, "aclose", None)
        if close is not None:
            await close()
