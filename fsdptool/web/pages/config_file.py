"""One configuration: what takes effect and why, findings beside the lines, fixes one by one, migration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fsdptool.config.dialects import known_programs, load_registry
from fsdptool.config.lint_settings import selector_of
from fsdptool.config.migrate import Migrated, migrate_file, repair, repair_selected
from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.text import SourceText
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.web.changes import FileChange, target_of
from fsdptool.web.forms import Field, FieldKind
from fsdptool.web.judging import JudgedFile, RootedLinter, judge_file
from fsdptool.web.page import render, services
from fsdptool.web.pages.configs import FILE
from fsdptool.web.pages.configs import page as configs
from fsdptool.web.roots import Roots
from fsdptool.web.source_view import (
    DiffLine,
    address_of,
    command_path,
    diff_lines,
    effective_rows,
    source_view,
)

SAFE, UNSAFE, MIGRATE = "safe", "unsafe", "migrate"
"""What ``change`` may be besides the key of one finding."""

_JUDGED = ("consumer", "target", "dialect")


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change that the page shows, before it is written.

    Attributes:
        title: What it does.
        change: The file before and after; None if the change cannot be made.
        after: The new text.
        notes: What else to know.
        refusal, help: Why it cannot be made, and what to do instead.
        command: The command that makes the same change.
    """

    title: str
    change: FileChange | None
    after: str
    notes: tuple[str, ...] = ()
    refusal: str = ""
    help: str = ""
    command: tuple[str, ...] = ()


async def show(request: Request) -> Response:
    """Return the page of a file, or write the change that it shows."""
    if request.method != "POST":
        return await run_in_threadpool(_page, request, dict(request.query_params))
    form = {key: value for key, value in (await request.form()).items() if isinstance(value, str)}
    return await run_in_threadpool(_write, request, form)


def _page(request: Request, query: Mapping[str, str], error: FsdptoolError | None = None) -> Response:
    roots = services(request).roots
    judged = {name: value for name in _JUDGED if (value := query.get(name, "").strip())}
    linter = RootedLinter(roots)
    item = judge_file(roots, query.get("file", ""), judged, linter)
    chosen = query.get("change", "")
    state = {"file": item.name, **judged}
    proposal = _proposal(item, linter, chosen, judged) if chosen else None
    rewritten = _rewritten(item, query, judged)
    path = command_path(item.path)
    options = [word for name, value in judged.items() for word in (f"--{name}", value)]
    return render(
        request,
        "config_file.html",
        page=configs,
        command=proposal.command if proposal is not None else ("fsdptool", "validate", *options, path),
        status=409 if error is not None else 200,
        item=item,
        reading=item.reading,
        state=state,
        view=source_view(item.reading, partial(_address, state), chosen),
        settings=effective_rows(item.reading),
        fields=_fields(judged),
        proposal=proposal,
        changed_lines=_changed_lines(item, proposal),
        rewritten=rewritten,
        to=query.get("to", ""),
        dialects=load_registry().names,
        download=address_of("/configs/download", **state, to=query.get("to", "")),
        convert=("fsdptool", "migrate", *_only(judged, "dialect"), "--to", query.get("to", ""), path),
        links={name: _link(state, name) for name in (SAFE, UNSAFE, MIGRATE)},
        folder=address_of(configs.path, folder=item.name.rpartition("/")[0]),
        chosen=chosen,
        error=error,
        written=query.get("written", ""),
        explain=("fsdptool", "explain", *options, path),
        safe=sum(f.fix is not None and f.fix.safe for f in item.reading.diagnostics),
        unsafe=sum(f.fix is not None and not f.fix.safe for f in item.reading.diagnostics),
    )


def _write(request: Request, form: Mapping[str, str]) -> Response:
    """Write the change that was shown, or show what it would be now."""
    roots = services(request).roots
    judged = {name: value for name in _JUDGED if (value := form.get(name, "").strip())}
    linter = RootedLinter(roots)
    item = judge_file(roots, form.get("file", ""), judged, linter)
    target_of(roots, item.name)
    try:
        proposal = _proposal(item, linter, form.get("change", ""), judged)
        if proposal.change is None:
            raise ConfigError(proposal.refusal, help=proposal.help or None)
        proposal.change.write(form.get("shown", ""))
    except FsdptoolError as error:
        return _page(request, form, error)
    address = address_of(FILE, file=item.name, written=proposal.title, **judged)
    return RedirectResponse(address, 303)


