"""What collectives allocate, compared with torch's own kernels."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdptool.memory.simulation.collectives import DEVICES, copies_of_gradients, reduction, weigh
from fsdptool.records.anatomy import Parameter
from fsdptool.records.sharding import Unit, UnitPlan

RANKS = 4
UNIT = Unit("layer", "block", ("layer",), "Layer", ())
EVEN, UNEVEN = ((8, 100), (16, 50), (8,)), ((6, 100), (15, 50), (9,))


def plan_of(computed: str, reduced: str | None) -> UnitPlan:
    return UnitPlan("native", (), computed, reduced, None, master_dtype="float32")


def parameter(shape: tuple[int, ...]) -> Parameter:
    return Parameter(f"weight{shape}", shape, "float32")


def allocated_while_copying(gradients: list[torch.Tensor], into: torch.Tensor) -> int:
    """Return the most that ``_chunk_cat`` holds besides its inputs and its output."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        torch._chunk_cat(gradients, 0, RANKS, out=into.view(RANKS, -1))
    results = profiler.profiler.kineto_results
    events = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    level = peak = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        level += size
        peak = max(peak, level)
    return peak


@pytest.mark.parametrize("shapes", [EVEN, UNEVEN])
@pytest.mark.parametrize(
    ("computed", "reduced"), [("bfloat16", "float32"), ("bfloat16", None), ("float32", None)]
)
def test_gradients_are_padded_and_cast_out_of_place_on_a_cpu(
    shapes: tuple[tuple[int, ...], ...], computed: str, reduced: str | None
) -> None:
    plan = plan_of(computed, reduced)
    weights = [weigh(parameter(shape), UNIT, plan, RANKS) for shape in shapes]
    buffers = reduction(weights, plan, DEVICES["cpu-fake"])
    gradients = [torch.ones(shape, dtype=getattr(torch, computed)) for shape in shapes]
    into = torch.empty(sum(w.whole for w in weights), dtype=getattr(torch, reduced or computed))
    assert buffers.input.total == into.nbytes
    copies = buffers.copies.total if buffers.copies is not None else 0
    assert copies == allocated_while_copying(gradients, into)


@pytest.mark.parametrize(
    ("computed", "reduced", "copied"),
    [("bfloat16", "float32", False), ("float16", "float32", True), ("float16", None, False)],
)
def test_a_gpu_copies_only_what_its_kernel_cannot_cast(
    computed: str, reduced: str | None, copied: bool
) -> None:
    """bfloat16 to float32 is fused; float16 to float32 is not, and pads uneven gradients first."""
    plan = plan_of(computed, reduced)
    uneven = [weigh(parameter(shape), UNIT, plan, RANKS) for shape in UNEVEN]
    copies = copies_of_gradients(uneven, plan, DEVICES["cuda"])
    padded = tuple(w.whole * 2 for w in uneven)
    assert (copies.sizes if copies is not None else ()) == (padded if copied else ())
    even = [weigh(parameter(shape), UNIT, plan, RANKS) for shape in EVEN]
    assert copies_of_gradients(even, plan, DEVICES["cuda"]) is None
