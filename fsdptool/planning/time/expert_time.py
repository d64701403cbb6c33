"""Time of the all-to-alls of expert parallelism.

A mixture sends every routed token to the rank that holds its expert and gets its result back: two all-to-alls
in forward (dispatch and combine), two in backward, and the two of forward once more where they are recomputed
(GShard, arXiv:2006.16668, section 3.1). The operator behind each reads what came: nothing hides them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fsdptool.memory.simulation.program import traced_path
from fsdptool.planning.time.overlap import network_bandwidth
from fsdptool.planning.time.step_time import ModuleSeconds, owners_of
from fsdptool.records.cluster import Cluster, Machine
from fsdptool.records.sharding import UnitPlan
from fsdptool.records.trace import Segment, Trace


@dataclass(frozen=True, slots=True)
class AllToAll:
    """An expert-parallel group: neighbouring ranks, each of which sends an equal part to every other one.

    Attributes:
        ranks: Size of the group.
        inside: How many of them share a node.
        link, network: Bytes per second of one GPU inside the node and between nodes.
        latency: Seconds until the first byte of the slowest message.
    """

    ranks: int
    inside: int
    link: float
    network: float
    latency: float

    def seconds(self, size: float) -> float:
        """Return the time of an exchange in which every rank sends ``size`` bytes, its own part included.

        Messages inside a node and between nodes use different links at the same time (nccl-tests,
        ``doc/PERFORMANCE.md``: each rank sends (N-1)/N of its bytes).
        """
        if self.ranks < 2 or size <= 0:
            return 0.0
        near = size * (self.inside - 1) / self.ranks / self.link
        far = size * (self.ranks - self.inside) / self.ranks / self.network
        return max(near, far) + self.latency


def make_all_to_all(cluster: Cluster, machine: Machine, *, ranks: int) -> AllToAll:
    """Return the expert-parallel group of ``ranks`` consecutive ranks."""
    if cluster.gpu is None or ranks < 2:
        return AllToAll(ranks, ranks, 1e9, 1e9, 0.0)
    inside = min(ranks, cluster.gpus_per_node)
    link = cluster.gpu.link_bandwidth * machine.link_efficiency
    network = network_bandwidth(cluster) * machine.network_efficiency
    latency = machine.link_latency + (machine.network_latency if inside < ranks else 0.0)
    return AllToAll(ranks, inside, link, network, latency)


def exchange_sizes(trace: Trace, plan: UnitPlan) -> dict[str, tuple[list[int], list[int]]]:
    """Return the bytes of every all-to-all of a micro-batch: in forward, and in backward, by traced module.

    What comes is the one thing that ``new_empty_strided`` allocates among experts that a group shares out
    (``modeling/expert_parallel.py``), and as large as what is sent where routing is balanced.
    """
    if plan.experts is None:
        return {}
    experts = {traced_path(module.path, trace.repeats) for module in plan.experts.modules}
    sizes: dict[str, tuple[list[int], list[int]]] = {}
    backward = False
    for owner, segment in owners_of(trace):
        backward = backward or segment.marker == "backward"
        path = _among(owner, experts)
        if path is None:
            continue
        came = _allocated(trace, segment)
        if came:
            sizes.setdefault(path, ([], []))[backward].extend(came)
    return sizes


def exchange_seconds(trace: Trace, plan: UnitPlan, group: AllToAll) -> dict[str, ModuleSeconds]:
    """Return what every traced mixture waits for its all-to-alls, recomputation included.

    Before rows are sent, their numbers are, in a message of a few bytes.

    Args:
        trace: The micro-batch of one rank.
        plan: Its units.
        group: The ranks that share out the experts.
    """
    waited = {}
    for path, (forward, backward) in exchange_sizes(trace, plan).items():
        # Forward: numbers, rows, results. Backward: two gradients, and forward's again where recomputed.
        again = max(len(backward) // 2 - len(forward) // 2, 0)
        waited[path] = ModuleSeconds(
            sum(map(group.seconds, forward)) + len(forward) // 2 * group.seconds(1),
            sum(map(group.seconds, backward)) + again * group.seconds(1),
        )
    return waited


def _among(owner: str, experts: Collection[str]) -> str | None:
    """Return the mixture that a module is, or lies in."""
    while owner:
        if owner in experts:
            return owner
        owner = owner.rpartition(".")[0]
    return None


def _allocated(trace: Trace, segment: Segment) -> list[int]:
    numbers = [event - 1 for event in segment.events if event > 0]
    return [trace.sizes[n] for n in numbers if trace.vocabulary[trace.names[n]] == "new_empty_strided"]
