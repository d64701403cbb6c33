"""How long a collective takes: rings by latency and bandwidth, within and across nodes.

The bandwidth terms are NCCL's bus-bandwidth definitions (nccl-tests, ``doc/PERFORMANCE.md``): a ring
all-gather or reduce-scatter of B bytes over N ranks moves B x (N-1)/N through every link, an
all-reduce twice that.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdptool.planning.machine import Machine
from fsdptool.records.cluster import Cluster

ASSUMED_NETWORK = {"nvlink": 50e9, "xgmi": 50e9, "pcie": 12.5e9}
"""Bytes per second per GPU between nodes when nobody says: 400 Gbit/s per GPU on machines of the
NVLink class, 100 Gbit/s otherwise."""


@dataclass(frozen=True, slots=True)
class Ring:
    """One process group as its slowest link sees it. Bandwidth in bytes per second, latency in seconds."""

    ranks: int
    bandwidth: float
    latency: float

    def gather(self, size: float) -> float:
        """Return seconds to all-gather (or reduce-scatter) ``size`` bytes in all."""
        if self.ranks < 2 or size <= 0:
            return 0.0
        return size * (self.ranks - 1) / self.ranks / self.bandwidth + self.latency

    def reduce(self, size: float) -> float:
        """Return seconds to all-reduce ``size`` bytes."""
        if self.ranks < 2 or size <= 0:
            return 0.0
        return 2 * size * (self.ranks - 1) / self.ranks / self.bandwidth + 2 * self.latency


def make_ring(cluster: Cluster, machine: Machine, *, ranks: int, stride: int = 1) -> Ring:
    """Return the ring of ``ranks`` processes whose ranks lie ``stride`` apart.

    A group that spans nodes runs one ring per GPU of the node it covers, each over its own network
    card, so the node's cards add up until the in-node link is the bottleneck.

    Args:
        cluster: Where the group runs; nodes are filled with consecutive ranks.
        machine: Efficiencies and latencies.
        ranks: Size of the group.
        stride: Distance of neighbouring members (inner mesh dimensions have stride 1).
    """
    if cluster.gpu is None or ranks < 2:
        return Ring(ranks, 1e9, 0.0)
    link = cluster.gpu.link_bandwidth * machine.link_efficiency
    per_node = max(cluster.gpus_per_node // stride, 1)
    nodes = -(-ranks // per_node)
    if nodes == 1:
        return Ring(ranks, link, (ranks - 1) * machine.link_latency)
    card = network_bandwidth(cluster) * machine.network_efficiency
    local = min(per_node, ranks)
    bandwidth = min(link, local * card) if local > 1 else card
    latency = (nodes - 1) * machine.network_latency + (ranks - nodes) * machine.link_latency
    return Ring(ranks, bandwidth, latency)


def network_bandwidth(cluster: Cluster) -> float:
    """Return bytes per second per GPU between nodes: as given, or assumed by the GPU's link."""
    if cluster.inter_node_bandwidth is not None:
        return cluster.inter_node_bandwidth
    return ASSUMED_NETWORK[cluster.gpu.link] if cluster.gpu is not None else 1e9
