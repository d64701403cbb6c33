"""What a run is trained on: GPUs, links, hosts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
        marketing_bytes: The size it is sold under, for telling people the difference; or None.
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
    """Nodes of equal GPUs. CPU clusters have ``gpu`` None and are judged by host memory only."""

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
    """What a person calls this offer; None: it is named by its GPUs."""

    @property
    def world_size(self) -> int:
        """GPUs in all."""
        return self.gpus_per_node * self.nodes
