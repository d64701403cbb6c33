"""The time model: collectives by their formulas, overlap by the schedule, compute by the roofline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fsdptool.memory.simulation.program import traced_path
from fsdptool.planning import Options, make_plan, read_request
from fsdptool.planning.clusters import make_cluster
from fsdptool.planning.hardware import load_gpu, machine_for
from fsdptool.planning.time.operator_time import (
    float8_seconds,
    memory_rate,
    operation_seconds,
    segment_seconds,
)
from fsdptool.planning.time.overlap import Run, Stage, make_ring, time_step
from fsdptool.planning.time.step_time import (
    ModuleSeconds,
    Traffic,
    fill,
    module_costs,
    with_copies,
    without_casts,
)
from fsdptool.planning.time.tensor_time import model_flops, summed_seconds
from fsdptool.records.cluster import Machine
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.sharding import FsdpSettings, UnitPlan
from fsdptool.records.tensor_plan import Placement, SplitModule, TensorPlan
from fsdptool.records.trace import Operation, Repeat, Segment, Trace

GPU = load_gpu("H100-80GB-SXM")
MACHINE = machine_for(GPU)
NODE = make_cluster(GPU, 8)
RUN = Run(accumulation=1, reduce_each=True, prefetch=1, optimizer_bytes=0.0, optimizer_operators=0)


def stages(count: int, *, size: float, forward: float, ranks: int = 8) -> list[Stage]:
    return [
        Stage(
            gather_bytes=size,
            reduce_bytes=2 * size,
            shard_reduce_bytes=2 * size / 8,
            backward_ranks=ranks,
            forward=forward,
            backward=2 * forward,
        )
        for _ in range(count)
    ]


def test_a_gather_moves_its_share_through_every_link() -> None:
    ring = make_ring(NODE, MACHINE, ranks=8)
    bandwidth = GPU.link_bandwidth * MACHINE.link_efficiency
    seconds = 7e9 / bandwidth + 7 * MACHINE.link_latency
    assert ring.gather(8e9) == pytest.approx(seconds + MACHINE.link_ramp, rel=1e-3)
    assert replace(ring, reduction=1.0).reduce(8e9) == pytest.approx(2 * ring.gather(8e9))
    # A message that moves few bytes waits for the latency alone, and half of the ramp is at its bytes.
    assert ring.gather(8e3) == pytest.approx(7 * MACHINE.link_latency, rel=1e-2)
    half = MACHINE.link_ramp_bytes * 8 / 7
    expected = half * 7 / 8 / bandwidth + 7 * MACHINE.link_latency + MACHINE.link_ramp / 2
    assert ring.gather(half) == pytest.approx(expected)
    assert make_ring(NODE, MACHINE, ranks=1).gather(8e9) == 0.0


# Bytes and microseconds of all-reduces (nccl-tests and all_reduce_bench): 8 A100 and 8 H200 of one node
# (S. Bekman, ml-engineering, network/README.md), 2 x 8 H100 at 200 Gbit/s each (create-a3mega,
# ztan-NCCL-test-result).
PUBLISHED = {
    ("A100-80GB-SXM", 1): {
        2**15: 43.8, 2**18: 61.4, 2**21: 101.4, 2**24: 276.6, 2**27: 1327.6, 2**30: 8203.9, 2**33: 64074,
    },
    ("H200-141GB-SXM", 1): {
        2**15: 40.0, 2**18: 39.1, 2**21: 56.9, 2**24: 133.5, 2**27: 584.4, 2**30: 4053.4, 2**33: 31484.6,
    },
    ("H100-80GB-SXM", 2): {2**15: 155.2, 2**18: 167.1, 2**21: 254.0, 2**24: 977.6, 2**27: 1652.2},
}  # fmt: skip


@pytest.mark.parametrize(("name", "nodes"), PUBLISHED)
def test_collectives_take_as_long_as_published_ones_at_every_size(name: str, nodes: int) -> None:
    gpu = load_gpu(name)
    cluster = make_cluster(gpu, 8, nodes, inter_node_bandwidth=25e9 if nodes > 1 else None)
    ring = make_ring(cluster, machine_for(gpu), ranks=8 * nodes)
    for size, microseconds in PUBLISHED[name, nodes].items():
        assert ring.reduce(size) * 1e6 == pytest.approx(microseconds, rel=0.3 if nodes == 1 else 0.5), size


def test_cards_without_peer_access_pass_through_the_host() -> None:
    efficiencies = {
        name: machine_for(load_gpu(name)).link_efficiency
        for name in ("RTX-4090-24GB", "RTX-3090-24GB", "L40S-48GB", "H100-80GB-PCIe", "H100-80GB-SXM")
    }
    assert list(efficiencies.values()) == [0.4, 0.4, 0.6, 0.6, 0.8]
    assert make_ring(NODE, MACHINE, ranks=4).reduction == 1.0 < make_ring(NODE, MACHINE, ranks=8).reduction


def test_across_nodes_the_network_is_the_bottleneck() -> None:
    slow = make_cluster(GPU, 8, 2, inter_node_bandwidth=5e9)
    across = make_ring(slow, MACHINE, ranks=16)
    assert across.bandwidth == pytest.approx(8 * 5e9 * MACHINE.network_efficiency)
    # Replicas of HSDP lie one per node: each has its own card only.
    replicas = make_ring(slow, MACHINE, ranks=2, stride=8)
    assert replicas.bandwidth == pytest.approx(5e9 * MACHINE.network_efficiency)
    assert make_ring(slow, MACHINE, ranks=8).bandwidth == make_ring(NODE, MACHINE, ranks=8).bandwidth


def test_work_is_added_to_collectives_that_stay_as_they_are() -> None:
    collectives = tuple(
        replace(stage, forward=0.0, backward=0.0, exchanges=2, experts=True, reordered_bytes=3e6)
        for stage in stages(2, size=1e9, forward=0.0)
    )
    traffic = Traffic(
        order=(1, 0),
        stages=collectives,
        trained=0.0,
        trained_bytes=0.0,
        tensors=(),
        offloaded=0.0,
        prefetch=1,
    )
    filled = fill(traffic, [ModuleSeconds(1.0, 2.0), ModuleSeconds(3.0, 4.0)])
    assert [(stage.forward, stage.backward) for stage in filled] == [(3.0, 4.0), (1.0, 2.0)]
    assert tuple(replace(stage, forward=0.0, backward=0.0) for stage in filled) == collectives
    # Seconds are divided by the ranks that share a sequence; the bytes between them are not.
    shared = fill(traffic, [ModuleSeconds(1.0, 2.0), ModuleSeconds(3.0, 4.0)], 2, exchanged=[10, 30])
    assert [(stage.forward, stage.exchanged) for stage in shared] == [(1.5, 30), (0.5, 10)]


def test_communication_hides_behind_enough_compute() -> None:
    mesh = ParallelDims(1, 8)
    busy = time_step(stages(32, size=4e8, forward=0.02), RUN, mesh, NODE, MACHINE)
    idle = time_step(stages(32, size=4e8, forward=0.0001), RUN, mesh, NODE, MACHINE)
    assert busy is not None
    assert idle is not None
    assert busy.communication == pytest.approx(idle.communication)
    # Only the first gather and the last reduce-scatter have nothing to hide behind.
    assert busy.exposed_communication < 3 * busy.communication / 32
    assert idle.exposed_communication > 0.9 * idle.communication


def test_further_nodes_delay_the_whole_step() -> None:
    """The traffic of offload to the host, too."""
    run = replace(RUN, offloaded_bytes=25e9, optimizer_bytes=8e9)

    def seconds(slowdown: float) -> float:
        machine = replace(MACHINE, node_slowdown=slowdown)
        timing = time_step(
            stages(4, size=4e8, forward=0.02), run, ParallelDims(1, 16), make_cluster(GPU, 8, 2), machine
        )
        assert timing is not None
        assert timing.offload == pytest.approx(1.0)
        return timing.seconds

    assert seconds(0.1) == pytest.approx(1.1 * seconds(0.0))


def test_copies_to_the_host_take_what_compute_does_not_hide() -> None:
    """Forward of 20 ms and backward of 40 ms a unit, on one rank: copies of 10 ms cost nothing."""
    alone = [
        replace(stage, gather_bytes=0.0, reduce_bytes=0.0, shard_reduce_bytes=0.0, backward_ranks=1)
        for stage in stages(4, size=0.0, forward=0.02)
    ]

    def seconds(copy: float) -> float:
        hosted = [replace(stage, hosted_bytes=round(copy * 25e9)) for stage in alone]
        timing = time_step(hosted, RUN, ParallelDims(1, 1), make_cluster(GPU, 1), MACHINE)
        assert timing is not None
        return timing.seconds

    assert seconds(0.01) == seconds(0.0)
    assert seconds(0.03) - seconds(0.0) == pytest.approx(4 * 0.01)
    assert seconds(0.05) - seconds(0.0) == pytest.approx(4 * (0.03 + 0.01))


@pytest.mark.slow
def test_a_plan_charges_activations_that_move_to_the_host(tmp_path: Path) -> None:
    """Narrow blocks compute less than a copy of their inputs takes."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 512}
    config |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, "vocab_size": 64}))
    found = {}
    for to_host in (False, True):
        settings = FsdpSettings(
            num_processes=1,
            mixed_precision="bf16",
            activation_checkpointing=True,
            activation_checkpointing_offload=to_host,
        )
        options = Options(
            reference=str(tmp_path), config=settings, gpu=GPU.name, gpus=1, sequence_length=512,
            micro_batch=64, search=False,
        )  # fmt: skip
        found[to_host] = make_plan(read_request(options)).candidates[0].step_seconds or 0.0
    assert found[True] > 1.02 * found[False] > 0.0


