"""Traces of torch's profiler: real ones of other people, and one of two ranks that is written here."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run as fsdptool
from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.values import check
from fsdptool.records.codec import to_json
from fsdptool.records.plan import Candidate, SearchPoint
from fsdptool.runs.folder import PREDICTION
from fsdptool.runs.recordings.step_times import Busy, late_rank, profile_traces

RECORDINGS = Path(os.environ.get("FSDPTOOL_RECORDINGS", "absent"))
INDEX = RECORDINGS / "index.jsonl"
ENTRIES = [json.loads(line) for line in INDEX.read_text("utf-8").splitlines()] if INDEX.is_file() else []
TRACES = [
    each for each in ENTRIES if each["kind"] == "kineto_trace" and (RECORDINGS / each["file"]).is_file()
]
needs_recordings = pytest.mark.skipif(not TRACES, reason="FSDPTOOL_RECORDINGS names no folder of recordings")


@needs_recordings
@pytest.mark.parametrize("entry", TRACES or [{"file": "absent"}], ids=lambda entry: entry["file"])
def test_times_of_a_real_trace_are_those_computed_before(entry: dict[str, Any]) -> None:
    (trace,) = profile_traces([RECORDINGS / entry["file"]]).traces
    facts, total = entry["facts"], trace.total
    assert trace.complete
    assert (trace.rank, trace.world_size, trace.gpu) == (facts["rank"], facts["world_size"], facts["gpu"])
    measured = {
        "ms_gpu_span": total.seconds,
        "ms_gpu_busy": total.seconds - total.idle_seconds,
        "ms_compute_busy": total.compute_seconds,
        "ms_comm_busy": total.communication_seconds,
        "ms_exposed_comm": total.exposed_communication_seconds,
        "ms_memcpy": total.copy_seconds,
    }
    assert {name: 1e3 * value for name, value in measured.items()} == pytest.approx(
        {name: facts[name] for name in measured}, abs=0.0015
    )
    assert len(trace.steps) == len(facts["steps_cpu_ms"])
    for step, host in zip(trace.steps, facts["steps_cpu_ms"], strict=True):
        assert 1e3 * step.time.seconds == pytest.approx(host, rel=0.05)
    for item in facts.get("collectives", ()):
        (found,) = (each for each in trace.messages if each.bytes == item["out_bytes"])
        times = (found.shortest_seconds, found.median_seconds, found.longest_seconds)
        assert [1e6 * each for each in times] == pytest.approx(
            [item[f"us_{name}"] for name in ("min", "median", "max")], abs=0.001
        )
        assert (found.calls, found.group_size) == (item["calls"], item["group"])


@needs_recordings
def test_the_late_rank_of_a_real_step_is_the_one_that_waits_least() -> None:
    files = [f"trace-dlrm-8-ranks-{rank}.json.gz" for rank in range(8)]
    profile = profile_traces([RECORDINGS / file for file in files])
    compared = profile.compared
    assert compared is not None
    facts = next(each for each in TRACES if each["file"] == files[0])["across_ranks"]["collectives"]
    assert (compared.late_rank, compared.clocks, compared.collectives) == (7, "agree", len(facts))
    shortest = [each["rank_of_shortest"] for each in facts]
    assert [each.shortest for each in compared.ranks] == [shortest.count(rank) for rank in range(8)]
    assert compared.end_spread_seconds == pytest.approx(max(each["end_spread_us"] for each in facts) / 1e6)
    assert compared.start_spread_seconds == pytest.approx(
        max(each["start_spread_us"] for each in facts) / 1e6
    )
    steps = [trace.steps[0].time.seconds for trace in profile.traces]
    assert min(steps) == steps[7], "by the time of the step it would be the last to be blamed"


@needs_recordings
def test_the_late_rank_of_a_real_run_of_fsdp() -> None:
    facts = next(each["facts"] for each in ENTRIES if each["kind"] == "profile_summary")
    assert late_rank({each["rank"]: each["collective_time_ms"] for each in facts["ranks"]}) == 4


@needs_recordings
def test_clocks_that_disagree_are_noticed() -> None:
    files = ("trace-timeline-analysis-sampled-rank-0.json.gz", "trace-trace-filter-sampled-rank-1.json.gz")
    compared = profile_traces([RECORDINGS / file for file in files]).compared
    assert compared is not None
    assert (compared.clocks, compared.late_rank, compared.start_spread_seconds) == ("disagree", None, None)
    assert compared.end_spread_seconds == pytest.approx(0.134, abs=0.001)


def event(category: str, name: str, start: float, length: float, **arguments: object) -> dict[str, Any]:
    thread = {"pid": 7, "tid": 7} if category in ("user_annotation", "cuda_runtime") else {"pid": 0, "tid": 1}
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, **thread, "args": arguments}


MESSAGE = {"Group size": 2, "dtype": "BFloat16", "Process Group Name": "0"}
GATHER = {
    "Collective name": "_allgather_base", "In msg nelems": 500, "Out msg nelems": 1000, **MESSAGE,
}  # fmt: skip
REDUCE = {
    "Collective name": "_reduce_scatter_base", "In msg nelems": 1000, "Out msg nelems": 500, **MESSAGE,
}  # fmt: skip


def step_of(rank: int, *, late: float = 0.0, clock: float = 0.0) -> dict[str, Any]:
    """Return two steps of a model of one unit in a root: microseconds are easy to add up.

    Args:
        rank: The rank, of two.
        late: How much later than the other one it begins its collectives.
        clock: By how much its clock is ahead.
    """
    events = []
    for number, begin in ((1, 1000.0 + clock), (2, 2000.0 + clock)):
        hooks = (
            ("FSDP::pre_forward", 10, 50), ("FSDP::pre_forward (layers.0)", 70, 30),
            ("FSDP::all_gather (layers.0)", 75, 20), ("FSDP::post_forward (layers.0)", 150, 10),
            ("FSDP::post_forward", 200, 10), ("FSDP::pre_backward (layers.0)", 250, 10),
            ("FSDP::post_backward_reshard (layers.0)", 300, 10),
            ("FSDP::post_backward_reduce (layers.0)", 310, 30),
        )  # fmt: skip
        events.append(event("user_annotation", f"ProfilerStep#{number}", begin, 990))
        events += [event("user_annotation", name, begin + at, length) for name, at, length in hooks]
        work: tuple[tuple[str, str, float, float, float, dict[str, Any]], ...] = (
            ("kernel", "ncclDevKernel_AllGather_RING_LL", 80, 100 + late, 100 - late, GATHER),
            ("kernel", "embedding", 65, 100, 20, {}),
            ("kernel", "gemm", 120, 200, 100, {}),
            ("kernel", "norm", 170, 300, 20, {}),
            ("kernel", "gemm backward", 270, 330, 200, {}),
            ("kernel", "ncclDevKernel_ReduceScatter_Sum_bf16", 315, 500 + late, 100 - late, REDUCE),
            ("gpu_memcpy", "Memcpy DtoH", 330, 650, 50, {}),
        )
        for index, (category, name, launch, at, length, arguments) in enumerate(work):
            launched = 10 * number + index
            events.append(event("cuda_runtime", "cudaLaunchKernel", begin + launch, 2, correlation=launched))
            events.append(event(category, name, begin + at, length, correlation=launched, **arguments))
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "GPU \x1b[31m"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2},
        "traceEvents": events,
    }


@pytest.fixture
def two_ranks(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    paths[0].write_text(json.dumps(step_of(0)))
    packed = tmp_path / "rank1.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(step_of(1, late=60.0, clock=5000.0)).encode()))
    return [paths[0], packed]


def test_a_step_is_split_and_units_are_told_apart(two_ranks: list[Path]) -> None:
    (trace,) = profile_traces(two_ranks[:1]).traces
    first, second = (step.time for step in trace.steps)
    micro = {name: round(1e6 * getattr(second, name)) for name in second.__dataclass_fields__}
    assert micro == {
        "seconds": 890,
        "compute_seconds": 340,
        "communication_seconds": 200,
        "exposed_communication_seconds": 150,
        "copy_seconds": 50,
        "exposed_copy_seconds": 50,
        "idle_seconds": 350,
    }, "320 us of kernels that no other covers and 20 under the gather; the reduction hides 30 of 100"
    assert round(1e6 * first.seconds) == 1100, "the host's step begins before the GPU's"
    operations = {
        item.operation: (item.calls, round(1e6 * item.exposed_seconds)) for item in trace.operations
    }
    assert operations == {"all_gather": (2, 160), "reduce_scatter": (2, 140)}
    assert [(item.operation, item.bytes) for item in trace.messages] == [
        ("all_gather", 2000),
        ("reduce_scatter", 2000),
    ]
    assert trace.messages[0].bus_bytes_per_second == pytest.approx(2000 / 2 / 100e-6)
    units = {
        item.unit: [
            round(1e6 * getattr(item, name) / 2) for name in item.__dataclass_fields__ if name != "unit"
        ]
        for item in trace.units
    }
    assert units == {"(root)": [40, 0, 0, 0, 0, 0], "layers.0": [100, 200, 100, 80, 100, 70]}


def test_clocks_are_set_right_before_ranks_are_compared(two_ranks: list[Path]) -> None:
    compared = profile_traces(two_ranks).compared
    assert compared is not None
    assert (compared.late_rank, compared.clocks, compared.collectives) == (1, "shifted", 4)
    assert compared.start_spread_seconds == pytest.approx(60e-6)
    assert [each.shortest for each in compared.ranks] == [0, 4]


def test_ranks_that_wait_alike_are_not_blamed() -> None:
    assert late_rank({0: 1.0, 1: 0.9, 2: 1.1}) is None
    assert late_rank({0: 1.0}) is None


def test_intervals_that_overlap_count_once() -> None:
    busy = Busy([(0.0, 4.0), (1.0, 2.0), (3.0, 6.0), (8.0, 9.0)])
    assert [busy.within(*each) for each in ((0, 10), (1, 5), (6, 8), (8.5, 20), (-5, 0))] == [7, 4, 0, 0.5, 0]


def test_the_command_says_who_is_late_and_what_was_planned(
    two_ranks: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(path) for path in two_ranks]
    assert fsdptool(["diagnose", *names]) == 0
    text = capsys.readouterr().out
    assert "rank 1 is late" in text
    assert "layers.0" in text
    assert fsdptool(["diagnose", *names, "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    check(document, "profile", where="profile")
    assert document["compared"]["late_rank"] == 1
    log = two_ranks[0].with_suffix(".log")
    log.write_text("step 1\n")
    assert fsdptool(["diagnose", names[0], str(log)]) == 2
    assert fsdptool(["diagnose", str(log), "--plan", "plan.json"]) == 2


POINT = SearchPoint(
    cluster=0,
    layout="native",
    wrap_policy="transformer",
    wrap_classes=("Block",),
    micro_batch=1,
    accumulation=1,
    checkpointing="none",
    reshard_after_forward=True,
    dp_replicate=1,
    dp_shard=2,
    cp=1,
    cpu_offload=False,
    optimizer_implementation="auto",
    prefetch=1,
    reduce_dtype=None,
    gradients="sharded",
)


def test_parts_of_a_prediction_stand_beside_measured_ones(
    two_ranks: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    planned = Candidate(
        id="planned",
        settings=POINT,
        allocated_peak_bytes=None,
        reserved_peak_bytes=None,
        device_total_bytes=None,
        usable_bytes=None,
        slack_bytes=None,
        host_bytes_per_node=None,
        components=(),
        peak=None,
        timeline=(),
        step_seconds=0.5,
        tokens_per_second=None,
        rejected_by=None,
        seconds={"compute": 0.2, "optimizer": 0.1, "communication": 0.3},
    )
    folder = two_ranks[0].parent / "run"
    folder.mkdir()
    (folder / PREDICTION).write_text(json.dumps(to_json(planned)))
    assert fsdptool(["diagnose", str(two_ranks[0]), "--run", str(folder), "--format", "json"]) == 0
    rows = {row["part"]: row for row in json.loads(capsys.readouterr().out)["planned"]}
    assert rows["compute"]["planned_seconds"] == pytest.approx(0.3)
    assert rows["compute"]["measured_seconds"] == pytest.approx(340e-6)
    assert rows["idle"]["planned_seconds"] is None
    assert fsdptool(["diagnose", str(two_ranks[0]), "--run", str(folder)]) == 0
    assert "exposed communication" in capsys.readouterr().out


def test_a_trace_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    whole = json.dumps(step_of(0))
    path = tmp_path / "cut.json"
    path.write_text(whole[: len(whole) * 2 // 3])
    (trace,) = profile_traces([path]).traces
    assert not trace.complete
    assert trace.total.compute_seconds > 0
    path.write_text(json.dumps({"traceEvents": [event("cpu_op", "aten::add", 1, 1)]}))
    with pytest.raises(ConfigError, match="not contain work of a GPU"):
        profile_traces([path])


BAD = (
    '{"traceEvents": [' + "[" * 100_000,
    '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "' + "x" * 9_000_000,
    '{"traceEvents": [{"ph":"X","cat":"kernel","name":"\\ud800","ts":1e400,"dur":NaN}]}',
    '{"traceEvents": [{"ph":"X","cat":"kernel","name":"k","ts":true,"dur":-1},{"ph":"X","cat":3}]}',
    '{"traceEvents": 3}',
)


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_a_hostile_trace_is_refused_in_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        profile_traces([path])
    assert "\n" not in refused.value.message


def mutated(data: bytes, source: random.Random) -> bytes:
    """Return a trace with a few bytes replaced, removed or repeated."""
    changed = bytearray(data)
    for _ in range(source.randrange(1, 6)):
        at = source.randrange(len(changed))
        match source.randrange(3):
            case 0:
                changed[at] = source.choice(b'0123456789{}[]",:-eE\x00\xff')
            case 1:
                del changed[at : at + source.randrange(40)]
            case 2:
                changed[at:at] = changed[at : at + source.randrange(200)]
    return bytes(changed)


def test_a_changed_trace_is_read_or_refused(tmp_path: Path) -> None:
    source = random.Random(3)
    data, path = json.dumps(step_of(0)).encode(), tmp_path / "changed.json"
    outcomes: set[bool | None] = set()
    for _ in range(100):
        path.write_bytes(mutated(data, source))
        try:
            outcomes.add(profile_traces([path, path]).traces[0].complete)
        except FsdptoolError:
            outcomes.add(None)
    assert outcomes >= {True, False}


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist = pytest.importorskip("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_hooks_are_those_that_torch_records(one_rank: None, tmp_path: Path) -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(torch.randn(2, 4)).sum().backward()
        profiler.step()
    path = tmp_path / "torch.json"
    profiler.export_chrome_trace(str(path))
    recorded = json.loads(path.read_text())
    hooks = [each for each in recorded["traceEvents"] if str(each.get("name")).startswith("FSDP::")]
    # No GPU is here: one kernel follows each hook, launched just after it.
    made = list(recorded["traceEvents"])
    for number, hook in enumerate(hooks, 1):
        at = hook["ts"] + hook["dur"] + 0.01
        launch = event("cuda_runtime", "cudaLaunchKernel", at, 0, correlation=number)
        made += [{**launch, "tid": hook["tid"], "pid": hook["pid"]}]
        made += [event("kernel", hook["name"], at + 10**6 * number, 1, correlation=number)]
    path.write_text(json.dumps({"traceEvents": made}))
    units = {item.unit: item for item in profile_traces([path]).traces[0].units}
    assert list(units) == ["(root)", "0"]
    for unit in units.values():
        assert unit.forward_seconds > 0
        assert unit.backward_seconds > 0
