"""Why a start of a run ended: a rank's own last event, the operating system, or a lack of memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptool.errors import FsdptoolError
from fsdptool.launch.prepare import Prepared
from fsdptool.records.codec import to_json
from fsdptool.records.plan import Candidate, Suggestion
from fsdptool.runs.folder import LOGS, write_json


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a start of the run ended.

    Attributes:
        rank: The rank, or None if no rank had announced itself.
        message: One line.
        help: What to do next.
        exit_code: Exit status the run should end with.
        retryable: Whether another start could help.
        fields: The failing rank's ``failure`` event, or empty.
    """

    rank: int | None
    message: str
    help: str | None = None
    exit_code: int = 4
    retryable: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


def failure_of_event(event: Mapping[str, Any]) -> Failure:
    """Return the failure that a rank reported in its ``failure`` event."""
    return Failure(
        rank=event["rank"],
        message=f"rank {event['rank']}: {event['message']}",
        help=event.get("help"),
        exit_code=int(event.get("exit_code", 4)),
        retryable=bool(event.get("retryable", True)),
        fields=event,
    )


def is_running(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    except OSError:
        return False
    return state.rpartition(")")[2].split()[0] not in ("Z", "X")


REPORT = f"{LOGS}/out-of-memory.json"


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """What is known of an out-of-memory failure.

    Attributes:
        rank: The rank that ran out of memory.
        seen: The rank's own report (``training/memory_snapshot.py``).
        planned_moment: The plan's moment that corresponds to where it failed, or None.
        planned_bytes: What the plan expected to be allocated there.
        peak_moment, peak_bytes: Where and how high the plan expects the peak.
        next_steps: Rungs of the plan's ladder, cheapest first.
    """

    rank: int | None
    seen: Mapping[str, Any]
    planned_moment: str | None
    planned_bytes: int | None
    peak_moment: str | None
    peak_bytes: int | None
    next_steps: tuple[Suggestion, ...]


def account_for_memory(prepared: Prepared, failure: Failure) -> OutOfMemory | None:
    """Return the report on an out-of-memory failure, or None for any other failure."""
    seen = failure.fields.get("memory")
    if not failure.fields.get("out_of_memory") or not seen:
        return None
    plan = prepared.prediction
    moment = match_moment(str(seen["moment"]), plan)
    at = {m.name: m.allocated_bytes for m in plan.timeline} if plan else {}
    return OutOfMemory(
        rank=failure.rank,
        seen=seen,
        planned_moment=moment,
        planned_bytes=at.get(moment) if moment else None,
        peak_moment=plan.peak.moment if plan and plan.peak else None,
        peak_bytes=plan.allocated_peak_bytes if plan else None,
        next_steps=_next_steps(prepared),
    )


def match_moment(seen: str, plan: Candidate | None) -> str | None:
    """Return the name of the plan's moment a rank was in.

    A rank names the module it was in; the plan names units, which are modules further up.
    """
    if plan is None:
        return None
    phase, _, path = seen.partition(" ")
    named = [m.name for m in plan.timeline]
    if seen in named:
        return seen
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for name in named:
            kind, _, units = name.partition(" ")
            if kind == phase and prefix in units.split("+"):
                return name
    if seen == "optimizer step":
        return None
    return next((name for name in named if name.startswith(phase)), None)


def _next_steps(prepared: Prepared) -> tuple[Suggestion, ...]:
    from fsdptool.inspection import inspect
    from fsdptool.planning.estimator import Estimator
    from fsdptool.planning.hardware import machine_for
    from fsdptool.planning.search_point import read_search_point
    from fsdptool.planning.suggestions import suggest
    from fsdptool.records.cluster import Cluster, device_profile
    from fsdptool.records.plan import PlanInputs

    profile = device_profile(prepared.device)
    cluster = None
    if prepared.device == "cuda":
        from fsdptool.launch.devices import local_cluster

        cluster = local_cluster(prepared.settings)
    cluster = cluster or Cluster(None, prepared.per_machine, prepared.world_size // prepared.per_machine)
    recipe, settings = prepared.recipe, prepared.settings
    try:
        estimator = Estimator(prepared.spec, inspect(prepared.spec), recipe, settings, profile=profile)
        machine = machine_for(cluster.gpu)
        point = read_search_point(recipe, settings, cluster)
        requested = estimator.candidate("asked", point, cluster, machine)
        inputs = PlanInputs(recipe, settings, (cluster,), (machine,), profile=profile)
        return suggest(estimator, inputs, point, requested)
    except FsdptoolError:
        return ()


def write_report(folder: Path, account: OutOfMemory) -> str:
    """Write the report into the run folder; return its relative path (raises ``OSError``)."""
    write_json(folder / REPORT, to_json(account))
    return REPORT
