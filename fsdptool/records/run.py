"""What a training run leaves behind: metrics line by line, and a closing summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Metrics:
    """One optimizer step, as a line of ``metrics.jsonl``. Seconds and bytes; None is unknown."""

    step: int
    epoch: float
    time: float
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int | None
    samples: int
    step_seconds: float
    data_seconds: float
    memory_allocated_peak_bytes: int | None
    memory_reserved_peak_bytes: int | None
    mfu: float | None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Summary:
    """``summary.json`` of a run folder (contract ``run folder``)."""

    status: str
    exit_code: int
    resumable: bool
    steps: int
    world_size: int
    mesh: Mapping[str, int]
    units: int
    sharding_proof: Mapping[str, Any]
    predicted_peak_bytes: int | None
    measured_peak_bytes: tuple[int | None, ...]
    instrument: str
    error_percent: float | None
    throughput: Mapping[str, float | None]
    last_checkpoint: str | None
    last_good_step: int | None
    export: str | None
    restarts: int = 0
    failure: Mapping[str, Any] | None = None
    memory_report: str | None = None
    measured_moments: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    """Allocated peak of every rank at each moment of the run that was measured: load, forward,
    backward, optimizer, evaluation, save, ..."""