def test_keeping_units_gathered_saves_their_second_gather() -> None:
    mesh = ParallelDims(1, 8)
    again = time_step(stages(8, size=4e8, forward=0.0), RUN, mesh, NODE, MACHINE)
    kept = time_step(stages(8, size=4e8, forward=0.0, ranks=1), RUN, mesh, NODE, MACHINE)
    assert again is not None
    assert kept is not None
    once = make_ring(NODE, MACHINE, ranks=8).gather(4e8)
    assert again.communication - kept.communication == pytest.approx(8 * once)


def test_unsharded_accumulation_reduces_once() -> None:
    mesh = ParallelDims(1, 8)
    every = time_step(stages(8, size=4e8, forward=0.01), replace(RUN, accumulation=4), mesh, NODE, MACHINE)
    last = time_step(
        stages(8, size=4e8, forward=0.01),
        replace(RUN, accumulation=4, reduce_each=False),
        mesh,
        NODE,
        MACHINE,
    )
    assert every is not None
    assert last is not None
    reduce = make_ring(NODE, MACHINE, ranks=8).gather(8e8)
    assert every.communication - last.communication == pytest.approx(3 * 8 * reduce)


@pytest.mark.parametrize("forward", [0.001, 1.0])
def test_plain_data_parallelism_sums_beside_the_last_backward(forward: float) -> None:
    """What it takes longer than that is exposed; the last bucket is anyhow."""
    work, mesh = stages(8, size=0.0, forward=forward), ParallelDims(8, 1)
    alone, summed = (
        time_step(work, replace(RUN, accumulation=3, summed_bytes=size), mesh, NODE, MACHINE)
        for size in (0.0, 8e9)
    )
    assert alone is not None and summed is not None
    ring = make_ring(NODE, MACHINE, ranks=8)
    exposed = max(ring.reduce(8e9) - 8 * 2 * forward, ring.reduce(25 << 20))
    assert summed.communication - alone.communication == pytest.approx(ring.reduce(8e9))
    assert summed.exposed_communication == pytest.approx(exposed)


