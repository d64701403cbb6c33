"""How long a step takes: compute per unit, and FSDP2's overlap of gathers and compute.

An estimate, with every assumption in docs/explanation/time.md. Compute comes from
:mod:`fsdptool.planning.time.step_time`. The bandwidth terms of collectives are NCCL's bus-bandwidth
definitions (nccl-tests, ``doc/PERFORMANCE.md``): a ring all-gather or reduce-scatter of B bytes over N
ranks moves B x (N-1)/N through every link, an all-reduce twice that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from fsdptool.planning.time.measured_kernels import measured_traffic
from fsdptool.planning.time.operator_time import memory_rate, peak_flops
from fsdptool.records.cluster import Cluster, Machine
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import StepBound

ASSUMED_NETWORK = {"nvlink": 50e9, "xgmi": 50e9, "pcie": 12.5e9}
"""Bytes per second per GPU between nodes when none is given: 400 Gbit/s per GPU on machines of the
NVLink class, 100 Gbit/s otherwise."""


@dataclass(frozen=True, slots=True)
class Ring:
    """One process group as its slowest link sees it.

    A collective takes ``latency + moved / bandwidth + ramp * moved / (moved + ramp_bytes)``: small messages
    do not fill the link, so large ones take a constant longer than their bytes at its rate.

    Attributes:
        ranks: Members.
        bandwidth: Bytes per second that large messages reach.
        latency: Seconds of the smallest message.
        ramp: Seconds that a large message takes beyond both.
        ramp_bytes: Moved bytes from which on a message takes half of that.
        reduction: All-reduce bandwidth over that of the ring: above 1 where switches add (NVLink SHARP).
    """

    ranks: int
    bandwidth: float
    latency: float
    ramp: float = 0.0
    ramp_bytes: float = 0.0
    reduction: float = 1.0

    def gather(self, size: float) -> float:
        """Return seconds to all-gather (or reduce-scatter) ``size`` bytes, total over the ranks."""
        return self._seconds(size, self.bandwidth)

    def reduce(self, size: float) -> float:
        """Return seconds to all-reduce ``size`` bytes."""
        return 2 * self._seconds(size, self.bandwidth * self.reduction)

    def _seconds(self, size: float, bandwidth: float) -> float:
        if self.ranks < 2 or size <= 0:
            return 0.0
        moved = size * (self.ranks - 1) / self.ranks
        return moved / bandwidth + self.latency + self.ramp * moved / (moved + self.ramp_bytes)


_SWITCHED = 5
"""GPUs of a node from which on NCCL's all-reduce adds in the switches: 5 H200, 6 B200 (S. Bekman,
ml-engineering, network/README.md)."""


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
        latency = (ranks - 1) * machine.link_latency
        reduction = machine.switch_reduction if ranks >= _SWITCHED else 1.0
        return Ring(ranks, link, latency, machine.link_ramp, machine.link_ramp_bytes, reduction)
    card = network_bandwidth(cluster) * machine.network_efficiency
    local = min(per_node, ranks)
    bandwidth = min(link, local * card) if local > 1 else card
    latency = (nodes - 1) * machine.network_latency + (ranks - nodes) * machine.link_latency
    return Ring(ranks, bandwidth, latency, machine.network_ramp, machine.network_ramp_bytes)


def network_bandwidth(cluster: Cluster) -> float:
    """Return bytes per second per GPU between nodes: as given, or assumed by the GPU's link."""
    if cluster.inter_node_bandwidth is not None:
        return cluster.inter_node_bandwidth
    return ASSUMED_NETWORK[cluster.gpu.link] if cluster.gpu is not None else 1e9


_HOST_LINK = 25e9
"""Bytes per second between host and device memory, pinned: PCIe Gen4 x16 as achieved."""

