"""Background jobs: their progress as a stream of events, cancelling them, and asking again after an error."""

from __future__ import annotations

from collections.abc import AsyncIterator
from html import escape

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fsdptool.formatting import printable
from fsdptool.web.jobs import WebJob
from fsdptool.web.page import return_address, services


async def events(request: Request) -> Response:
    """Stream ``progress`` while a job lasts, and ``ended`` when the page should be loaded again."""
    job = services(request).jobs.get(request.path_params["job"])

    async def source() -> AsyncIterator[tuple[str, str]]:
        if job is None:
            # Cancelled by the page before this one, before this one listened: loaded again, it asks again.
            yield "ended", ""
            return
        changes = job.changes()
        try:
            async for state, progress in changes:
                yield ("ended", "") if state.ended else ("progress", escape(printable(progress)))
        finally:
            # The browser has left the page.
            await changes.aclose()
            services(request).jobs.abandon(job)

    return services(request).streams.respond(source())


async def cancel(request: Request) -> Response:
    """Cancel a job and return to the page that asked."""
    services(request).jobs.cancel(_job(request))
    return await _back(request)


async def forget(request: Request) -> Response:
    """Forget the answer of a job, so that the page asks again."""
    services(request).jobs.forget(_job(request))
    return await _back(request)


def _job(request: Request) -> WebJob:
    job = services(request).jobs.get(request.path_params["job"])
    if job is None:
        raise HTTPException(404, "this job has ended, and its answer was dropped")
    return job


async def _back(request: Request) -> Response:
    return RedirectResponse(return_address(await request.form()), 303)


routes = [
    Route("/jobs/{job}/events", events),
    Route("/jobs/{job}/cancel", cancel, methods=["POST"]),
    Route("/jobs/{job}/forget", forget, methods=["POST"]),
]
