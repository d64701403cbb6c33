"""Write a plan's or preset's configuration: the difference and the findings first, then the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fsdptool.api.emit_config import PRESETS
from fsdptool.config.dialects import load_registry
from fsdptool.config.migrate import write_across
from fsdptool.config.reader import read_settings
from fsdptool.config.result import Reading
from fsdptool.config.writer import merge_into
from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.text import SourceText, UnreadableError, decode
from fsdptool.records.advice import Suggestion
from fsdptool.records.codec import from_json
from fsdptool.records.plan import Plan
from fsdptool.records.sharding import FsdpSettings
from fsdptool.report import plan_words as words
from fsdptool.report.page.plan import Links, changes_section
from fsdptool.spelling import PRECISIONS
from fsdptool.web import references
from fsdptool.web.changes import FileChange, content_of, target_of
from fsdptool.web.forms import Field, FieldKind, parse
from fsdptool.web.jobs import JobState, WebJob
from fsdptool.web.page import Page, Services, group_of, render, services
from fsdptool.web.pages.config_file import attachment
from fsdptool.web.pages.configs import FILE
from fsdptool.web.plans import Question, changed_values, read_question
from fsdptool.web.plans import submit as submit_plan
from fsdptool.web.source_view import (
    DiffLine,
    SourceView,
    address_of,
    command_path,
    diff_lines,
    source_view,
)

QUICK_SECONDS = 0.25
"""Answers that come within this time are shown at once."""

PLANNED = ("gpu", "gpus", "clusters", "profile", "recipe", "config")
"""Options of ``plan`` whose presence makes a question one for a plan: hardware, or whole files."""


@dataclass(frozen=True, slots=True)
class EmissionSource:
    """What settings come from.

    Attributes:
        values: The parameters of an address that name it.
        title: What it is, for people.
        fields: Fields of the form for presets and saved plans, with what is wrong beside them.
        arguments: Of the task; None while nothing is named.
        question: The plan to make first, or None.
        commands: The commands that print the accelerate file; the last one is ``emit-config``.
        edit: Address of the page where it can be changed; empty for this page's own form.
    """

    values: Mapping[str, str]
    title: str
    fields: tuple[Field, ...]
    arguments: Mapping[str, Any] | None = None
    question: Question | None = None
    commands: tuple[tuple[str, ...], ...] = ()
    edit: str = ""

    @property
    def given(self) -> bool:
        """Whether there is something to write."""
        return self.arguments is not None or self.question is not None


def read_source_of(shared: Services, query: Mapping[str, str]) -> EmissionSource:
    """Return what the parameters of an address name.

    Raises:
        ConfigError: A path is outside of the folders, or the question of a plan is incomplete.
    """
    fields = _asked_fields(query)
    if query.get("plan_file", "").strip():
        return _saved_plan(shared, query, fields)
    if not query.get("preset") and any(query.get(name, "").strip() for name in PLANNED):
        return _plan(shared, query, fields)
    return _preset(shared, fields)


def submit(request: Request, source: EmissionSource) -> WebJob:
    """Return the job that prepares the settings, or that of the plan that must be made first.

    Raises:
        BusyError: Too many questions wait.
        ConfigError: Nothing is named.
    """
    shared = services(request)
    arguments = source.arguments
    if source.question is not None:
        plan = submit_plan(shared, source.question, group=group_of(request, "apply-plan"))
        plan.wait(QUICK_SECONDS)
        if plan.state is not JobState.DONE:
            return plan
        arguments = {"plan": plan.result, "candidate": source.values.get("candidate") or None}
    if arguments is None:
        raise ConfigError(
            "no plan or preset is selected", help="choose a preset, or open this page from a plan"
        )
    job = shared.jobs.submit("emit", arguments, group=group_of(request, "apply"))
    job.wait(QUICK_SECONDS)
    return job


def _plan(shared: Services, query: Mapping[str, str], fields: tuple[Field, ...]) -> EmissionSource:
    question = read_question(shared, query)
    if not question.complete:
        wrong = next((field for field in question.fields if field.error), None)
        reason = f"{wrong.label}: {wrong.error}" if wrong is not None else "the plan does not name a model"
        raise question.error or ConfigError(reason, help="open this page from a plan")
    candidate = query.get("candidate", "").strip()
    chosen = ("--candidate", candidate) if candidate else ()
    values = {**question.query, "candidate": candidate}
    model = question.options.get("reference") or question.options.get("recipe")
    title = f"the plan of {model}"
    if "gpu" in question.options:
        nodes = question.options.get("nodes", 1)
        title += f" on {nodes * question.options.get('gpus', 1)} x {question.options['gpu']}"
    return EmissionSource(
        values,
        title,
        fields,
        question=question,
        commands=(
            (*question.command, "-o", "plan.json"),
            ("fsdptool", "emit-config", "--plan", "plan.json", *chosen),
        ),
        edit="/plan",
    )


def _saved_plan(shared: Services, query: Mapping[str, str], fields: tuple[Field, ...]) -> EmissionSource:
    path = shared.roots.resolve(query["plan_file"].strip())
    candidate = query.get("candidate", "").strip()
    name = shared.roots.name_of(path)
    chosen = ("--candidate", candidate) if candidate else ()
    arguments = {
        "plan_file": str(path),
        "candidate": candidate or None,
        "stamps": references.stamp(str(path)),
    }
    command = ("fsdptool", "emit-config", "--plan", command_path(path), *chosen)
    return EmissionSource(
        {"plan_file": name, "candidate": candidate}, name, fields, arguments, commands=(command,)
    )


def _preset(shared: Services, fields: tuple[Field, ...]) -> EmissionSource:
    values, fields = parse(fields)
    texts = {field.name: field.value for field in fields if field.value}
    wrong = any(field.error for field in fields)
    if wrong or not ("preset" in values or "reference" in values):
        return EmissionSource(texts, "", fields)
    names = ("preset", "processes", "nodes", "precision")
    options: dict[str, Any] = {name: values.get(name) for name in names}
    stamps: object = None
    words = ["fsdptool", "emit-config"]
    if "reference" in values:
        reference = references.allowed(shared.roots, values["reference"])
        stamps = references.stamp(reference)
        options["reference"] = reference
        words.append(reference)
    options["preset"] = options["preset"] or "single-node"
    words += ["--preset", options["preset"]]
    for name in ("processes", "nodes", "precision"):
        words += [f"--{name}", str(values[name])] if name in values else []
    title = f"the preset {options['preset']}"
    title += f" for {values['reference']}" if "reference" in values else ""
    return EmissionSource(
        texts, title, fields, {"options": options, "stamps": stamps}, commands=(tuple(words),)
    )


def _asked_fields(query: Mapping[str, str]) -> tuple[Field, ...]:
    fields = (
        Field("preset", "Preset", choices=tuple(PRESETS), empty="(choose one)"),
        Field(
            "reference",
            "Model",
            help="Its wrap classes are written. Without a model, the file leaves them out.",
            suggestions=references.known(),
        ),
        Field("processes", "Processes", FieldKind.WHOLE, help="Total number of processes.", minimum=1),
        Field("nodes", "Nodes", FieldKind.WHOLE, minimum=1),
        Field("precision", "Precision", choices=tuple(PRECISIONS)),
    )
    return tuple(replace(field, value=query.get(field.name, "").strip()) for field in fields)


page = Page("Apply", "/apply", "Write the configuration of a plan: see the difference and findings first.")
DOWNLOAD = "/apply/download"
MERGE, REPLACE = "merge", "replace"
_OWN = ("target", "dialect", "mode")


@dataclass(frozen=True, slots=True)
class ApplyOutcome:
    """What would be written.

    Attributes:
        text: The new text.
        name: What the file is called.
        reading: The text as its program reads it.
        view: Its lines with findings.
        changed_lines: The difference; empty without a target, or if nothing changes.
        change: The file before and after; None without a target.
        notes: What else to know.
        commands: The commands that do the same.
        config_page: Address of the target under Configs; empty for a new file.
    """

    text: str
    name: str
    reading: Reading
    view: SourceView
    changed_lines: tuple[DiffLine, ...]
    change: FileChange | None
    notes: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    config_page: str


@dataclass(frozen=True, slots=True)
class Unfit:
    """A plan in which nothing fits.

    Attributes:
        headline: Its verdict.
        reasons: Why nothing fits, one line each.
        changes: The suggestions, as HTML; those that controls can express lead to this page with the change.
        anyway: Address that writes the requested configuration nevertheless.
    """

    headline: str
    reasons: tuple[str, ...]
    changes: Markup
    anyway: str


async def show(request: Request) -> Response:
    """Return the page, or write the file that it shows."""
    if request.method != "POST":
        return await run_in_threadpool(_page, request, dict(request.query_params))
    form = {key: value for key, value in (await request.form()).items() if isinstance(value, str)}
    return await run_in_threadpool(_write, request, form)


def _page(request: Request, query: Mapping[str, str], error: FsdptoolError | None = None) -> Response:
    shared = services(request)
    own = {name: query.get(name, "").strip() for name in _OWN}
    status = 409 if error is not None else 200
    outcome: ApplyOutcome | None = None
    source: EmissionSource | None = None
    job: WebJob | None = None
    unfit: Unfit | None = None
    ready = False
    try:
        source = read_source_of(shared, query)
        job = submit(request, source) if source.given else None
        ready = job is not None and _is_ready(job)
        if job is not None and ready:
            unfit = _unfit(source, job.result.get("unfit"))
            if unfit is None:
                outcome = _outcome(shared, source, job.result, own)
    except FsdptoolError as problem:
        error, status = error or problem, max(status, 400)
    failed = job is not None and job.state is JobState.FAILED
    if job is not None and failed and error is None:
        error, status = job.error, 400
    if source is not None and any(field.error for field in source.fields):
        status = 400
    values = source.values if source is not None else {}
    state = {**values, **own}
    # One that has ended since it was looked at is still waited for: its stream loads the page again at once.
    waiting = job is not None and not (ready or failed)
    result: Mapping[str, Any] = job.result if outcome is not None and job is not None else {}
    return render(
        request,
        "apply.html",
        page=page,
        status=status,
        refresh=waiting,
        waiting=waiting,
        address=address_of(page.path, **state, written=query.get("written", "")),
        source=source,
        values={name: value for name, value in values.items() if value},
        job=job,
        error=error,
        outcome=outcome,
        unfit=unfit,
        result=result,
        state={name: value for name, value in state.items() if value},
        fields=_fields(shared, own),
        dialect=own["dialect"] or "accelerate",
        download=address_of(DOWNLOAD, **state),
        recipe=address_of(DOWNLOAD, **state, part="recipe"),
        written=query.get("written", ""),
        presets=PRESETS,
    )


def _is_ready(job: WebJob) -> bool:
    """Return whether the settings are known; before them comes the plan."""
    return job.task == "emit" and job.state is JobState.DONE


def _unfit(source: EmissionSource, document: Mapping[str, Any] | None) -> Unfit | None:
    """Return what to say about a plan without a chosen configuration; None for any other."""
    if document is None:
        return None
    plan = from_json(Plan, document)
    start = words.start_of_changes(plan).settings

    def change(suggestion: Suggestion) -> str | None:
        values = changed_values(start, suggestion) if source.question is not None else None
        return address_of(page.path, **{**source.values, **values, "search": "no"}) if values else None

    return Unfit(
        words.headline(plan),
        tuple(words.shortfall(plan)),
        Markup(changes_section(plan, Links(change=change))),
        address_of(page.path, **{**source.values, "candidate": words.shown(plan).id}),
    )


def _outcome(
    shared: Services, source: EmissionSource, result: Mapping[str, Any], own: Mapping[str, str]
) -> ApplyOutcome:
    """Return what an emission would write.

    Raises:
        ConfigError: The dialect cannot express the settings, or the target cannot be merged into.
    """
    document = result["document"]
    settings = from_json(FsdpSettings, document["settings"])
    dialect = own["dialect"] or "accelerate"
    path = target_of(shared.roots, own["target"]) if own["target"] else None
    before = content_of(path) if path is not None else None
    text: str = document["text"]
    notes: tuple[str, ...] = ()
    if dialect != "accelerate":
        load_registry().get(dialect)
        title = f"Written by fsdptool for {document['reference']}." if document["reference"] else ""
        text, notes = write_across(settings, dialect, header=(title or "Written by fsdptool.",))
    name = shared.roots.name_of(path) if path is not None else _default_name(dialect)
    old = _decoded(before, name)
    encoded = text.encode()
    if before is not None and own["mode"] != REPLACE:
        if dialect != "accelerate":
            raise ConfigError(
                f"{name} exists, and only accelerate files are merged into",
                help="choose a new file, or to replace the file",
            )
        text = merge_into(old, settings).after
        encoded = old.encode(text)
    reading = read_settings(SourceText(text, name), dialect=dialect if dialect != "accelerate" else None)
    return ApplyOutcome(
        text=text,
        name=name,
        reading=reading,
        view=source_view(reading),
        changed_lines=diff_lines(old, text, name) if path is not None else (),
        change=FileChange(path, before, encoded) if path is not None else None,
        notes=tuple(notes),
        commands=_commands(source, dialect, path, before is not None, own["mode"] == REPLACE),
        config_page=address_of(FILE, file=name) if before is not None else "",
    )


def _decoded(data: bytes | None, name: str) -> SourceText:
    try:
        return decode(data or b"", name)
    except UnreadableError as error:
        raise ConfigError(f"{name}: {error.message}", help="choose another file") from error


def _default_name(dialect: str) -> str:
    return "accelerate.yaml" if dialect == "accelerate" else f"{dialect}.yaml"


def _commands(
    source: EmissionSource, dialect: str, path: Path | None, exists: bool, replaces: bool
) -> tuple[tuple[str, ...], ...]:
    """Return the commands that write the same file."""
    first, emit = source.commands[:-1], source.commands[-1]
    target = (command_path(path),) if path is not None else ()
    force = ("--force",) if exists and replaces else ()
    if dialect == "accelerate":
        if path is None:
            return (*first, emit)
        return (
            *first,
            (*emit, "--into", *target) if exists and not replaces else (*emit, "-o", *target, *force),
        )
    output = ("-o", *target, *force) if path is not None else ()
    emitted = (*emit, "-o", "accelerate.yaml")
    return (*first, emitted, ("fsdptool", "migrate", "accelerate.yaml", "--to", dialect, *output))


def _write(request: Request, form: Mapping[str, str]) -> Response:
    shared = services(request)
    own = {name: form.get(name, "").strip() for name in _OWN}
    try:
        source = read_source_of(shared, form)
        job = submit(request, source)
        if not _is_ready(job) or "unfit" in job.result:
            # The answer was dropped meanwhile; the page works it out again.
            return RedirectResponse(address_of(page.path, **source.values, **own), 303)
        change = _outcome(shared, source, job.result, own).change
        if change is None:
            raise ConfigError("no file is chosen", help="choose the file to write")
        change.write(form.get("shown", ""))
    except FsdptoolError as error:
        return _page(request, form, error)
    return RedirectResponse(address_of(page.path, **source.values, **own, written=own["target"]), 303)


def _fields(shared: Services, own: Mapping[str, str]) -> tuple[Field, ...]:
    fields = (
        Field("dialect", "Dialect", choices=load_registry().names, empty="(accelerate)"),
        Field(
            "target",
            "File",
            help="A new file, or an accelerate file to merge into.",
            suggestions=tuple(shared.roots.files((".yaml", ".yml"), limit=200)),
            placeholder=f"{next(iter(shared.roots.folders))}/accelerate.yaml",
        ),
        Field(
            "mode",
            "If the file exists",
            help="Merging keeps comments, order and other keys.",
            choices=(MERGE, REPLACE),
            empty="(merge)",
        ),
    )
    return tuple(replace(field, value=own[field.name]) for field in fields)


def download(request: Request) -> Response:
    """Return the text, or the recipe of the plan, as a file; before there is one, the page that makes it."""
    shared, query = services(request), request.query_params
    own = {name: query.get(name, "").strip() for name in _OWN}
    source = read_source_of(shared, query)
    job = submit(request, source)
    job.wait(QUICK_SECONDS)
    if not _is_ready(job) or "unfit" in job.result:
        return RedirectResponse(address_of(page.path, **source.values, **own), 303)
    if query.get("part") == "recipe":
        return attachment(job.result["recipe"] or "", "recipe.yaml")
    outcome = _outcome(shared, source, job.result, own)
    return attachment(outcome.text, outcome.name.rpartition("/")[2])


routes = [Route(page.path, show, methods=["GET", "POST"]), Route(DOWNLOAD, download)]
