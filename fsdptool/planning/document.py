"""Plans as documents (``schemas/plan.schema.json``), back again, and held against a new derivation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError, PlanError
from fsdptool.planning.files import check, read_data
from fsdptool.planning.options import PlanInputs, Request
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.document import envelope, library_versions, tool_version
from fsdptool.records.plan import Candidate, Plan

_ENVELOPE = ("schema", "schema_version", "tool_version", "libraries", "inputs_digest")


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return a plan as a JSON document that ``emit-config``, ``train`` and ``--check`` accept."""
    body = to_json(plan)
    diagnostics, unknowns = body.pop("diagnostics"), body.pop("unknowns")
    document = envelope("plan", plan.inputs, body)
    document["diagnostics"], document["unknowns"] = diagnostics, unknowns
    return document


def read_plan(path: Path) -> Plan:
    """Return the plan a document holds.

    Raises:
        PlanError: The file is no plan, or breaks the schema.
    """
    return plan_from(read_data(path), where=str(path))


def plan_from(data: Mapping[str, Any], *, where: str) -> Plan:
    """Return the plan a parsed document holds.

    Raises:
        PlanError: It is no plan, or breaks the schema; the message names the place.
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
        raise PlanError(error.message, help="make it anew with fsdptool plan") from error


def inputs_of(plan: Plan) -> PlanInputs:
    """Return the canonical inputs a plan was derived from.

    Raises:
        PlanError: They are not complete.
    """
    try:
        return from_json(PlanInputs, plan.inputs, where="inputs")
    except ConfigError as error:
        raise PlanError(error.message, help="make the plan anew with fsdptool plan") from error


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is no longer as the plan says: where, before and after."""

    what: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.what}: {self.before} became {self.after}"


def check_plan(path: Path, *, progress: Any = None) -> tuple[Plan, tuple[Change, ...]]:
    """Derive a plan anew from a document's own inputs and return it with everything that changed.

    Raises:
        PlanError: The file is no plan.
    """
    from fsdptool.planning.plan import make_plan

    data = read_data(path)
    before = plan_from(data, where=str(path))
    after = make_plan(Request(inputs_of(before)), progress=progress)
    return after, _changes(data, before, after)


def _changes(data: Mapping[str, Any], before: Plan, after: Plan) -> tuple[Change, ...]:
    changes = [
        *_differences("libraries", data["libraries"], library_versions()),
        *_differences("model", before.inputs.get("model", {}), after.inputs.get("model", {})),
    ]
    if data["tool_version"] != tool_version():
        changes.append(Change("fsdptool", data["tool_version"], tool_version()))
    for name in ("verdict", "chosen", "confidence"):
        if getattr(before, name) != getattr(after, name):
            changes.append(Change(name, getattr(before, name), getattr(after, name)))
    changes += _candidate_changes(before, after)
    return tuple(changes)


def _candidate_changes(before: Plan, after: Plan) -> list[Change]:
    """Compare what decides: the asked candidates and the chosen one."""
    new = {candidate.id: candidate for candidate in after.candidates}
    watched = {before.chosen, *before.details.get("asked", ())}
    changes: list[Change] = []
    for old in before.candidates:
        if old.id not in watched:
            continue
        if old.id not in new:
            changes.append(Change(f"candidate {old.id}", "weighed", "gone"))
            continue
        changes += _numbers(old, new[old.id])
    return changes


def _numbers(old: Candidate, new: Candidate) -> list[Change]:
    names = ("allocated_peak_bytes", "reserved_peak_bytes", "device_total_bytes", "usable_bytes")
    return [
        Change(f"{old.id} {name}", getattr(old, name), getattr(new, name))
        for name in names
        if getattr(old, name) != getattr(new, name)
    ]


def _differences(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    return [
        Change(f"{what}.{key}", before.get(key), after.get(key))
        for key in sorted(set(before) | set(after))
        if before.get(key) != after.get(key)
    ]
