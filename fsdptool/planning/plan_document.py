"""Plans as documents (``schemas/plan.schema.json``), and back again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError, PlanError
from fsdptool.files.values import check, read_object
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.diagnostic import envelope
from fsdptool.records.plan import Plan, PlanInputs

_ENVELOPE = ("schema", "schema_version", "tool_version", "libraries", "inputs_digest")


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as a JSON document that ``emit-config``, ``train`` and ``--check`` accept."""
    body = to_json(plan)
    diagnostics, unknowns = body.pop("diagnostics"), body.pop("unknowns")
    document = envelope("plan", plan.inputs, body)
    document["diagnostics"], document["unknowns"] = diagnostics, unknowns
    return document


def read_plan(path: Path) -> Plan:
    """Return the plan a document contains.

    Raises:
        ConfigError: The file cannot be read, or breaks the schema.
        PlanError: The file is not a plan.
    """
    return plan_from(read_object(path), where=str(path))


def plan_from(data: Mapping[str, Any], *, where: str) -> Plan:
    """Return the plan a parsed document contains.

    Raises:
        ConfigError: It breaks the schema; the message names the place.
        PlanError: It is not a plan.
    """
    if data.get("schema") != "plan":
        raise PlanError(
            f"{where} is not a plan (its schema is {data.get('schema')!r})",
            help="fsdptool plan ... -o plan.json writes one",
        )
    check(data, "plan", where=where)
    body = {key: value for key, value in data.items() if key not in _ENVELOPE}
    try:
        return from_json(Plan, body, where=where)
    except ConfigError as error:
        raise PlanError(error.message, help="create a new plan with fsdptool plan") from error


def inputs_of(plan: Plan) -> PlanInputs:
    """Return the canonical inputs a plan was derived from.

    Raises:
        PlanError: They are not complete.
    """
    try:
        return from_json(PlanInputs, plan.inputs, where="inputs")
    except ConfigError as error:
        raise PlanError(error.message, help="create a new plan with fsdptool plan") from error


@dataclass(frozen=True, slots=True)
class ShownPlan(Plan):
    """A :class:`~fsdptool.records.plan.Plan` that shows itself in a notebook."""

    def _repr_html_(self) -> str:
        """Return the page ``plan -o plan.html`` writes, in a frame of its own."""
        from fsdptool.report.html import plan_fragment

        return plan_fragment(plan_document(self))


def shown(plan: Plan) -> ShownPlan:
    """Return the same plan with its notebook representation."""
    return ShownPlan(**{field.name: getattr(plan, field.name) for field in fields(Plan)})
