"""What a plan advises: why nothing fits, what to change, what a change gives and what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from fsdptool.records.annotations import Count


class ShortfallKind(StrEnum):
    """What needs most of the memory where nothing fits."""

    STATES = "states"
    """Parameters, gradients, optimizer and average: divided by the ranks that share a copy."""
    GATHERED_UNITS = "gathered_units"
    """FSDP units that are whole on every rank, and their gradients: as large on any number of ranks."""
    ACTIVATIONS = "activations"
    """What the samples of a micro-batch need: as large on any number of ranks without context parallelism."""
    HOST_MEMORY = "host_memory"


@dataclass(frozen=True, slots=True)
class GatheredUnit:
    """An FSDP unit as it is gathered.

    Attributes:
        id, class_name: Which one; the first of several equal ones.
        bytes: What the whole unit takes in the dtype it computes in, padding included.
        padding_bytes: The part of it that is padding, because rows do not divide among the ranks.
        parameter: Its largest parameter.
        parameter_bytes: What that takes, padding included.
    """

    id: str
    class_name: str
    bytes: Count
    padding_bytes: Count
    parameter: str
    parameter_bytes: Count


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why nothing fits, judged by the candidate that needs the least device memory.

    Attributes:
        kind: What needs the most memory.
        candidate: Id of the candidate.
        bytes: What ``kind`` takes at the candidate's peak.
        needed_bytes, available_bytes: Memory that it needs, and that is available (on the device, or on the
            host of a node).
        more_gpus_help: Whether the same configuration fits on some larger number of these GPUs.
        unit: The largest unit, if gathered units need the most memory.
    """

    kind: ShortfallKind
    candidate: str
    bytes: Count
    needed_bytes: Count
    available_bytes: Count
    more_gpus_help: bool
    unit: GatheredUnit | None = None


class SuggestionKind(StrEnum):
    """What a suggestion changes."""

    EXPANDABLE_SEGMENTS = "expandable_segments"
    RESHARD = "reshard_after_forward"
    PREFETCH = "prefetch"
    SHARDED_GRADIENTS = "sharded_gradients"
    FUSED_OPTIMIZER = "fused_optimizer"
    CHECKPOINTING = "activation_checkpointing"
    MICRO_BATCH = "micro_batch"
    FULL_SHARDING = "full_sharding"
    REDUCE_DTYPE = "reduce_dtype"
    CPU_OFFLOAD = "cpu_offload"
    QUANTISED_BASE = "quantised_base"
    LOW_PRECISION_STATES = "low_precision_states"
    LARGER_BATCH = "larger_batch"
    """Uses memory that the chosen configuration leaves free."""
    COMBINED = "combined"
    MORE_GPUS = "more_gpus"
    LARGER_GPU = "larger_gpu"


class CostKind(StrEnum):
    """What a suggestion costs."""

    STEP_TIME = "step_time"
    HOST_MEMORY = "host_memory"
    WEIGHT_PRECISION = "weight_precision"
    GRADIENT_PRECISION = "gradient_precision"
    HOST_OPTIMIZER = "host_optimizer"
    SMALLER_PRODUCTS = "smaller_products"
    MORE_REDUCTIONS = "more_reductions"
    LARGER_BATCH = "larger_batch"
    GLOBAL_BATCH = "global_batch"
    UPDATE_PRECISION = "update_precision"
    OTHER_HARDWARE = "other_hardware"


@dataclass(frozen=True, slots=True)
class Cost:
    """One cost of a suggestion: ``kind`` for programs, ``detail`` a phrase for people."""

    kind: CostKind
    detail: str


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change to a configuration: what it gives and what it costs.

    It starts from the chosen configuration; where none is chosen, from the one that needs the least memory.

    Attributes:
        change: The change, as a phrase.
        settings: The search point's settings it changes, with their new values.
        device_total_bytes: What a rank needs with the change; None is unknown.
        fits: Whether the changed configuration fits; None is unknown.
        cost: Every cost in one phrase.
        kind: What is changed.
        costs: The same costs, one by one.
        samples_per_second, tokens_per_second: Estimated speed with the change; None is unknown.
        environment: Variables of the workers that it sets: ``environment`` in a cluster file, which
            ``launch`` and its Slurm scripts export.
        hardware: Options of ``plan`` that name other hardware (``gpu``, ``gpus``, ``nodes``), or none.
        with_all_above: Whether ``settings`` and ``environment`` hold those of the suggestions before it, too;
            ``change`` does not name them.
    """

    change: str
    settings: Mapping[str, Any]
    device_total_bytes: int | None
    fits: bool | None
    cost: str
    kind: SuggestionKind
    costs: tuple[Cost, ...] = ()
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    hardware: Mapping[str, str | int] = field(default_factory=dict)
    with_all_above: bool = False
