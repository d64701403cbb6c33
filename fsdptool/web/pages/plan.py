"""The page of a plan: verdict, memory over a step, phases, the front of memory against speed, suggestions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from fsdptool.errors import FsdptoolError
from fsdptool.planning.plan import own_plan
from fsdptool.records.advice import Suggestion
from fsdptool.records.plan import Candidate, Plan
from fsdptool.report import plan_words as words
from fsdptool.report.page.plan import Links, candidates_section, findings_section, plan_parts
from fsdptool.web import plans
from fsdptool.web.forms import with_error
from fsdptool.web.jobs import JobState, WebJob
from fsdptool.web.page import Page, group_of, render, services
from fsdptool.web.plans import Question

page = Page("Plan", "/plan", "Memory of every rank, whether it fits, and the fastest settings that fit.")

QUICK_SECONDS = 0.25
"""Answers that come within this time are shown at once."""
ANSWER = "#answer"
"""Where a link to another position leads: on a narrow screen the controls fill several screens above it."""


@dataclass(frozen=True, slots=True)
class _Front:
    """The search that a configuration was picked from.

    Attributes:
        query: The parameters of its address, as one text.
        question: The search.
        job: What answers it; None where it is the page's own question.
    """

    query: str
    question: Question
    job: WebJob | None


def show(request: Request) -> Response:
    """Answer ``/plan?reference=…&gpu=…``; ``front`` is the search that a point was picked from."""
    shared, query = services(request), request.query_params
    question = plans.read_question(shared, query)
    common: dict[str, Any] = {"page": page, "question": question, "panels": question.panels(), "front": ""}
    if not question.complete:
        wrong = bool(question.options)
        error: dict[str, Any] = {"error": question.error} if question.error is not None else {}
        return render(request, "plan.html", status=400 if wrong else 200, **error, **common)
    try:
        job = plans.submit(shared, question, group=group_of(request, "plan"))
        front = _front(request, question)
    except FsdptoolError as error:
        return render(request, "plan.html", status=400, error=error, **common)
    common["command"] = question.command
    common["front"] = front.query if front.job is not None else ""
    more = {"front": front.query} if front.job is not None else {}
    common["address"] = plans.address(question.query, **more)
    job.wait(QUICK_SECONDS)
    if job.state is JobState.FAILED and job.error is not None:
        fields, _ = with_error(question.fields, job.error)
        common["panels"] = Question(fields, {}, {}).panels()
        return render(request, "plan.html", status=400, error=job.error, job=job, **common)
    if job.state is not JobState.DONE:
        return render(request, "plan.html", job=job, refresh=True, **common)
    return _answer(request, question, own_plan(job.result), front, common)


def _front(request: Request, question: Question) -> _Front:
    text = request.query_params.get("front", "")
    values = dict(parse_qsl(text, max_num_fields=100))
    if not values:
        return _Front(urlencode(question.query), question, None)
    asked = plans.read_question(services(request), values)
    if not asked.complete:
        return _Front(urlencode(question.query), question, None)
    return _Front(text, asked, plans.submit(services(request), asked, group=group_of(request, "front")))


def _answer(
    request: Request, question: Question, plan: Plan, front: _Front, common: dict[str, Any]
) -> Response:
    base = front.question.query

    def pick(candidate: Candidate) -> str | None:
        if candidate.settings.cluster:
            return None
        values = {**_without(base), **plans.point_values(candidate.settings), "search": "no"}
        return plans.address(values, front=front.query) + ANSWER

    def change(suggestion: Suggestion) -> str | None:
        values = plans.changed_values(words.start_of_changes(plan).settings, suggestion)
        if values is None:
            return None
        return (
            plans.address({**_without(question.query), **values, "search": "no"}, front=front.query) + ANSWER
        )

    marked = words.shown(plan).settings
    links = Links(candidate=pick, change=change, marked=marked, cursor=True, others=False)
    parts = {name: Markup(text) for name, text in plan_parts(plan, links).items()}
    searched: Plan | None = plan
    if front.job is not None:
        front.job.wait(QUICK_SECONDS)
        searched = own_plan(front.job.result) if front.job.state is JobState.DONE else None
    candidates = candidates_section(searched, links) if searched is not None else ""
    return render(
        request,
        "plan.html",
        parts=parts,
        applicable=plan.chosen is not None,
        headline=words.headline(plan),
        candidates=Markup(candidates),
        findings=Markup(findings_section(plan)),
        front_job=front.job if searched is None else None,
        refresh=searched is None,
        search=plans.address({**_without(question.query), "search": "yes"}),
        back=f"/plan?{front.query}" if front.job is not None else "",
        download=f"/plan/plan.json?{urlencode(question.query)}",
        **common,
    )


def _without(query: Mapping[str, str]) -> dict[str, str]:
    """Return a question without how to search."""
    return {name: value for name, value in query.items() if name not in ("search", "max_batch")}


def download(request: Request) -> Response:
    """Return ``plan.json``; before the plan is made, the page that makes it."""
    shared = services(request)
    question = plans.read_question(shared, request.query_params)
    if question.complete:
        job = plans.submit(shared, question, group=None)
        if job.wait(QUICK_SECONDS) and job.state is JobState.DONE:
            text = json.dumps(job.result, indent=1, ensure_ascii=False) + "\n"
            headers = {"content-disposition": 'attachment; filename="plan.json"'}
            return Response(text, media_type="application/json", headers=headers)
    return RedirectResponse(plans.address(question.query), 303)


routes = [Route("/plan", show), Route("/plan/plan.json", download)]