def test_a_teacher_runs_before_every_forward() -> None:
    mesh, own = ParallelDims(1, 8), stages(8, size=4e8, forward=0.01)
    teacher = stages(4, size=4e8, forward=0.02)
    run = replace(RUN, accumulation=3)
    alone = time_step(own, run, mesh, NODE, MACHINE)
    taught = time_step(own, run, mesh, NODE, MACHINE, teacher=teacher)
    assert alone is not None
    assert taught is not None
    once = make_ring(NODE, MACHINE, ranks=8).gather(4e8)
    assert taught.compute - alone.compute == pytest.approx(3 * 4 * 0.02)
    assert taught.communication - alone.communication == pytest.approx(3 * 4 * once)
    # Its first gather is exposed, the others hide behind its own compute.
    waited = taught.seconds - taught.contention - alone.seconds + alone.contention
    assert waited == pytest.approx(3 * (4 * 0.02 + once))


def test_cpu_clusters_have_no_time() -> None:
    assert (
        time_step(stages(1, size=1, forward=1), RUN, ParallelDims(1, 2), make_cluster(None, 2), MACHINE)
        is None
    )


def product(flops: float, moved: int) -> Operation:
    return Operation("product", "bfloat16", flops, moved)


def attention(kind: str, *, causal: bool, queries: int = 8192, head_size: int = 128) -> Operation:
    return Operation(kind, "bfloat16", 1e12, 1, head_size, queries, causal)  # type: ignore[arg-type]


