"""What collectives allocate, compared with torch's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fsdptool.memory.simulation.collective_bytes import (
    DEVICES,
    alike,
    copies_of_gradients,
    gradient_buckets,
    reduction,
    rounded_sum,
    unshard_buffers,
    weigh,
)
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
    return allocated_in(lambda: torch._chunk_cat(gradients, 0, RANKS, out=into.view(RANKS, -1)))


def allocated_in(run: Callable[[], object]) -> int:
    """Return the most bytes that are allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
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


LAYERS = tuple(Parameter(f"layer.{n}.weight", (rows, 64), "float32") for n, rows in enumerate((32, 128, 64)))
NORM = Parameter("layer.norm.weight", (64,), "float32")
FLOAT8 = replace(plan_of("bfloat16", "float32"), float8=tuple(layer.fqn for layer in LAYERS))


def test_weights_in_float8_are_gathered_with_one_byte_per_element() -> None:
    weights = [weigh(item, UNIT, FLOAT8, RANKS) for item in (*LAYERS, NORM)]
    buffers = unshard_buffers(weights, FLOAT8, RANKS, True, 1)
    sizes = (32 * 64, 128 * 64, 64 * 64, 64 * 2)
    assert buffers.whole.sizes == sizes
    assert buffers.gather is not None
    assert buffers.gather.sizes == (sum(sizes),)
    assert buffers.cast is not None
    assert buffers.cast.sizes == tuple(size // RANKS for size in sizes)
    # Gradients are those of a run in bf16.
    plain = [weigh(item, UNIT, replace(FLOAT8, float8=()), RANKS) for item in (*LAYERS, NORM)]
    assert reduction(weights, FLOAT8, DEVICES["cuda"]) == reduction(plain, FLOAT8, DEVICES["cuda"])


@pytest.mark.parametrize(
    ("plan", "unit", "ranks"),
    [
        (FLOAT8, UNIT, 1),
        (FLOAT8, UNIT, 3),
        (FLOAT8, replace(UNIT, reshard_after_forward=2), RANKS),
        (FLOAT8, replace(UNIT, kind="experts"), RANKS),
        (replace(FLOAT8, cpu_offload=True), UNIT, RANKS),
    ],
)
def test_weights_that_float8_cannot_gather_are_gathered_as_they_compute(
    plan: UnitPlan, unit: Unit, ranks: int
) -> None:
    item = weigh(LAYERS[0], unit, plan, ranks)
    assert (item.gathered, item.narrow) == (2, False)


def test_casts_to_float8_hold_what_torchao_allocates() -> None:
    pytest.importorskip("torchao", reason="the casts are torchao's")
    from torchao.float8.float8_training_tensor import LinearMMConfig
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    def cast() -> list[object]:
        with torch.no_grad():
            return [item.fsdp_pre_all_gather(None) for item in rows]

    weights = [weigh(item, UNIT, FLOAT8, RANKS) for item in LAYERS]
    rows = [
        WeightWithDynamicFloat8CastTensor(
            torch.ones(item.shard), LinearMMConfig(), torch.float8_e4m3fn, torch.ones(())
        )
        for item in weights
    ]
    cast()
    buffers = unshard_buffers(weights, FLOAT8, RANKS, True, 1)
    assert buffers.scaling is not None
    assert buffers.scaling.total == allocated_in(cast)


@pytest.mark.parametrize("count", [1, 2, 512, 513, 100_003])
def test_inputs_of_many_micro_batches_are_as_many_bytes_in_few_allocations(count: int) -> None:
    sizes = (100, 4096, 513)
    made = alike(sizes, count, 512)
    assert rounded_sum(made, 512) == rounded_sum(sizes, 512) * count
    assert made == sizes * count if count <= 512 else len(made) < 3 * 1024


def test_buckets_of_plain_data_parallelism_are_those_of_its_reducer() -> None:
    shapes = (((1 << 20, 13), "bfloat16"), ((900, 1000), "float32"), ((3, 1 << 20), "bfloat16")) * 3
    parameters = tuple(Parameter(f"weight{n}", shape, dtype) for n, (shape, dtype) in enumerate(shapes))
    frozen = Parameter("frozen", (1 << 20,), "float32", trainable=False)
    plan = UnitPlan("accelerate", (), None, None, None, ignored=(*parameters, frozen))
    buckets = gradient_buckets(plan, grain=1)
    assert buckets is not None
    with torch.device("meta"):
        tensors = [torch.empty(p.shape, dtype=getattr(torch, p.dtype)) for p in reversed(parameters)]
    theirs, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, [1 << 20, 25 << 20])
    assert sorted(buckets.sizes) == sorted(
        sum(tensors[index].nbytes for index in indices) for indices in theirs
    )
