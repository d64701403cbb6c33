"""What the memory room says of one configuration."""

from __future__ import annotations

from dataclasses import dataclass

from fsdptool.records.plan import Component, Moment, Peak, Phase


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