def test_a_product_takes_the_larger_of_arithmetic_and_traffic() -> None:
    peak, rate = GPU.flops["bfloat16"] * MACHINE.matmul_efficiency, memory_rate(GPU, MACHINE)
    assert operation_seconds(product(1e12, 1), GPU, MACHINE) == pytest.approx(1e12 / peak)
    assert operation_seconds(product(1.0, 10**9), GPU, MACHINE) == pytest.approx(1e9 / rate)


def test_a_product_in_float8_computes_at_its_peak_and_casts_its_inputs() -> None:
    peak, rate = GPU.flops["float8"] * MACHINE.matmul_efficiency, memory_rate(GPU, MACHINE)
    # Three matrices of 10^8 elements: two are read twice and written in 8 bits.
    wide = product(1e13, 6 * 10**8)
    assert float8_seconds(wide, GPU, MACHINE) == pytest.approx(1e13 / peak + 2e8 * 5 / rate)
    narrow = product(1.0, 6 * 10**8)
    assert float8_seconds(narrow, GPU, MACHINE) == pytest.approx((2e8 * 6 + 2e8) / rate)
    for item, gpu in ((attention("attention", causal=True), GPU), (wide, replace(GPU, native_fp8=False))):
        assert float8_seconds(item, gpu, MACHINE) == operation_seconds(item, gpu, MACHINE)


def test_causal_attention_computes_half_and_every_kernel_has_its_rate() -> None:
    whole = operation_seconds(attention("attention", causal=False), GPU, MACHINE)
    assert whole == pytest.approx(1e12 / (GPU.flops["bfloat16"] * 0.374) * (8192 + 100) / 8192)
    assert operation_seconds(attention("attention", causal=True), GPU, MACHINE) == pytest.approx(
        whole / 2 * (8192 + 300) / (8192 + 100)
    )
    slower = (
        attention("attention", causal=False, head_size=64),
        attention("attention", causal=False, queries=512),
        attention("attention_backward", causal=False),
        replace(attention("attention", causal=False), fused=False),
    )
    assert all(operation_seconds(item, GPU, MACHINE) > whole for item in slower)


