"""Where the time of steps went, as traces of torch's profiler record it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fsdptool.records.annotations import Count, Positive, Share

Clocks = Literal["agree", "shifted", "disagree"]


@dataclass(frozen=True, slots=True)
class GpuTime:
    """What a GPU did in a stretch of time, in seconds.

    ``compute_seconds``, ``exposed_communication_seconds``, ``exposed_copy_seconds`` and ``idle_seconds`` add
    up to ``seconds``.

    Attributes:
        seconds: The stretch.
        compute_seconds: At least one kernel ran that does not communicate.
        communication_seconds: At least one kernel of NCCL ran.
        exposed_communication_seconds: A kernel of NCCL ran, and no other kernel.
        copy_seconds: Memory was copied or filled by the driver.
        exposed_copy_seconds: Memory was copied or filled, and no kernel ran.
        idle_seconds: The GPU did nothing, and waited for the host.
    """

    seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    copy_seconds: float
    exposed_copy_seconds: float
    idle_seconds: float


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """One step of the profiler: from the first work on the GPU that it launched to that of the next step."""

    name: str
    time: GpuTime


@dataclass(frozen=True, slots=True)
class OperationTime:
    """All collectives of one operation.

    Attributes:
        operation: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``send_recv``, ``broadcast`` or others.
        calls: How many there are.
        seconds: Sum of their times, waiting for other ranks included.
        exposed_seconds: The part of it in which no other kernel ran.
        overlap: The share of it in which other kernels ran.
    """

    operation: str
    calls: Positive
    seconds: float
    exposed_seconds: float
    overlap: Share


@dataclass(frozen=True, slots=True)
class MessageTime:
    """The collectives of one operation, size and group size, where the trace carries sizes.

    Attributes:
        operation: As in the table of operations.
        bytes: Of the whole tensor: what an all-gather returns, what a reduce-scatter takes.
        group_size: Ranks that take part.
        calls: How many there are.
        shortest_seconds, median_seconds, longest_seconds: Of one call.
        bus_bytes_per_second: Bus bandwidth of the shortest call, which waited least, as nccl-tests define it
            (doc/PERFORMANCE.md); null for a group of one rank.
    """

    operation: str
    bytes: Count
    group_size: Positive
    calls: Positive
    shortest_seconds: float
    median_seconds: float
    longest_seconds: float
    bus_bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class UnitTime:
    """Time of one FSDP unit over the whole trace, by the annotations that FSDP2 makes.

    Attributes:
        unit: Name of the module; ``(root)`` for the model itself.
        forward_seconds, backward_seconds: Kernels that were launched between the unit's hooks, those of units
            within it apart.
        all_gather_seconds, exposed_all_gather_seconds: Its all-gathers.
        reduce_scatter_seconds, exposed_reduce_scatter_seconds: Its reductions, all-reduces of HSDP included.
    """

    unit: str
    forward_seconds: float
    backward_seconds: float
    all_gather_seconds: float
    exposed_all_gather_seconds: float
    reduce_scatter_seconds: float
    exposed_reduce_scatter_seconds: float


@dataclass(frozen=True, slots=True)
class RankProfile:
    """One trace.

    Attributes:
        file: The trace.
        rank, world_size: As the trace says; null where it does not.
        gpu: The GPU's name; null where the trace does not say it.
        complete: Whether the file could be read to its end.
        total: From the first to the last work on the GPU.
        steps: The steps of the profiler; empty where none are annotated.
        operations: Collectives by operation, the longest first.
        messages: Collectives by operation and size; empty where the trace carries no sizes.
        units: FSDP units in the order of their first forward; empty without annotations of FSDP2.
    """

    file: str
    rank: Count | None
    world_size: Positive | None
    gpu: str | None
    complete: bool
    total: GpuTime
    steps: tuple[ProfiledStep, ...]
    operations: tuple[OperationTime, ...]
    messages: tuple[MessageTime, ...]
    units: tuple[UnitTime, ...]


@dataclass(frozen=True, slots=True)
class RankWaiting:
    """How long one rank was in the collectives that all ranks share.

    Attributes:
        rank: The rank.
        seconds: In all of them.
        shortest: In how many of them it was the one with the shortest time: the one the others waited for.
    """

    rank: Count
    seconds: float
    shortest: Count


@dataclass(frozen=True, slots=True)
class RanksCompared:
    """What traces of several ranks say of each other.

    Attributes:
        collectives: Collectives that all of them recorded, by operation, group and order.
        ranks: How long each was in them.
        late_rank: The rank with the least time in them, if it is clearly less than that of the others: it
            arrives last, and the others wait. Null where none stands out.
        clocks: Whether collectives end at the same time on all ranks: ``agree``, ``shifted`` by a constant,
            or ``disagree``. Null without a shared collective.
        end_spread_seconds: By how much the ends of one collective differ at most.
        start_spread_seconds: By how much the starts of one collective differ at most, shifted clocks set
            right; null where clocks disagree.
    """

    collectives: Count
    ranks: tuple[RankWaiting, ...]
    late_rank: Count | None
    clocks: Clocks | None
    end_spread_seconds: float | None
    start_spread_seconds: float | None


@dataclass(frozen=True, slots=True)
class PlannedTime:
    """One part of a step, planned and measured.

    Attributes:
        part: ``step``, ``compute``, ``communication``, ``exposed_communication``, ``copies`` or ``idle``.
        planned_seconds: Per step; null where the plan does not have the part.
        measured_seconds: Mean of the steps, median of the ranks.
    """

    part: str
    planned_seconds: float | None
    measured_seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """What `fsdptool diagnose --format json` prints of traces of torch's profiler.

    Attributes:
        traces: One entry for each file.
        compared: What the ranks say of each other; null for one trace.
        planned: The plan's parts of a step beside the measured ones; empty without a plan.
    """

    traces: tuple[RankProfile, ...]
    compared: RanksCompared | None
    planned: tuple[PlannedTime, ...] = ()
