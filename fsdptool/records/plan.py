"""The verdict: what every rank will hold, whether it fits, and which configuration to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdptool.records.diagnostic import Diagnostic

Basis = Literal["exact", "estimated", "unknown"]
Verdict = Literal["fits", "does_not_fit", "unknown"]


@dataclass(frozen=True, slots=True)
class Component:
    """Bytes of one kind at the peak. ``bytes`` None goes with basis ``unknown``."""

    name: str
    bytes: int | None
    basis: Basis


@dataclass(frozen=True, slots=True)
class Holding:
    """Something alive at the peak, by name."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of the allocated peak and what is alive then, largest first."""

    moment: str
    live: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """One point of the timeline: allocated and reserved bytes after an event."""

    name: str
    allocated_bytes: int
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a run: the most a rank holds then.

    Attributes:
        name: ``load``, ``first step``, ``forward``, ``backward``, ``optimizer``, ``average``,
            ``evaluation``, ``sampling``, ``save`` or ``export``.
        allocated_bytes: Peak of live bytes on the device; None is unknown.
        host_bytes_per_rank: Host memory of every rank (tensors; on the CPU it is the device's).
        host_bytes_rank_0: What rank 0 (``export``: the one process there is) holds besides.
        basis: How ``allocated_bytes`` is known.
        moment: When in the phase the peak is.
    """

    name: str
    allocated_bytes: int | None
    host_bytes_per_rank: int
    host_bytes_rank_0: int
    basis: Basis
    moment: str = ""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Per-rank memory of one configuration over a whole run (rank 0; steps are step 2).

    Attributes:
        allocated_peak_bytes: Peak of live bytes, or None when activations are unknown.
        reserved_peak_bytes: Peak of the caching allocator's segments, or None when not replayed.
        components: Live bytes by kind at the peak, each with its basis.
        peak: The peak's moment and what is alive then, largest first.
        timeline: Allocated (and reserved) bytes after each phase event.
        host_bytes_per_rank: Host memory every rank needs at the worst time (offload, staging, loading).
        confidence: ``verified`` if the torch minor version was checked against the oracle.
        unknowns: What could not be derived, one sentence each.
        phases: The peak of every phase of the run.
    """

    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    components: tuple[Component, ...]
    peak: Peak | None
    timeline: tuple[Moment, ...]
    host_bytes_per_rank: int
    confidence: str = "verified"
    unknowns: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration that was weighed. ``rejected_by`` None: it may be chosen."""

    id: str
    settings: Mapping[str, Any]
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    device_total_bytes: int | None
    """Reserved plus workspaces, communicators and context: what the driver would report."""
    usable_bytes: int | None
    slack_bytes: int | None
    host_bytes_per_node: int | None
    components: tuple[Component, ...]
    peak: Peak | None
    timeline: tuple[Moment, ...]
    step_seconds: float | None
    tokens_per_second: float | None
    rejected_by: str | None = None
    """Why it was not chosen, in one sentence; None for the chosen one and for those nobody rejected."""
    samples_per_second: float | None = None
    mfu: float | None = None
    """Model FLOPs (recomputation not counted) over the peak of all GPUs, 0 to 1."""
    price_per_million_samples: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the step's time goes: compute, communication, exposed_communication, optimizer, offload."""
    step_flops: float | None = None
    """Model FLOPs of one optimizer step over all ranks (recomputation not counted)."""
    peak_flops: float | None = None
    """One GPU's catalogued FLOP/s in the dtype the model computes in; None on the CPU."""
    phases: tuple[Phase, ...] = ()
    """Every phase of the run; the highest of them decides the verdict. Empty where searches leave it out."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One rung of the ladder when a plan does not fit: what it gives and what it costs."""

    change: str
    settings: Mapping[str, Any]
    device_total_bytes: int | None
    fits: bool | None
    cost: str


@dataclass(frozen=True, slots=True)
class Plan:
    """A verdict with every candidate that was weighed (contract ``plan``).

    ``inputs`` holds the canonical forms of reference, recipe, cluster and settings the plan was
    derived from, so that ``emit-config``, ``train`` and ``plan --check`` need nothing else.
    """

    verdict: Verdict
    chosen: str | None
    candidates: tuple[Candidate, ...]
    next_steps: tuple[Suggestion, ...]
    inputs: Mapping[str, Any]
    confidence: Literal["verified", "unverified"] = "verified"
    diagnostics: tuple[Diagnostic, ...] = ()
    unknowns: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """Additive extras (Pareto front, price, MFU), never required to read the verdict."""
