"""Mixtures of experts: whether memory depends on how tokens are routed, said outright."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from fsdptool.formatting import amount
from fsdptool.records.anatomy import Parameter
from fsdptool.records.plan import Candidate

_LISTED = re.compile(r"\.experts\.(\d+)\.")


def experts_of(parameters: Iterable[Parameter]) -> int | None:
    """Return how many experts a layer routes tokens to, or None if it has none.

    Fused experts are stacked in one tensor below an ``experts`` module; others are listed there.
    """
    count = 0
    for parameter in parameters:
        listed = _LISTED.search(f".{parameter.fqn}")
        if listed is not None:
            count = max(count, int(listed[1]) + 1)
        elif ".experts." in f".{parameter.fqn}" and len(parameter.shape) == 3:
            count = max(count, parameter.shape[0])
    return count if count > 1 else None


def routing(parameters: Iterable[Parameter], candidate: Candidate) -> dict[str, Any] | None:
    """Return the allocated peak under balanced and under the worst routing, and why; None without experts.

    A trace runs without values, so what it holds cannot depend on which expert a token goes to: the
    products of all routed tokens are grouped, or every expert has room for a fixed number of them. A
    model that loops over the experts it hits cannot be traced, and both figures are unknown.
    """
    count = experts_of(parameters)
    if count is None:
        return None
    peak = candidate.allocated_peak_bytes
    if peak is None:
        reason = "what each expert gets decides the sizes of its products, which cannot be known in advance"
    else:
        reason = "all routed tokens are computed together, in buffers whose size no routing changes"
    return {"experts": count, "balanced_bytes": peak, "worst_case_bytes": peak, "reason": reason}


def routing_note(told: Mapping[str, Any]) -> str:
    """Return :func:`routing` in one line."""
    return (
        f"{told['experts']} experts: balanced routing peaks at {amount(told['balanced_bytes'])} allocated,"
        f" the worst at {amount(told['worst_case_bytes'])}: {told['reason']}"
    )
