"""What ``fsdptool doctor --gpu`` measures: rates, memory that no trace shows, and what was tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from fsdptool.records.annotations import Count, Keywords, Positive
from fsdptool.records.cluster import KernelTime
from fsdptool.records.command_documents import Probe
from fsdptool.records.run import DeviceType

MEASURED = "measured.json"
"""What the processes write into their folder."""

Seconds = Annotated[float, Keywords(exclusiveMinimum=0)]
Masking = Literal["causal", "mask", "documents"]
CopyKind = Literal["device", "host_to_device", "device_to_host"]
CollectiveKind = Literal["all_gather", "reduce_scatter"]
AttemptKind = Literal["offload", "asynchronous_save", "full_save"]


@dataclass(frozen=True, slots=True)
class ProductRate:
    """A product of an ``m x k`` and a ``k x n`` matrix, of random values."""

    dtype: str
    m: Positive
    k: Positive
    n: Positive
    seconds: Seconds

    @property
    def flops_per_second(self) -> float:
        """FLOP/s."""
        return 2 * self.m * self.k * self.n / self.seconds


@dataclass(frozen=True, slots=True)
class CopyRate:
    """A copy within the device, or between it and page-locked host memory."""

    kind: CopyKind
    bytes: Positive
    seconds: Seconds

    @property
    def traffic_per_second(self) -> float:
        """Bytes per second; within a device each byte is read and written."""
        return self.bytes * (2 if self.kind == "device" else 1) / self.seconds


@dataclass(frozen=True, slots=True)
class MeasuredAttention:
    """One attention kernel at one shape, forward and backward.

    Attributes:
        dtype: Of queries, keys and values.
        sequences, heads, key_heads, length, head_size: The shape; fewer heads of keys are grouped queries.
        masking: Causal, a boolean mask of ``length x length``, or documents by cumulative lengths.
        repeated: Whether keys and values are repeated for their queries before the kernel.
        kernel: Name in ``torch.nn.attention.SDPBackend``, or ``VARLEN``.
        chosen: Whether torch takes this kernel if nothing is said.
        flops: FLOPs of forward that the kernel does not skip; backward has 2.5 times as many.
        forward_seconds, backward_seconds: Null if the kernel refused.
        forward_workspace_bytes, backward_workspace_bytes: Device memory that the kernel takes and gives
            back; null on the CPU.
        refused: Why the kernel did not run, or null.
    """

    dtype: str
    sequences: Positive
    heads: Positive
    key_heads: Positive
    length: Positive
    head_size: Positive
    masking: Masking
    repeated: bool
    kernel: str
    chosen: bool
    flops: float
    forward_seconds: float | None = None
    backward_seconds: float | None = None
    forward_workspace_bytes: Count | None = None
    backward_workspace_bytes: Count | None = None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class CollectiveRate:
    """A collective of all ranks. ``bytes`` are those of the gathered tensor."""

    kind: CollectiveKind
    ranks: Annotated[int, Keywords(minimum=2)]
    bytes: Positive
    seconds: Seconds

    @property
    def link_bytes_per_second(self) -> float:
        """Bytes per second that each rank sends in a ring."""
        return self.bytes * (self.ranks - 1) / self.ranks / self.seconds


@dataclass(frozen=True, slots=True)
class Attempt:
    """A path of the trainer that was tried once. ``reason`` is why it failed, or null."""

    kind: AttemptKind
    ok: bool
    seconds: float
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RankMeasurements:
    """What the processes of one machine measured.

    Attributes:
        gpu: What torch calls the first GPU; the platform for the CPU.
        capability: Compute capability, or null on the CPU.
        memory_bytes: Memory of the device as torch reports it; null on the CPU.
        processes: Ranks of the collectives and of the attempts.
        backend: What the collectives ran over.
        context_bytes: Memory of a process before its first tensor; null where the driver does not tell it.
        communicator_bytes: Memory that the first communicator added; null on the CPU and for one GPU.
        further_communicator_bytes: Memory that another one added; null as above.
        kernel_latency: Seconds the host needs to launch one operator.
        products, copies, attention, collectives: Rates.
        attempts: What was tried.
        kernels: Times of operators by size (``fsdptool calibrate --probe``).
    """

    gpu: str
    capability: str | None
    memory_bytes: Count | None
    processes: Positive
    backend: str
    context_bytes: Count | None = None
    communicator_bytes: Count | None = None
    further_communicator_bytes: Count | None = None
    kernel_latency: float | None = None
    products: tuple[ProductRate, ...] = ()
    copies: tuple[CopyRate, ...] = ()
    attention: tuple[MeasuredAttention, ...] = ()
    collectives: tuple[CollectiveRate, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    kernels: tuple[KernelTime, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurements:
    """What `fsdptool doctor --gpu` writes, and `fsdptool calibrate --measured` reads.

    Attributes:
        device: ``cpu`` is a rehearsal, from which nothing can be calibrated.
        versions: Package to version; null is not installed. With the versions of CUDA, cuDNN and NCCL.
        probe: FSDP2's probe.
        ranks: What its processes measured; null if they ended before they had measured anything.
        error: Why they ended early, or null.
        seconds: How long everything took.
    """

    device: DeviceType
    versions: Mapping[str, str | None]
    probe: Probe
    ranks: RankMeasurements | None
    error: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether everything was measured and everything that was tried works."""
        ranks = self.ranks
        tried = ranks is not None and all(attempt.ok for attempt in ranks.attempts)
        return self.probe.ok and self.error is None and tried
