"""Machine tables from traces of torch's profiler: which figures traces decide, and on how many events."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run as fsdptool
from fsdptool.planning.hardware import find_gpu, read_table

RANKS = 4
GIB = 1 << 30
RECORDED = Path(os.environ.get("FSDPTOOL_RECORDINGS", "absent")) / (
    "trace-h100-qwen-qwen1-5-0-5b-chat-1016005.json.gz"
)


def _event(kind: str, name: str, start: float, length: float, **known: Any) -> dict[str, Any]:
    return {
        **{"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": length},
        "args": known,
    }


def _trace(path: Path, rank: int, device: int) -> Path:
    """Write a trace with six products of 1 TFLOP in 2 ms, copies of 1 GiB in 1 ms, and collectives."""
    events = []
    for step in range(6):
        at = 100_000.0 * step
        sizes = {"Input Dims": [[8192, 8192], [8192, 8192]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
        events.append(_event("cpu_op", "aten::mm", at, 50, **sizes))
        events.append(_event("cuda_runtime", "cudaLaunchKernel", at + 10, 5, correlation=10 * step + 1))
        events.append(_event("kernel", "gemm", at + 100, 2000, correlation=10 * step + 1, device=device))
        # Launched after the product: it is none of its kernels.
        events.append(_event("cuda_runtime", "cudaLaunchKernel", at + 60, 5, correlation=10 * step + 2))
        events.append(_event("kernel", "add", at + 2200, 9000, correlation=10 * step + 2, device=device))
        copy = "Memcpy DtoD (Device -> Device)"
        events.append(_event("gpu_memcpy", copy, at + 12_000, 1000, bytes=GIB, device=device))
        for elements, length in ((GIB // 2, 5000.0 + 1000 * rank), (2048, 60.0 + rank)):
            known = {"Group size": RANKS, "dtype": "BFloat16", "Process Group Name": "0"}
            counts = {"In msg nelems": elements // RANKS, "Out msg nelems": elements}
            name = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
            known["Collective name"] = "_allgather_base"
            events.append(_event("kernel", name, at + 20_000 + length, length, **known, **counts))
    document = {
        "distributedInfo": {"rank": rank, "world_size": RANKS},
        "deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}] * 8,
        "traceEvents": events,
    }
    path.write_text(json.dumps(document))
    return path


def test_a_table_says_on_how_many_events_each_figure_rests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = [str(_trace(tmp_path / f"rank{rank}.json", rank, rank)) for rank in (0, RANKS - 1)]
    table = tmp_path / "machine.json"
    assert fsdptool(["calibrate", "--from-trace", *traces, "-o", str(table)]) == 0, capsys.readouterr().err
    (row,) = read_table(table)
    gpu = find_gpu("H100-80GB-SXM").gpu
    assert (row.match, row.measured) == (gpu.name, True)
    assert row.matmul_efficiency == pytest.approx(2 * 8192**3 / 2e-3 / (gpu.flops["bfloat16"] or 0))
    assert row.memory_efficiency == pytest.approx(0.88 * 2 * GIB / 1e-3 / gpu.memory_bandwidth)
    # The shortest call of each size: the others wait for a rank.
    assert row.link_efficiency == pytest.approx(GIB * 3 / 4 / 5e-3 / gpu.link_bandwidth)
    assert row.link_latency == pytest.approx(60e-6 / 3)
    for text in (
        "matmul_efficiency on 12 products",
        "memory_efficiency on 12 copies",
        "link_efficiency on 12 collectives",
        "link_latency on 12 collectives",
        "not measured, as shipped: communicator_bytes, context_bytes, reserved_ratio",
    ):
        assert text in row.source


def test_links_count_only_where_the_ranks_share_a_machine(tmp_path: Path) -> None:
    """The last rank of two machines has a GPU whose number is not its own; the first one shows nothing."""
    traces = [_trace(tmp_path / "0.json", 0, 0), _trace(tmp_path / "3.json", RANKS - 1, 1)]
    table = tmp_path / "machine.json"
    assert fsdptool(["calibrate", "--from-trace", *map(str, traces), "-o", str(table)]) == 0
    (row,) = read_table(table)
    assert "collectives" not in row.source
    assert (row.link_efficiency, row.link_latency) == (0.8, 2.7e-6)


def test_traces_without_such_events_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [_event("kernel", "k", 1, 1)]}))
    assert fsdptool(["calibrate", "--from-trace", str(path), "--gpu", "H100-80GB-SXM"]) == 2
    assert "traces need" in capsys.readouterr().err


@pytest.mark.skipif(not RECORDED.is_file(), reason="FSDPTOOL_RECORDINGS names no folder of recordings")
def test_a_real_trace_and_a_plan_that_takes_its_table(tmp_path: Path) -> None:
    table = tmp_path / "machine.json"
    assert fsdptool(["calibrate", "--from-trace", str(RECORDED), "-o", str(table)]) == 0
    (row,) = read_table(table)
    assert "matmul_efficiency on 168 products" in row.source
    assert row.matmul_efficiency == pytest.approx(0.629, abs=0.001)