def test_a_segment_is_its_products_and_the_rest_of_its_traffic() -> None:
    operations = (product(1e12, 10**8), product(2e12, 10**8))
    segment = Segment("enter", "x", bytes_moved=10**9, kernels=12, operations=(1, 1))
    seconds = [operation_seconds(operation, GPU, MACHINE) for operation in operations]
    device, host = segment_seconds(segment, operations, seconds, GPU, MACHINE)
    products = 2 * seconds[1]
    assert device == pytest.approx(products + 8e8 / memory_rate(GPU, MACHINE))
    assert host == pytest.approx(12 * MACHINE.kernel_latency)
    # Fusion leaves a part of the elementwise traffic, and all of the products.
    fused, launches = segment_seconds(segment, operations, seconds, GPU, MACHINE, traffic=0.5, launches=0.5)
    share = MACHINE.compiled_traffic
    assert fused == pytest.approx(products + share * 8e8 / memory_rate(GPU, MACHINE))
    assert launches == pytest.approx((2 + 10 * share) * MACHINE.kernel_latency)


def test_traffic_that_fits_into_the_cache_is_faster() -> None:
    cached = replace(MACHINE, cache_bytes=10**8, cached_speedup=2.0)

    def seconds(moved: int, kernels: int, machine: Machine) -> float:
        segment = Segment("enter", "x", bytes_moved=moved, kernels=kernels)
        return segment_seconds(segment, (), (), GPU, machine)[0]

    assert seconds(10**9, 10, cached) == pytest.approx(seconds(10**9, 10, MACHINE) / 2)
    assert seconds(15 * 10**7, 1, cached) == pytest.approx(seconds(15 * 10**7, 1, MACHINE) * 0.75)
    assert seconds(10**9, 5, cached) == seconds(10**9, 5, MACHINE)


def test_small_kernels_take_as_long_as_their_launch() -> None:
    segments = (
        Segment("start", ""),
        Segment("enter", "blocks.0", bytes_moved=100, kernels=100),
        Segment("loss", ""),
        Segment("backward", ""),
        Segment("grad_enter", "blocks.0", bytes_moved=10**9, kernels=1),
    )
    costs = module_costs(Trace("cuda", "bfloat16", segments, (), (), (), ()), GPU, MACHINE)
    assert costs["blocks.0"].forward == pytest.approx(100 * MACHINE.kernel_latency)
    assert costs["blocks.0"].backward == pytest.approx(1e9 / memory_rate(GPU, MACHINE))
    waits = 100 * MACHINE.kernel_latency - 100 / memory_rate(GPU, MACHINE)
    assert costs["blocks.0"].launching == pytest.approx(waits)


@pytest.mark.parametrize(("launching", "bound"), [(0.025, "host"), (0.01, "compute"), (0.0, "compute")])
def test_a_step_that_waits_for_its_launches_is_bound_by_the_host(launching: float, bound: str) -> None:
    own = [replace(stage, launching=launching) for stage in stages(4, size=1e6, forward=0.01)]
    step = time_step(own, RUN, ParallelDims(1, 8), NODE, MACHINE)
    assert step is not None
    assert step.launches == pytest.approx(4 * launching * RUN.accumulation)
    assert step.bound == bound


def test_hidden_collectives_and_further_nodes_delay_a_step() -> None:
    mesh = ParallelDims(1, 8)
    own = stages(8, size=4e8, forward=0.02)
    undelayed = replace(MACHINE, overlap_slowdown=0.0, node_slowdown=0.0)
    ideal = time_step(own, RUN, mesh, NODE, undelayed)
    real = time_step(own, RUN, mesh, NODE, MACHINE)
    assert ideal is not None
    assert real is not None
    hidden = real.communication - real.exposed_communication
    assert real.contention == pytest.approx(MACHINE.overlap_slowdown * hidden)
    assert real.seconds == pytest.approx(ideal.seconds + real.contention)
    far = make_cluster(GPU, 8, 16)
    spread = time_step(own, RUN, ParallelDims(1, 128), far, MACHINE)
    alike = time_step(own, RUN, ParallelDims(1, 128), far, replace(MACHINE, node_slowdown=0.0))
    assert spread is not None
    assert alike is not None
    assert spread.seconds == pytest.approx(alike.seconds * (1 + 4 * MACHINE.node_slowdown))


