"""What the page Apply writes: from a plan, a saved plan, or a preset for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from fsdptool.api.emit_config import PRESETS
from fsdptool.errors import ConfigError
from fsdptool.spelling import PRECISIONS
from fsdptool.web import references
from fsdptool.web.forms import Field, FieldKind, parse
from fsdptool.web.jobs import Job, JobState
from fsdptool.web.page import Services, group_of, services
from fsdptool.web.plans import Question, read_question
from fsdptool.web.plans import submit as submit_plan
from fsdptool.web.source_view import command_path

QUICK_SECONDS = 0.25
"""Answers that come within this time are shown at once."""

PLANNED = ("gpu", "gpus", "clusters", "profile", "recipe", "config")
"""Options of ``plan`` whose presence makes a question one for a plan: hardware, or whole files."""


@dataclass(frozen=True, slots=True)
class Source:
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


def read_source_of(shared: Services, query: Mapping[str, str]) -> Source:
    """Return what the parameters of an address name.

    Raises:
        ConfigError: A path is outside of the folders, or the question of a plan is incomplete.
    """
    fields = _fields(query)
    if query.get("plan_file", "").strip():
        return _saved_plan(shared, query, fields)
    if not query.get("preset") and any(query.get(name, "").strip() for name in PLANNED):
        return _plan(shared, query, fields)
    return _preset(shared, query, fields)


def submit(request: Request, source: Source) -> Job:
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
    job = shared.jobs.submit("apply:emit", arguments, group=group_of(request, "apply"))
    job.wait(QUICK_SECONDS)
    return job


def _plan(shared: Services, query: Mapping[str, str], fields: tuple[Field, ...]) -> Source:
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
    return Source(
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


def _saved_plan(shared: Services, query: Mapping[str, str], fields: tuple[Field, ...]) -> Source:
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
    return Source({"plan_file": name, "candidate": candidate}, name, fields, arguments, commands=(command,))


def _preset(shared: Services, query: Mapping[str, str], fields: tuple[Field, ...]) -> Source:
    values, fields = parse(fields)
    texts = {field.name: field.value for field in fields if field.value}
    wrong = any(field.error for field in fields)
    if wrong or not ("preset" in values or "reference" in values):
        return Source(texts, "", fields)
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
    return Source(texts, title, fields, {"options": options, "stamps": stamps}, commands=(tuple(words),))


def _fields(query: Mapping[str, str]) -> tuple[Field, ...]:
    fields = (
        Field("preset", "Preset", choices=tuple(PRESETS), empty="(none)"),
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
