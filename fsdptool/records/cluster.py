"""What a run is trained on: GPUs, links, hosts, and the files that describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from fsdptool.records.annotations import Count, Keywords, Positive, Text

Link = Literal["nvlink", "pcie", "xgmi"]

DeviceProfile = Literal["cuda", "cpu-fake", "cpu-gloo"]
"""Whose memory a prediction counts: a GPU's, or the CPU's over torch's ``fake`` or ``gloo`` backend."""

DEVICE_PROFILES: tuple[DeviceProfile, ...] = get_args(DeviceProfile)


def device_profile(device: Literal["cpu", "cuda"]) -> DeviceProfile:
    """Return the profile of a run on ``device``."""
    return "cuda" if device == "cuda" else "cpu-gloo"


EXPANDABLE: Mapping[str, str] = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""What switches expandable segments on (torch 2.9 and later; older ones read ``PYTORCH_CUDA_ALLOC_CONF``)."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""What configures the caching allocator, by either name. ``fsdptool train`` sets expandable segments on GPUs
unless one of them is set."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of accelerator. Bytes and FLOP/s as a vendor's datasheet gives them (dense, no sparsity).

    Attributes:
        name: Catalogue name, for example ``H100-80GB-SXM``.
        memory_bytes: What the driver reports as total (never the marketing size).
        flops: Peak FLOP/s by dtype name.
        memory_bandwidth: Bytes per second.
        link_bandwidth: Bytes per second per direction to peers in the same node.
        link: ``nvlink``, ``pcie`` or ``xgmi``.
        native_bf16, native_fp8: Whether the tensor cores compute in the dtype.
        source: Where the figures come from.
        marketing_bytes: The size it is sold under, or None.
        workspace_bytes: What matrix products keep on the device for each thread (torch's
            ``CublasHandlePool.cpp``: 32 MiB from Hopper on, 8,519,680 bytes before; on AMD's the
            workspaces of hipBLAS and hipBLASLt together).
    """

    name: str
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    link: str
    native_bf16: bool
    native_fp8: bool
    source: str
    marketing_bytes: int | None = None
    workspace_bytes: int = 8_519_680


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes of equal GPUs. CPU clusters have ``gpu`` None and are limited by host memory only."""

    gpu: Gpu | None
    gpus_per_node: int
    nodes: int = 1
    inter_node_bandwidth: float | None = None
    """Bytes per second per GPU and direction between nodes; None: single node or unknown."""
    host_memory_bytes: int | None = None
    price_per_gpu_hour: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """NCCL settings to export on launch."""
    name: str | None = None
    """Name of this offer; None names it after its GPUs."""

    @property
    def world_size(self) -> int:
        """Total number of GPUs."""
        return self.gpus_per_node * self.nodes


FlopsType = Literal["float32", "tf32", "float16", "bfloat16", "float8"]
Rate = Annotated[float, Keywords(exclusiveMinimum=0)]
Fraction = Annotated[float, Keywords(exclusiveMinimum=0, maximum=1)]
Seconds = Annotated[float, Keywords(minimum=0)]
RateText = Annotated[str, Keywords(pattern=r"^\s*[0-9.]+\s*([KMGT]i?)?(B|bit|b)(/s|ps)\s*$")]
SizeText = Annotated[str, Keywords(pattern=r"^\s*[0-9.]+\s*([KMGT]i?)?B\s*$")]


@dataclass(frozen=True, slots=True)
class GpuEntry:
    """One entry of a GPU catalogue.

    Attributes:
        name: Catalogue name.
        memory_bytes: What torch reports as total_memory, in bytes.
        flops: Peak FLOP/s of dense matrix products by dtype.
        memory_bandwidth: Bytes per second.
        link_bandwidth: Bytes per second and direction to peers in the node.
        source: Where the figures come from.
        aliases: Further names people use.
        marketing_gb: The size it is sold under, in GB.
        memory_source: Where ``memory_bytes`` comes from, if it is another place.
        link: How GPUs of one node are connected.
        native_bf16, native_fp8: Whether the tensor cores compute in the dtype; by default, whether ``flops``
            has a rate for it.
        cublas_workspace_bytes: What matrix products keep on the device for each thread.
    """

    name: Text
    memory_bytes: Annotated[int, Keywords(minimum=1 << 20)]
    flops: Annotated[Mapping[FlopsType, Rate], Keywords(required=["float32"])]
    memory_bandwidth: Rate
    link_bandwidth: Rate
    source: Text
    aliases: tuple[Text, ...] = ()
    marketing_gb: Rate | None = None
    memory_source: Annotated[str | None, Keywords(type="string")] = None
    link: Link = "pcie"
    native_bf16: Annotated[bool | None, Keywords(type="boolean")] = None
    native_fp8: Annotated[bool | None, Keywords(type="boolean")] = None
    cublas_workspace_bytes: Count = 8_519_680


