"""Recompute a saved plan from its own inputs and compare the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptool.files.values import read_object
from fsdptool.planning.plan import make_plan
from fsdptool.planning.plan_document import inputs_of, plan_from
from fsdptool.planning.request import Request
from fsdptool.records.diagnostic import library_versions, tool_version
from fsdptool.records.plan import Candidate, Plan


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is no longer as the plan says: where, before and after."""

    what: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.what}: {self.before} became {self.after}"


def check_plan(
    path: Path, *, trust_remote_code: bool = False, progress: Any = None
) -> tuple[Plan, tuple[Change, ...]]:
    """Recompute a plan from a document's own inputs and return it with everything that changed.

    Args:
        path: The plan's document.
        trust_remote_code: Whether the model's own code may run, if the plan says that it is needed.
        progress: Told how far the search is.

    Raises:
        PlanError: The file is not a plan.
        ConfigError: It asks to run the model's own code, and ``trust_remote_code`` is not set.
    """
    from fsdptool.source import consented

    data = read_object(path)
    before = plan_from(data, where=str(path))
    inputs = inputs_of(before)
    consented(inputs.recipe, path, trust_remote_code=trust_remote_code)
    after = make_plan(Request(inputs), progress=progress)
    return after, changes_between(data, before, after)


def changes_between(data: Mapping[str, Any], before: Plan, after: Plan) -> tuple[Change, ...]:
    """Return what differs between a saved plan, with its document's head, and a new one."""
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
    """Compare what decides: the requested candidates and the chosen one."""
    new = {candidate.id: candidate for candidate in after.candidates}
    watched = {before.chosen, *before.details.get("asked", ())}
    changes: list[Change] = []
    for old in before.candidates:
        if old.id not in watched:
            continue
        if old.id not in new:
            changes.append(Change(f"candidate {old.id}", "present", "missing"))
            continue
        changes += _decisive(old, new[old.id])
    return changes


def _decisive(old: Candidate, new: Candidate) -> list[Change]:
    names = ("allocated_peak_bytes", "reserved_peak_bytes", "device_total_bytes", "usable_bytes")
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in names]
    kinds = (item.rejected_by.kind.value if item.rejected_by else None for item in (old, new))
    return [
        Change(f"{old.id} {name}", before, after)
        for name, before, after in [*pairs, ("rejected_by", *kinds)]
        if before != after
    ]


def _differences(what: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    return [
        Change(f"{what}.{key}", before.get(key), after.get(key))
        for key in sorted(set(before) | set(after))
        if before.get(key) != after.get(key)
    ]