_HOST_OPTIMIZER = 8e9
"""Bytes per second one rank's optimizer moves through host memory."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One unit in the order forward visits it: its collectives and its work.

    Attributes:
        gather_bytes: Unsharded bytes in the dtype that is gathered.
        reduce_bytes: Unsharded bytes of trainable gradients in the reduce dtype.
        shard_reduce_bytes: One rank's shard of those (what HSDP all-reduces).
        backward_ranks: Ranks backward gathers the unit over: the shard group, fewer after an integer
            reshard, 1 if forward's gather is kept or backward needs no parameters.
        forward, backward: Seconds of compute for one micro-batch; backward includes recomputation.
        exchanged: Bytes of keys and values gathered from the ranks that share a sequence, per forward.
        exchanges: How often backward moves as many: their gradients, and again where it recomputes.
        summed_forward, summed_backward: Seconds of sums over the tensor-parallel group, or of the
            all-to-alls of an expert-parallel one.
        experts: Whether it holds experts that a group shares out: it is sharded over the ranks that hold
            the same ones.
        reordered_bytes: Unsharded bytes of what is not sharded along dimension 0, in the parameter dtype:
            they are copied once more when they are gathered, and when their gradients are reduced.
        hosted_bytes: Bytes of activations that forward copies to the host and backward copies back, on a
            stream of their own: a block takes as long as it computes, or as its copy.
        narrowed: Elements that are gathered in 8 instead of 16 bits.
        launching: Seconds of ``forward`` and ``backward`` in which the GPU waits for the host.
    """

    gather_bytes: float
    reduce_bytes: float
    shard_reduce_bytes: float
    backward_ranks: int
    forward: float
    backward: float
    exchanged: int = 0
    exchanges: int = 1
    summed_forward: float = 0.0
    summed_backward: float = 0.0
    experts: bool = False
    reordered_bytes: float = 0.0
    hosted_bytes: int = 0
    narrowed: float = 0.0
    launching: float = 0.0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one optimizer step on the slowest rank, and where they go.

    ``compute`` is busy time, ``exposed_communication`` what no compute hid, ``offload`` the traffic
    to host memory, ``optimizer`` the update, ``contention`` what hidden collectives and further nodes
    delay it by. ``group_communication`` is the part of the exposed one that ranks wait for before their next
    operator, which nothing can hide: sums of divided layers, all-to-alls of experts, exchanges of sequences.
    ``launches`` is the part of compute in which the GPU waits for the host to launch kernels.
    """

    seconds: float
    compute: float
    communication: float
    exposed_communication: float
    optimizer: float
    offload: float
    contention: float = 0.0
    group_communication: float = 0.0
    launches: float = 0.0

    @property
    def bound(self) -> StepBound:
        """What takes most of the step."""
        parts: dict[StepBound, float] = {
            "compute": self.compute - self.launches,
            "host": self.launches,
            "communication": self.exposed_communication,
            "optimizer": self.optimizer,
            "offload": self.offload,
        }
        return max(parts, key=lambda name: parts[name])

    def parts(self) -> dict[str, float]:
        """Return where the time goes, by name."""
        return {name: value for name, value in asdict(self).items() if name != "seconds"}


@dataclass(frozen=True, slots=True)
class Run:
    """Everything the schedule depends on besides the stages.

    Attributes:
        accumulation: Forwards per step.
        reduce_each: Whether every micro-batch reduces its gradients (else only the last).
        prefetch: FSDP units to prefetch.
        optimizer_bytes: Bytes one rank's update moves through memory.
        optimizer_operators: Kernels of the update.
        optimizer_flops: Matrix products of one rank's update, in bfloat16.
        optimizer_exchanged: Bytes it sends to the ranks that share a copy.
        offloaded_bytes: Shard bytes that cross to the host and back in a step.
        optimizer_tensors: Parameters that it updates.
        summed_bytes: Bytes of gradients that plain data parallelism sums while the last backward runs.
    """

    accumulation: int
    reduce_each: bool
    prefetch: int
    optimizer_bytes: float
    optimizer_operators: int
    optimizer_flops: float = 0.0
    optimizer_exchanged: float = 0.0
    offloaded_bytes: float = 0.0
    optimizer_tensors: int = 1
    summed_bytes: float = 0.0


_BUCKET = 25 << 20
"""Bytes of gradients that plain data parallelism sums at once, the last ones when backward has ended (torch
2.13, ``nn/parallel/distributed.py``: ``bucket_cap_mb``)."""


def time_step(
    stages: Sequence[Stage],
    run: Run,
    mesh: ParallelDims,
    cluster: Cluster,
    machine: Machine,
    *,
    teacher: Sequence[Stage] = (),
) -> StepTime | None:
    """Return the time of one optimizer step; None on CPU clusters, whose rates are not published.

    Args:
        stages: Units in forward order.
        run: The rest of the schedule.
        mesh: Resolved mesh.
        cluster: The hardware.
        machine: Achieved efficiencies.
        teacher: Units that run forward, and forward only, before every forward of ``stages``.
    """
    gpu = cluster.gpu
    if gpu is None:
        return None
    # Ranks of a tensor- or expert-parallel group are neighbours; all other groups take one rank in so many.
    strides = {False: mesh.tp, True: mesh.ep}
    shards = {
        experts: make_ring(
            cluster, machine, ranks=mesh.sharding_ranks(experts=experts), stride=strides[experts]
        )
        for experts in {False, *(stage.experts for stage in (*stages, *teacher))}
    }
    shard = shards[False]
    replicas = make_ring(cluster, machine, ranks=mesh.dp_replicate, stride=mesh.stride("dp_replicate"))
    context = make_ring(cluster, machine, ranks=mesh.cp, stride=mesh.tp)
    sizes = {(stage.backward_ranks, stage.experts) for stage in stages}
    rings = {(n, kind): make_ring(cluster, machine, ranks=n, stride=strides[kind]) for n, kind in sizes}
    # Attention waits for what it exchanges, and the operator behind a sum for the sum: nothing hides them.
    moved = [context.gather(stage.exchanged) for stage in stages]
    inward = [stage.summed_forward + seconds for stage, seconds in zip(stages, moved, strict=True)]
    outward = [
        stage.summed_backward + stage.exchanges * seconds
        for stage, seconds in zip(stages, moved, strict=True)
    ]
    copies = [stage.hosted_bytes / _HOST_LINK for stage in stages]
    forward = [
        max(stage.forward + seconds, copy)
        for stage, seconds, copy in zip(stages, inward, copies, strict=True)
    ]
    backward = [
        max(stage.backward + seconds, copy)
        for stage, seconds, copy in zip(stages, outward, copies, strict=True)
    ]
    gathers = [shards[stage.experts].gather(stage.gather_bytes) for stage in stages]
    again = [rings[stage.backward_ranks, stage.experts].gather(stage.gather_bytes) for stage in stages]
    reduces = [
        shards[stage.experts].gather(stage.reduce_bytes) + replicas.reduce(stage.shard_reduce_bytes)
        for stage in stages
    ]
    # Micro-batches are alike, but for the last where only it reduces.
    whole = _play(forward, backward, gathers, again, reduces, run.prefetch)
    kept = whole
    if not run.reduce_each and run.accumulation > 1:
        kept = _play(forward, backward, gathers, again, [0.0] * len(stages), run.prefetch)
    busy = sum(stage.forward + stage.backward for stage in stages)
    shared = sum(inward) + sum(outward)
    teaching = _teacher_time(teacher, shard, context, run.prefetch)
    total = compute = communication = hidden = 0.0
    for times, (seconds, link) in ((run.accumulation - 1, kept), (1, whole)):
        total += times * (seconds + teaching.seconds)
        compute += times * (busy + teaching.compute)
        communication += times * (link + teaching.communication + shared)
        hidden += times * max(link + shared - (seconds - busy), 0.0)
    summing = replicas.reduce(run.summed_bytes)
    waiting = max(summing - sum(backward), replicas.reduce(min(run.summed_bytes, _BUCKET)))
    total, communication, hidden = total + waiting, communication + summing, hidden + summing - waiting
    tensors = max(run.optimizer_tensors, 1)
    each = measured_traffic("update", run.optimizer_bytes / tensors, machine)
    update = max(
        run.optimizer_bytes / memory_rate(gpu, machine) if each is None else tensors * each,
        run.optimizer_operators * machine.kernel_latency,
        run.optimizer_flops / (peak_flops(gpu, "bfloat16") * machine.matmul_efficiency),
    )
    if run.optimizer_exchanged and shard.ranks > 1:
        update += run.optimizer_exchanged / shard.bandwidth + shard.latency
    offload = 0.0
    if run.offloaded_bytes:
        update = run.optimizer_bytes / _HOST_OPTIMIZER
        offload = run.offloaded_bytes / _HOST_LINK
    contention = machine.overlap_slowdown * hidden
    contention += machine.node_slowdown * math.log2(cluster.nodes) * (total + update + offload + contention)
    return StepTime(
        seconds=total + update + offload + contention,
        compute=compute,
        communication=communication,
        exposed_communication=max(total - compute, 0.0),
        optimizer=update,
        offload=offload,
        contention=contention,
        group_communication=shared * run.accumulation,
        launches=run.accumulation * sum(stage.launching for stage in (*stages, *teacher)),
    )


@dataclass(frozen=True, slots=True)
class _TeacherTime:
    """A teacher's forward: its length, and how busy compute and links are in it. Seconds."""

    seconds: float
    compute: float
    communication: float


