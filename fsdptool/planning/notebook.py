"""The plan as ``fsdptool.plan`` returns it: the record, and how a notebook shows it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from fsdptool.planning.plan_document import plan_document
from fsdptool.records.plan import Plan


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
