"""What ``fsdptool detect --tp`` and ``--ep`` show: every parameter's place on a group. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator

from fsdptool.errors import ConfigError
from fsdptool.layout import refusals
from fsdptool.layout.placements import placements
from fsdptool.layout.tensor_parallel import plan_expert_parallel, plan_tensor_parallel
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.detection import PlacedParameter, SplitSummary
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.tensor_plan import SequenceSpan, TensorPlan

INDIVISIBLE = "DET140"
WHOLE_SEQUENCES = "DET141"


def divided_tensors(
    anatomy: Anatomy, size: int, *, sequence: bool
) -> tuple[SplitSummary, SequenceSpan | None, tuple[Diagnostic, ...]]:
    """Return how a tensor-parallel group divides a model, where it divides sequences, and what it cannot.

    Args:
        anatomy: The model.
        size: Ranks of the group.
        sequence: Whether hidden states are divided along the sequence where the model allows it.
    """
    refused: tuple[Diagnostic, ...] = ()
    try:
        plan = plan_tensor_parallel(anatomy, size, sequence=sequence)
    except ConfigError as error:
        plan = plan_tensor_parallel(anatomy, size)
        refused = (Diagnostic(WHOLE_SEQUENCES, "error", error.message, help=error.help),)
    split = summary(anatomy, plan)
    return split, plan.sequence, (*violations(split, "--tp"), *refused)


def tensor_summary(anatomy: Anatomy, size: int) -> SplitSummary:
    """Return how a tensor-parallel group of ``size`` ranks divides a model."""
    return summary(anatomy, plan_tensor_parallel(anatomy, size))


def expert_summary(anatomy: Anatomy, size: int) -> SplitSummary:
    """Return how an expert-parallel group of ``size`` ranks divides a model's fused experts."""
    return summary(anatomy, plan_expert_parallel(anatomy, size))


def summary(anatomy: Anatomy, plan: TensorPlan) -> SplitSummary:
    """Return a plan with the placement of every distinct parameter: names that differ in numbers are one."""
    split = {module.path: module for module in plan.modules}
    rows: dict[tuple[object, ...], PlacedParameter] = {}
    total = 0
    for parameter, placement in zip(anatomy.parameters, placements(anatomy.parameters, plan), strict=True):
        # A size that the group does not divide has no local shape; the violations say which.
        fits = all(section % plan.size == 0 for section in placement.sections)
        local = placement.local_shape(plan.size) if fits else placement.shape
        found = (split.get(name) or split.get(name.rpartition(".")[0]) for name in parameter.names)
        module = next((item for item in found if item is not None), None)
        divided = module if placement.dim is not None else None
        numel = 1
        for length in local:
            numel *= length
        total += numel
        name = folded(parameter.fqn)
        key = (name, placement.shape, placement.dim, placement.sections, placement.reason)
        known = rows.get(key)
        rows[key] = PlacedParameter(
            name=name,
            count=known.count + 1 if known else 1,
            shape=placement.shape,
            local_shape=local,
            style=divided.style if divided else None,
            dim=placement.dim,
            sections=placement.sections,
            partial_gradient=placement.partial_gradient,
            reason=placement.reason,
            origin=divided.origin if divided else None,
        )
    return SplitSummary(
        size=plan.size,
        parameters=tuple(rows.values()),
        local_parameters=total,
        regions=tuple(dict.fromkeys(folded(path) for path in plan.regions)),
        indivisible=plan.indivisible,
        notes=plan.notes,
    )


def folded(path: str) -> str:
    """Return a path with ``*`` for every number."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def violations(split: SplitSummary, option: str) -> Iterator[Diagnostic]:
    """Yield an error for everything that the group does not divide."""
    for message, advice in refusals.violations(option, split.size, split.indivisible):
        yield Diagnostic(INDIVISIBLE, "error", message, help=advice)