def _teacher_time(stages: Sequence[Stage], shard: Ring, context: Ring, prefetch: int) -> _TeacherTime:
    moved = [context.gather(stage.exchanged) + stage.summed_forward for stage in stages]
    forward = [stage.forward + seconds for stage, seconds in zip(stages, moved, strict=True)]
    gathers = [shard.gather(stage.gather_bytes) for stage in stages]
    _, seconds = _play_forward(forward, gathers, prefetch)
    return _TeacherTime(seconds, sum(stage.forward for stage in stages), sum(gathers) + sum(moved))


def _play_forward(forward: Sequence[float], gathers: Sequence[float], prefetch: int) -> tuple[float, float]:
    """Play a forward from time 0; return when the link and when compute is done with it."""
    link = compute = 0.0
    starts: list[float] = []
    for index, seconds in enumerate(forward):
        allowed = starts[index - prefetch] if index >= prefetch else 0.0
        link = max(link, allowed) + gathers[index]
        start = max(compute, link) if gathers[index] else compute
        starts.append(start)
        compute = start + seconds
    return link, compute


def _play(
    forward: Sequence[float],
    backward: Sequence[float],
    gathers: Sequence[float],
    regathers: Sequence[float],
    reduces: Sequence[float],
    prefetch: int,
) -> tuple[float, float]:
    """Play one micro-batch on a compute stream and one link; return its length and the link's busy time.

    torch 2.13: a gather waits for the copy-out of the unit ``prefetch`` places before it
    (``_fsdp_param_group.py:_wait_all_gather_streams_on_event``), and a unit's reduce-scatter is
    waited for before the next one is issued (``_fsdp_collectives.py:foreach_reduce``).
    """
    link, compute = _play_forward(forward, gathers, prefetch)
    busy = sum(gathers)
    order = range(len(forward) - 1, -1, -1)
    again = [regathers[index] for index in order]
    ready = [0.0] * len(again)
    issued = 0
    reduced_until = 0.0
    for place, index in enumerate(order):
        # Gathers ahead are issued before this unit computes, so before its reduce-scatter.
        while issued <= min(place + prefetch, len(again) - 1) if place else issued < 1:
            if again[issued]:
                link = max(link, compute) + again[issued]
                busy += again[issued]
                ready[issued] = link
            issued += 1
        compute = max(compute, ready[place]) + backward[index]
        if reduces[index]:
            compute = max(compute, reduced_until)
            link = max(link, compute) + reduces[index]
            busy += reduces[index]
            reduced_until = link
    return max(compute, reduced_until), busy