@dataclass(frozen=True, slots=True)
class GpuFile:
    """Descriptions of GPUs: what the driver reports as memory, peak rates of the datasheet (dense), and
    where the figures come from. Entries of a file given by --gpus-file come before the shipped ones."""

    gpus: Annotated[tuple[GpuEntry, ...], Keywords(minItems=1)]
    version: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """Nodes of equal GPUs a run could be trained on: an offer that plan --cluster compares with others.

    Attributes:
        gpus_per_node: GPUs (CPU clusters: processes) in each node.
        gpu: A catalogue name, or a GPU described in place; leave it out (or null) for a CPU cluster.
        nodes: Number of nodes.
        name: What you call this offer.
        inter_node_bandwidth: Per GPU and direction between nodes: bytes per second, or text such as 50 GB/s
            or 400 Gbit/s.
        host_memory: Host memory of one node: bytes, or text such as 2 TiB.
        price_per_gpu_hour: In the currency you compare by.
        environment: NCCL settings to export on launch.
    """

    gpus_per_node: Positive
    gpu: Text | GpuEntry | None = None
    nodes: Positive = 1
    name: Annotated[str | None, Keywords(type="string", minLength=1)] = None
    inter_node_bandwidth: Rate | RateText | None = None
    host_memory: Positive | SizeText | None = None
    price_per_gpu_hour: Annotated[float, Keywords(minimum=0)] | None = None
    environment: Mapping[str, str | float | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """How fast attention's kernels run at one head size. Fractions of the dtype's peak, at long sequences.

    Attributes:
        head_size: Elements of a head; a kernel takes the rate of the next larger size.
        forward, backward: Fraction of the peak, of the FLOPs that the kernel does not skip.
    """

    head_size: Positive
    forward: Fraction
    backward: Fraction


KernelKind = Literal["product", "attention", "attention_backward", "elementwise", "update"]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """How long one kernel of a size took on a device.

    Attributes:
        kind: A matrix product, an attention kernel, an elementwise operator (the average over those of norms,
            activations, residuals and rotary positions), or an optimizer's update.
        dtype: Of what it reads.
        seconds: Of one call, with its launch.
        bytes: Read and written.
        flops: Floating-point operations; causal attention counts whole. 0 for what moves memory.
        head_size, queries: Of attention: elements of a head, and positions.
        causal: Whether attention masks causally by itself.
    """

    kind: KernelKind
    dtype: str
    seconds: Annotated[float, Keywords(exclusiveMinimum=0)]
    bytes: Positive
    flops: Annotated[float, Keywords(minimum=0)] = 0.0
    head_size: Count = 0
    queries: Count = 0
    causal: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Figures that measurements replace, in bytes, seconds, and fractions of the datasheet's rates.

    Attributes:
        name: What the table calls it.
        match: A catalogue name, a link kind (nvlink, pcie, xgmi), cpu, or `*`.
        context_bytes: CUDA context and loaded kernels of one process.
        communicator_bytes: NCCL's buffers for the first communicator.
        further_communicator_bytes: NCCL's buffers for each further communicator.
        matmul_efficiency: Fraction of the dtype's peak rate in large matrix products.
        memory_efficiency: Fraction of the memory bandwidth in elementwise operations.
        link_efficiency, network_efficiency: Fraction of the link's rate in large collectives.
        link_latency, network_latency: Seconds per hop of a ring.
        link_ramp, network_ramp: Seconds that a large message takes beyond its latency and its bytes at the
            sustained rate, because small ones do not fill the link.
        link_ramp_bytes, network_ramp_bytes: Bytes from which on a message takes half of that.
        switch_reduction: Bandwidth of an all-reduce in the switches of a node, over that of a ring.
        kernel_latency: Seconds the host needs to launch one operator.
        reserved_ratio: Reserved over allocated bytes, if the allocator is not replayed; null: as simulated.
        measured: Whether the figures come from ``fsdptool calibrate``.
        source: Where the figures come from.
        architecture: Generation of GPUs whose rates the row holds; empty: not known.
        attention: Rates of torch's flash kernel by head size; empty: those of matrix products.
        efficient_attention: The memory-efficient kernel's rate, as a fraction of the flash kernel's.
        cache_bytes: Last-level cache in which elementwise operators find what was just written; 0: no gain.
        cached_speedup: How much faster an operator runs whose traffic fits into that cache.
        compiled_traffic: Fraction of the eager elementwise traffic that compiled blocks move.
        overlap_slowdown: Fraction of the time of a hidden collective by which it delays compute.
        node_slowdown: Fraction by which a step is longer for each doubling of the nodes.
        throughput_range: Published over predicted throughput, 10th and 90th percentile; null: not known.
        kernels: What ``fsdptool calibrate --probe`` measured: plans take the time of an operator from those
            of the nearest sizes, instead of the datasheet's rates. Such a row suits its own device alone.
    """

    name: str
    match: str
    context_bytes: Count
    communicator_bytes: Count
    further_communicator_bytes: Count
    matmul_efficiency: Fraction
    memory_efficiency: Fraction
    link_efficiency: Fraction
    network_efficiency: Fraction
    link_latency: Seconds
    network_latency: Seconds
    kernel_latency: Seconds
    reserved_ratio: Annotated[float, Keywords(minimum=1)] | None = None
    measured: bool = False
    source: str = ""
    architecture: str = ""
    attention: tuple[AttentionRate, ...] = ()
    efficient_attention: Fraction = 1.0
    cache_bytes: Count = 0
    cached_speedup: Annotated[float, Keywords(minimum=1)] = 1.0
    compiled_traffic: Fraction = 1.0
    link_ramp: Seconds = 0.0
    link_ramp_bytes: Count = 0
    network_ramp: Seconds = 0.0
    network_ramp_bytes: Count = 0
    switch_reduction: Annotated[float, Keywords(minimum=1)] = 1.0
    overlap_slowdown: Annotated[float, Keywords(minimum=0)] = 0.0
    node_slowdown: Annotated[float, Keywords(minimum=0)] = 0.0
    throughput_range: tuple[float, float] | None = None
    kernels: tuple[KernelTime, ...] = ()


@dataclass(frozen=True, slots=True)
class MachineFile:
    """What a trace cannot show: context, communicators and achieved efficiencies; written by fsdptool
    calibrate, read by plan --machine."""

    machines: Annotated[tuple[Machine, ...], Keywords(minItems=1)]
    version: Literal[1] = 1
