"""The cache of results (sizes, verify, prune), and what this machine supports."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fsdptool.cache import Store
from fsdptool.errors import ConfigError
from fsdptool.web.forms import Field, FieldKind, parse
from fsdptool.web.jobs import JobState
from fsdptool.web.page import Page, render, services
from fsdptool.web.source_view import address_of

page = Page(
    "Cache and doctor",
    "/cache",
    "What this machine supports, what the cache of results holds, and calibration to measured runs.",
)
_SHOWN_ENTRIES = 100


KIND_WORDS = {
    "anatomy": "inspected models",
    "batch": "shapes of micro-batches",
    "sample": "sizes of samples",
    "trace": "traced steps",
    "refusal": "models that cannot be traced",
    "reserved": "reserved peaks of the allocator",
    "trained": "models with adapters",
}
"""What the kinds of entries hold, in words."""


@dataclass(slots=True)
class KindTotal:
    """Entries of one kind. ``bytes`` is their size."""

    kind: str
    entries: int = 0
    bytes: int = 0

    @property
    def words(self) -> str:
        """What the entries hold."""
        return KIND_WORDS.get(self.kind, self.kind)


async def show(request: Request) -> Response:
    """Return the page, or prune the cache."""
    if request.method != "POST":
        return await run_in_threadpool(_page, request, _prune_fields({}))
    form = {key: value for key, value in (await request.form()).items() if isinstance(value, str)}
    return await run_in_threadpool(_prune, request, form)


def _page(request: Request, fields: tuple[Field, ...]) -> Response:
    query = request.query_params
    probe = query.get("probe") == "yes"
    job = services(request).jobs.submit("examine_machine", {"probe": probe})
    state = job.state
    store = Store()
    entries = store.entries()
    kinds: dict[str, KindTotal] = {}
    for entry in entries:
        total = kinds.setdefault(entry.kind, KindTotal(entry.kind))
        total.entries, total.bytes = total.entries + 1, total.bytes + entry.bytes
    verify = query.get("verify") == "yes"
    document: dict[str, Any] = job.result if state is JobState.DONE else {}
    return render(
        request,
        "cache.html",
        page=page,
        command=("fsdptool", "doctor", *(() if probe else ("--no-probe",))),
        status=400 if any(field.error for field in fields) else 200,
        refresh=not state.ended,
        examining=not state.ended,
        job=job,
        probe=probe,
        probe_address=address_of(page.path, probe="yes"),
        document=document,
        plugins=_by_origin(document),
        folder=store.folder,
        total=sum(entry.bytes for entry in entries),
        kinds=sorted(kinds.values(), key=lambda item: -item.bytes),
        entries=entries[:_SHOWN_ENTRIES],
        kind_words=KIND_WORDS,
        count=len(entries),
        report=store.verify() if verify else None,
        verify_address=address_of(page.path, probe="yes" if probe else "", verify="yes") + "#cache",
        fields=fields,
        pruned=_number(query.get("pruned")),
        freed=_number(query.get("freed")),
        failed=_number(query.get("failed")),
    )


def _prune(request: Request, form: dict[str, str]) -> Response:
    values, fields = parse(_prune_fields(form))
    if any(field.error for field in fields):
        return _page(request, fields)
    mib = values.get("max_mib")
    report = Store().prune(
        older_than_days=values.get("older_than"), max_bytes=int(mib * 2**20) if mib is not None else None
    )
    address = address_of(
        page.path, pruned=report.removed, freed=report.bytes, failed=len(report.failed or ()) or None
    )
    return RedirectResponse(f"{address}#cache", 303)


def _prune_fields(values: dict[str, str]) -> tuple[Field, ...]:
    return (
        Field(
            "older_than",
            "Older than (days)",
            FieldKind.DECIMAL,
            help="Remove entries older than this.",
            value=values.get("older_than", ""),
            minimum=0,
            maximum=1e6,
        ),
        Field(
            "max_mib",
            "Largest size (MiB)",
            FieldKind.DECIMAL,
            help="Keep the newest entries up to this size.",
            value=values.get("max_mib", ""),
            minimum=0,
            maximum=1e12,
        ),
    )


def _by_origin(document: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the installed model families by the package that they come from."""
    origins: dict[str, list[str]] = defaultdict(list)
    for plugin in document.get("plugins", ()):
        origins[plugin["origin"]].append(plugin["family"])
    return sorted(origins.items())


def _number(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > 18:
        raise ConfigError(f"{text!r} is not a whole number", help="open the page from the menu")
    return int(text)


routes = [Route(page.path, show, methods=["GET", "POST"])]
