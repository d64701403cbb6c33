"""A traced backward adds gradients in place and writes into zeros where a real backward does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fsdptool.memory.tracing.fake_mode import TracingMode
from fsdptool.memory.tracing.recorder import SegmentRecorder

SIDE = 256
BYTES = SIDE * SIDE * 4


def branches(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return (y * 3 + y * 4 + y * 5).exp().sum()


def one_node_twice(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    return (y * y).sum()


def a_formula(x: torch.Tensor) -> torch.Tensor:
    """Two gradients that the derivative of one operator adds out of place."""
    variance, mean = torch.var_mean(x.sin())
    return variance + mean


def expanded(x: torch.Tensor) -> torch.Tensor:
    """The first gradient is a view of one number, which nothing can be added into."""
    y = x * 2
    return (y + y * 3).sum() + (y * 4).sum() + y.sum()


def held(x: torch.Tensor) -> torch.Tensor:
    """Two tensors have one gradient: neither may change it."""
    y, z = x * 2, x * 3
    return (y + z + y * 4 + z * 5).exp().sum()


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Gradients that arrive as views, which keep what they are views of: a tied head's, for example."""
    y, row = x * 2, torch.ones(SIDE)
    return (y.t() * row).sum() + (y.t() * row).sum()


def rows() -> torch.Tensor:
    return torch.zeros(SIDE // 2, dtype=torch.int64)


def gathered(x: torch.Tensor) -> torch.Tensor:
    return x.gather(1, torch.zeros(SIDE, 2, dtype=torch.int64)).exp().sum()


def gathered_in_16_bits(x: torch.Tensor) -> torch.Tensor:
    """The CPU adds 16-bit numbers in an fp32 copy."""
    return x.bfloat16().gather(1, torch.zeros(SIDE, 2, dtype=torch.int64)).exp().sum()


def indexed(x: torch.Tensor) -> torch.Tensor:
    return x[rows()].exp().sum()


def selected(x: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, rows()).exp().sum()


def largest(x: torch.Tensor) -> torch.Tensor:
    return x.topk(2, -1)[0].exp().sum()


COMPUTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    function.__name__: function
    for function in (
        branches,
        one_node_twice,
        a_formula,
        expanded,
        held,
        transposed,
        gathered,
        gathered_in_16_bits,
        indexed,
        selected,
        largest,
    )
}


def peak_of_a_trace(compute: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Return the largest bytes that are alive in a traced backward."""
    mode = TracingMode()
    with mode:
        x = torch.empty(SIDE, SIDE, requires_grad=True)
    recorder = SegmentRecorder([x], "cpu")
    with mode, recorder:
        loss = compute(x)
        recorder.mark("backward", "")
        recorder.phase("temporary")
        with torch.no_grad():
            loss.backward()
    trace = recorder.trace(profile="cpu", compute_dtype="float32")
    level = peak = 0
    for segment in trace.segments:
        peak = level if segment.marker == "backward" else peak
        for event in segment.events:
            level += trace.sizes[abs(event) - 1] * (1 if event > 0 else -1)
            peak = max(peak, level)
    return peak


def peak_of_a_run(compute: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Return the same of a real backward, from the allocator's own record."""
    x = torch.rand(SIDE, SIDE, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        loss = compute(x)
        with record_function("backward"):
            loss.backward()
    level = peak = 0
    records = watched.profiler.kineto_results.events()
    for record in sorted(records, key=lambda record: record.start_ns()):
        if record.name() == "backward":
            peak = level
        elif record.name() == "[memory]":
            level += record.nbytes()
            peak = max(peak, level)
    return peak


@pytest.mark.parametrize("name", COMPUTED)
def test_a_traced_backward_holds_what_a_real_one_holds(name: str) -> None:
    compute = COMPUTED[name]
    assert peak_of_a_trace(compute) // BYTES == peak_of_a_run(compute) // BYTES
