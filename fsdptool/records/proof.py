"""How a live model is sharded, against what was planned, and its measured memory beside the plan's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from fsdptool.records.annotations import Count, Positive
from fsdptool.records.sharding import Layout


class DifferenceKind(StrEnum):
    """What differs between a live model and its plan. A value is stable within a major version."""

    NOT_SHARDED = "not_sharded"
    """No module of the model is an FSDP2 unit."""
    RANKS = "ranks"
    """The number of processes, or the sizes of the mesh."""
    PARAMETER = "parameter"
    """A parameter is missing, is not planned, or has another shape or ``requires_grad``."""
    UNIT = "unit"
    """Parameters are in other FSDP units."""
    PLACEMENT = "placement"
    """A parameter is sharded otherwise, has other rows on a rank, or has no values."""
    STORED_DTYPE = "stored_dtype"
    COMPUTE_DTYPE = "compute_dtype"
    """The dtype of gathered parameters, or the one that gradients are reduced in."""
    RESHARD = "reshard"
    """Whether a unit frees its gathered parameters after forward."""
    OFFLOAD = "offload"
    TIE = "tie"
    """Names that should share one tensor do not."""
    REPLICA = "replica"
    """Values that should be equal on several ranks are not."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which a live model is not as planned.

    Attributes:
        kind: What differs.
        where: The parameter, unit or mesh dimension; the first of several similar ones.
        planned: What was planned.
        found: What the model has.
        places: How many parameters or units differ in this way.
        ranks: The ranks that see it.
    """

    kind: DifferenceKind
    where: str
    planned: str
    found: str
    places: Positive = 1
    ranks: tuple[Count, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardingProof:
    """What `fsdptool.prove` found on all ranks (`fsdptool-proof.json`). Bytes are bytes.

    Attributes:
        proven: Whether nothing differs.
        differences: What differs.
        world_size: Number of processes.
        mesh: Sizes of the mesh that parameters are sharded over, by dimension.
        layout: Whose FSDP units were expected.
        units: FSDP units that were expected.
        parameters: Parameters that were expected, each counted once.
        replicated: Those kept whole on every rank.
        local_bytes: Bytes of the parameters of every rank (exact).
        predicted_peak_bytes: The plan's allocated peak of a rank, or null for a configuration alone.
        measured_peak_bytes: The measured allocated peak of every rank; null where no step was measured.
        error_percent: Predicted over the largest measured peak, minus one, in percent; null if unknown.
        instrument: What measured, or null.
        steps: Steps that were measured.
    """

    proven: bool
    differences: tuple[Difference, ...]
    world_size: Positive
    mesh: Mapping[str, Positive]
    layout: Layout
    units: Count
    parameters: Count
    replicated: Count
    local_bytes: tuple[Count, ...]
    predicted_peak_bytes: Count | None = None
    measured_peak_bytes: tuple[Count | None, ...] = ()
    error_percent: float | None = None
    instrument: str | None = None
    steps: Count = 0