def test_a_unit_copies_what_it_gathers_and_reduces() -> None:
    stage = stages(1, size=4e8, forward=0.01)[0]
    rate = memory_rate(GPU, MACHINE)
    copied = with_copies(stage, 8, GPU, MACHINE)
    assert copied.forward == pytest.approx(0.01 + 8e8 / rate)
    assert copied.backward == pytest.approx(0.02 + (8e8 + 8e8 + 4e8) / rate)
    kept = with_copies(replace(stage, backward_ranks=1), 8, GPU, MACHINE)
    assert kept.backward == pytest.approx(0.02 + (8e8 + 4e8) / rate)
    assert with_copies(stage, 1, GPU, MACHINE) == stage


def test_a_unit_that_gathers_float8_casts_its_rows_and_no_weight_in_a_product() -> None:
    rate, elements, tokens = memory_rate(GPU, MACHINE), 10**8, 10**8
    stage = replace(stages(1, size=float(elements), forward=0.01)[0], reduce_bytes=2e8, narrowed=elements)
    copied = with_copies(stage, 8, GPU, MACHINE)
    # Rows in fp32 are read for their largest entry, scaled, clamped and cast: 21 bytes of each in a gather.
    gather = 2e8 + 21 * elements / 8
    assert copied.forward == pytest.approx(0.01 + (gather + 4 * elements / 8) / rate)
    assert copied.backward == pytest.approx(0.02 + (gather + 2e8 + 2e8) / rate)
    # Three products of a weight, an input and an output; casts of the last two stay.
    three = product(3e13, 2 * (elements + 2 * tokens))
    whole = 3 * float8_seconds(three, GPU, MACHINE)
    left = without_casts(replace(stage, forward=whole / 3, backward=whole * 2 / 3), GPU, MACHINE, 1)
    arithmetic = 3 * 3e13 / (GPU.flops["float8"] * MACHINE.matmul_efficiency)
    assert left.forward + left.backward == pytest.approx(arithmetic + 2 * 5 * 2 * tokens / rate)
    assert without_casts(stage, replace(GPU, native_fp8=False), MACHINE, 1) == stage


def test_sums_over_a_tensor_parallel_group_hide_behind_nothing() -> None:
    mesh, own = ParallelDims(1, 8, tp=8), stages(8, size=4e7, forward=0.02)
    nodes = make_cluster(GPU, 8, 8)
    whole = time_step(own, RUN, mesh, nodes, MACHINE)
    waiting = [replace(stage, summed_forward=0.003, summed_backward=0.007) for stage in own]
    summed = time_step(waiting, RUN, mesh, nodes, MACHINE)
    assert whole is not None
    assert summed is not None
    assert summed.communication - whole.communication == pytest.approx(8 * 0.01)
    assert summed.exposed_communication - whole.exposed_communication == pytest.approx(8 * 0.01)
    assert summed.compute == whole.compute
    # The ranks that shard lie one per node: each has its own network card only, not the node's links.
    inside = time_step(own, RUN, ParallelDims(1, 8), NODE, MACHINE)
    assert inside is not None
    gather = make_ring(nodes, MACHINE, ranks=8, stride=8).gather(4e7)
    assert whole.communication > inside.communication and whole.communication > 16 * gather


