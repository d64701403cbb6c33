"""Seconds of operators on a machine whose kernels were timed (``fsdptool calibrate --probe``).

A rate is interpolated between the nearest timed sizes, weighted by the inverse square of their distance in
powers of two (Shepard 1968). Beyond the timed sizes the nearest rate holds, and no kernel is faster than the
fastest that was timed, whose time is its launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from fsdptool.records.cluster import Cluster, Gpu, KernelKind, KernelTime, Machine
from fsdptool.records.trace import Operation

_NEAREST = 4
_OTHER_HEAD = 2.0
"""How much further a head of twice the size is than twice the positions: vector widths follow it."""


def measured_operation(operation: Operation, machine: Machine) -> float | None:
    """Return the seconds of a product or attention kernel; None where none like it was timed."""
    if not machine.kernels:
        return None
    attends = operation.kind != "product"
    alike = [
        item
        for item in machine.kernels
        if item.kind == operation.kind
        and item.dtype == operation.dtype
        and (not attends or item.causal == operation.causal)
    ]

    def distance(item: KernelTime) -> float:
        work = _apart(item.flops, operation.flops)
        if not attends:
            return (
                work**2
                + _apart(item.flops / item.bytes, operation.flops / max(operation.bytes_moved, 1)) ** 2
            )
        shape = _apart(item.queries, operation.queries) ** 2
        return shape + (_OTHER_HEAD * _apart(item.head_size, operation.head_size)) ** 2 + (work / 8) ** 2

    return _seconds(alike, distance, lambda item: item.flops, operation.flops)


def measured_traffic(kind: KernelKind, size: float, machine: Machine) -> float | None:
    """Return the seconds of a kernel that moves ``size`` bytes; None where none of its kind was timed."""
    alike = [item for item in machine.kernels if item.kind == kind]
    return _seconds(alike, lambda item: _apart(item.bytes, size) ** 2, lambda item: float(item.bytes), size)


def timed_device(cluster: Cluster, machine: Machine) -> Gpu | None:
    """Return whose rates time a step: the cluster's GPU, or the processor whose kernels were timed; or None.

    The rates of a processor are the best that were timed, of which its row gives no fraction.
    """
    if cluster.gpu is not None or not machine.kernels:
        return cluster.gpu
    products = [item for item in machine.kernels if item.kind == "product"]
    moving = [item for item in machine.kernels if item.kind == "elementwise"]
    flops: dict[str, float] = {}
    for item in products:
        flops[item.dtype] = max(flops.get(item.dtype, 0.0), item.flops / item.seconds)
    if not flops or not moving:
        return None
    bandwidth = max(item.bytes / item.seconds for item in moving)
    return Gpu(
        name="cpu",
        memory_bytes=cluster.host_memory_bytes or 0,
        flops={"float32": max(flops.values()), **flops},
        memory_bandwidth=bandwidth,
        link_bandwidth=bandwidth,
        link="pcie",
        native_bf16=False,
        native_fp8=False,
        source=machine.source,
        workspace_bytes=0,
    )


def on_device(cluster: Cluster, device: Gpu) -> Cluster:
    """Return a cluster whose steps are timed by a device."""
    return cluster if cluster.gpu is device else replace(cluster, gpu=device)


def _apart(one: float, other: float) -> float:
    """Return how many powers of two lie between two sizes."""
    return abs(math.log2(max(one, 1e-9) / max(other, 1e-9)))


def _seconds(
    items: Iterable[KernelTime],
    distance: Callable[[KernelTime], float],
    work: Callable[[KernelTime], float],
    amount: float,
) -> float | None:
    """Return the seconds of ``amount`` of work, interpolated; ``distance`` is squared."""
    near = sorted(((distance(item), item) for item in items), key=lambda pair: pair[0])
    if not near:
        return None
    floor = min(item.seconds for _, item in near)
    weighted = [(1 / (apart + 1e-3), math.log(work(item) / item.seconds)) for apart, item in near[:_NEAREST]]
    rate = math.exp(sum(w * value for w, value in weighted) / sum(w for w, _ in weighted))
    return max(amount / rate, floor)
