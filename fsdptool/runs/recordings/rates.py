"""Rates of a GPU and its links that traces of a run can decide. Torch-free.

A collective also waits for the rank that calls it last, so of each size the shortest call counts. What the
host needs to launch an operator is not told: the profiler itself slows it down.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdptool.runs.recordings.traces import KinetoTrace, Product

_SECOND = 1e6
_LARGE_PRODUCT = 1 << 33
"""FLOPs from which on a product shows the rate of large ones."""

_LARGE_MESSAGE, _SMALL_MESSAGE = 16 << 20, 64 << 10
"""Bytes from which on a collective shows the rate of its links, and up to which it shows their latency."""

_LEAST = 5
"""Events that a rate rests on at least."""

_RING = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""How often a ring sends each rank's share of the bytes to each other rank."""


@dataclass(frozen=True, slots=True)
class TracedRate:
    """A figure and the number of events that it rests on.

    Attributes:
        value: FLOP/s, bytes per second, or seconds per hop of a ring.
        events: Products, copies or collectives.
    """

    value: float
    events: int


@dataclass(frozen=True, slots=True)
class TracedRates:
    """What traces of GPUs of one kind say; None where they have too few events.

    Attributes:
        products: FLOP/s of large products in bf16 or fp16: all their FLOPs over all their time.
        copies: Bytes per second read and written by the fastest large copy within a GPU.
        link: Bytes per second that each rank sends in the fastest large collective of one machine.
        hop: Seconds per hop of the ring in the shortest small collective of one machine.
    """

    products: TracedRate | None
    copies: TracedRate | None
    link: TracedRate | None
    hop: TracedRate | None


def traced_rates(traces: Sequence[KinetoTrace], *, cache_bytes: int = 0) -> TracedRates:
    """Return the rates that traces can decide.

    Args:
        traces: Of one rank or several, of GPUs of one kind.
        cache_bytes: Last-level cache of the GPU: smaller copies do not reach its memory.
    """
    products = [item for trace in traces for item in _products(trace)]
    least = max(4 * cache_bytes, 64 << 20)
    copies = [
        2 * item.bytes * _SECOND / (item.end - item.start)
        for trace in traces
        for item in trace.work
        if item.kind == "copy" and item.within and (item.bytes or 0) >= least and item.end > item.start
        if item.bytes is not None
    ]
    links, hops = _collectives(traces)
    total = sum(seconds for _, seconds in products)
    return TracedRates(
        _rate(sum(flops for flops, _ in products) / total if total else 0.0, len(products)),
        _rate(max(copies, default=0.0), len(copies)),
        _rate(max(links, default=0.0), len(links)),
        _rate(min(hops, default=0.0), len(hops)),
    )


def _rate(value: float, events: int) -> TracedRate | None:
    return TracedRate(value, events) if events >= _LEAST and value > 0 else None


def _products(trace: KinetoTrace) -> Iterator[tuple[float, float]]:
    """Yield FLOPs and seconds of the large products in half precision, by the kernels that each launched."""
    by_thread: dict[str, list[Product]] = defaultdict(list)
    for item in trace.products:
        by_thread[item.thread].append(item)
    starts = {}
    for thread, items in by_thread.items():
        items.sort(key=lambda item: item.start)
        starts[thread] = [item.start for item in items]
    seconds: dict[int, float] = defaultdict(float)
    flops: dict[int, float] = {}
    for work in trace.work:
        launch = trace.launches.get(work.launch) if work.launch is not None else None
        if work.kind != "kernel" or launch is None or launch[1] not in starts:
            continue
        index = bisect_right(starts[launch[1]], launch[0]) - 1
        product = by_thread[launch[1]][index] if index >= 0 else None
        if product is not None and launch[0] <= product.end and product.half:
            seconds[id(product)] += (work.end - work.start) / _SECOND
            flops[id(product)] = product.flops
    for key, size in flops.items():
        if size >= _LARGE_PRODUCT:
            yield size, seconds[key]


def _collectives(traces: Sequence[KinetoTrace]) -> tuple[list[float], list[float]]:
    """Return rates of large collectives and seconds per hop of small ones, within one machine."""
    links: list[float] = []
    hops: list[float] = []
    if not any(map(_on_one_machine, traces)):
        return links, hops
    for trace in traces:
        for item in trace.work:
            ranks, size, length = item.group_size, item.bytes, item.end - item.start
            if item.operation not in _RING or not ranks or ranks < 2 or not size or length <= 0:
                continue
            steps = _RING[item.operation] * (ranks - 1)
            if size >= _LARGE_MESSAGE:
                links.append(size * steps / ranks * _SECOND / length)
            elif size <= _SMALL_MESSAGE:
                hops.append(length / _SECOND / steps)
    return links, hops


def _on_one_machine(trace: KinetoTrace) -> bool:
    """Say whether all ranks share a machine: launchers then give the last rank the GPU of its number."""
    last = trace.world_size - 1 if trace.world_size else None
    return last is not None and last < trace.gpus and trace.rank == last == trace.device