def divided_trace() -> Trace:
    """Two blocks of attention (divided, with a whole norm in it) and a whole router, and a divided head."""

    def segment(marker: str, path: str, flops: float, *summed: int) -> Segment:
        return Segment(marker, path, flops={"bfloat16": flops}, summed=summed)  # type: ignore[arg-type]

    segments: list[Segment] = []
    for block in ("layers.0", "layers.1"):
        segments += [segment("enter", f"{block}.attn", 1.0), segment("enter", f"{block}.attn.norm", 10.0)]
        segments += [segment("enter", f"{block}.attn.out", 100.0, 4000)]
        segments += [segment("enter", f"{block}.router", 1000.0)]
    segments += [segment("enter", "head", 1e4), segment("backward", "", 0.0)]
    segments += [segment("grad_enter", "layers.1.attn.out", 0.0, 4000, 8000)]
    return Trace("cuda", "bfloat16", tuple(segments), (), (), (), (), (Repeat("layers", 1, 2, 5, 2),))


def divided_units(size: int) -> UnitPlan:
    blocks = [f"layers.{index}" for index in range(5)]
    tensor = TensorPlan(
        size,
        regions=tuple(f"{block}.attn" for block in blocks),
        modules=(
            *(SplitModule(f"{block}.attn.out", "row") for block in blocks),
            SplitModule("head", "vocabulary"),
        ),
    )
    norms = tuple(Placement(f"{block}.attn.norm.weight", (8,), reason="norm") for block in blocks)
    return UnitPlan("native", (), None, None, None, tensor=tensor, placements=norms)


def test_a_module_waits_for_its_sums_in_forward_and_in_backward() -> None:
    ring = make_ring(NODE, MACHINE, ranks=4)
    waited = summed_seconds(divided_trace(), ring)
    assert set(waited) == {"layers.0.attn.out", "layers.1.attn.out"}
    assert waited["layers.0.attn.out"].forward == ring.reduce(4000)
    assert waited["layers.1.attn.out"].backward == ring.reduce(4000) + ring.reduce(8000)


def test_flops_of_divided_layers_count_once_per_rank_and_others_once() -> None:
    traced = divided_trace()
    one_block = 1.0 + 10.0 + 100.0 + 1000.0
    assert model_flops(traced) == 5 * one_block + 1e4
    assert model_flops(traced, divided_units(4)) == 5 * (4 * 101.0 + 1010.0) + 4e4


def test_blocks_that_were_not_traced_take_the_times_of_those_they_repeat() -> None:
    repeat = Repeat(path="model.layers", period=2, traced=6, total=12, cut=4)
    names = [traced_path(f"model.layers.{index}.mlp", (repeat,)) for index in range(12)]
    assert [name.split(".")[2] for name in names] == ["0", "1", "2", "3"] + ["2", "3"] * 3 + ["4", "5"]
    assert traced_path("model.norm", (repeat,)) == "model.norm"


def test_model_flops_count_untraced_blocks_and_the_teacher_but_no_recomputation() -> None:
    def segment(marker: str, path: str, flops: float, recomputed: float = 0.0) -> Segment:
        return Segment(marker, path, flops={"bfloat16": flops}, recomputed=recomputed)  # type: ignore[arg-type]

    segments = (
        segment("start", "", 1.0),
        segment("enter", "blocks.0", 10.0),
        segment("enter", "blocks.1.linear", 100.0),
        segment("leave", "blocks.1.linear", 1000.0),
        segment("backward", "", 0.0),
        segment("grad_enter", "blocks.1", 3e4, recomputed=1e4),
        segment("grad_enter", "blocks.2", 1e5),
    )
    traced = Trace("cuda", "bfloat16", segments, (), (), (), ())
    assert model_flops(traced) == 1.0 + 10.0 + 1100.0 + 2e4 + 1e5
    # Traced block 1 stands for itself and seven more.
    deep = replace(traced, repeats=(Repeat("blocks", 1, 3, 10, 2),))
    assert model_flops(deep) == 1.0 + 10.0 + 8 * (1100.0 + 2e4) + 1e5
    assert model_flops(replace(deep, teacher=traced)) == model_flops(deep) + model_flops(traced)