def _proposal(item: JudgedFile, linter: RootedLinter, chosen: str, judged: Mapping[str, str]) -> Proposal:
    """Return what a change would do to the file.

    Args:
        item: The file.
        linter: The project's settings, which decide what is fixed.
        chosen: ``safe``, ``unsafe``, ``migrate`` or the key of a finding.
        judged: How the file is judged.
    """
    path = command_path(item.path)
    options = tuple(word for name, value in judged.items() for word in (f"--{name}", value))
    source = item.reading.source
    if source is None or item.data is None:
        return Proposal("Change", None, "", refusal="the file cannot be read")
    propose = partial(_proposed, item, source)
    if chosen == MIGRATE:
        command = ("fsdptool", "migrate", *_only(judged, "dialect"), path)
        return _migration(item, source, judged, command)
    if item.reading.dialect is None:
        return Proposal("Fix", None, "", refusal="the file was not recognised, so it cannot be fixed")
    if chosen in (SAFE, UNSAFE):
        unsafe = chosen == UNSAFE
        codes = linter.codes(item.path)
        repaired = repair(item.whole, unsafe=unsafe, only=codes)
        title = "All fixes" if unsafe else "All safe fixes"
        flag = "--unsafe-fixes" if unsafe else "--fix"
        notes = tuple(f"{done.code}: {done.description}" for done in repaired.applied)
        return propose(title, repaired.after, notes, ("fsdptool", "validate", *options, flag, path))
    found = next((f for f in item.reading.diagnostics if str(selector_of(f)) == chosen and f.fix), None)
    if found is None or found.fix is None:
        return Proposal("Fix", None, "", refusal="this finding is gone: the file has changed")
    repaired = repair_selected(item.reading, [selector_of(found)], unsafe=not found.fix.safe)
    flag = "--fix" if found.fix.safe else "--unsafe-fixes"
    command = ("fsdptool", "validate", *options, flag, "--only", chosen, path)
    return propose(f"Fix {found.code}: {found.fix.description}", repaired.after, (), command)


def _proposed(
    item: JudgedFile,
    source: SourceText,
    title: str,
    after: SourceText,
    notes: tuple[str, ...],
    command: tuple[str, ...],
) -> Proposal:
    if after.text == source.text:
        return Proposal(
            title, None, "", refusal="nothing can be changed: the form of the file does not allow it"
        )
    return Proposal(
        title, FileChange(item.path, item.data, after.encode()), after.text, notes, command=command
    )


def _migration(
    item: JudgedFile, source: SourceText, judged: Mapping[str, str], command: tuple[str, ...]
) -> Proposal:
    result = migrate_file(
        item.path, dialect=judged.get("dialect"), source=source, files=item.whole.conditions.files
    )
    title = "Migrate to FSDP2"
    if result.after is None:
        return Proposal(title, None, "", refusal=result.refusal or "", help=result.help or "")
    if not result.changed:
        return Proposal(title, None, "", result.notes, refusal="the file is already up to date")
    change = FileChange(item.path, item.data, result.encoded)
    return Proposal(title, change, result.after, result.notes, command=command)


def _rewritten(item: JudgedFile, query: Mapping[str, str], judged: Mapping[str, str]) -> Migrated | None:
    """Return the file in another dialect, if one is chosen."""
    to = query.get("to", "")
    if not to or item.reading.source is None:
        return None
    load_registry().get(to)
    return migrate_file(item.path, to=to, dialect=judged.get("dialect"), source=item.reading.source)


def _changed_lines(item: JudgedFile, proposal: Proposal | None) -> tuple[DiffLine, ...]:
    source = item.reading.source
    if proposal is None or proposal.change is None or source is None:
        return ()
    return diff_lines(source, proposal.after, item.name)


def _fields(judged: Mapping[str, str]) -> tuple[Field, ...]:
    """Return the fields that choose how the file is judged."""
    return (
        Field(
            "consumer",
            "Read by",
            help="The program that reads the file.",
            choices=tuple(known_programs()),
            value=judged.get("consumer", ""),
            empty="(the file's own program)",
        ),
        Field(
            "target",
            "Version",
            FieldKind.TEXT,
            help="Version to judge for.",
            value=judged.get("target", ""),
            placeholder="accelerate==1.15",
        ),
        Field(
            "dialect",
            "Dialect",
            choices=load_registry().names,
            value=judged.get("dialect", ""),
            help="What the file is written in.",
            empty="(by its content)",
        ),
    )


def _address(state: Mapping[str, str], item: Diagnostic) -> str:
    return _link(state, str(selector_of(item)))


def _link(state: Mapping[str, str], change: str) -> str:
    return address_of(FILE, **state, change=change) + "#change"


def _only(judged: Mapping[str, str], name: str) -> tuple[str, ...]:
    return (f"--{name}", judged[name]) if name in judged else ()


def download(request: Request) -> Response:
    """Return a file in another dialect as a download."""
    roots: Roots = services(request).roots
    query = request.query_params
    judged = {name: value for name in _JUDGED if (value := query.get(name, "").strip())}
    item = judge_file(roots, query.get("file", ""), judged)
    result = _rewritten(item, query, judged)
    if result is None or result.after is None:
        reason = result.refusal if result is not None else "no dialect is chosen"
        raise ConfigError(str(reason), help="choose a dialect on the page of the file")
    return attachment(result.after, f"{item.path.stem}-{query['to']}{item.path.suffix}")


def attachment(text: str, name: str) -> Response:
    """Return a text as a file that browsers save."""
    safe = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "-_.") else "_" for letter in name
    )
    headers = {"content-disposition": f'attachment; filename="{safe}"'}
    return Response(text, media_type="text/plain; charset=utf-8", headers=headers)


routes = [Route(FILE, show, methods=["GET", "POST"]), Route("/configs/download", download)]
