"""A machine table with timed kernels: a plan's time comes from it, on its own device alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdptool.cli.app import run
from fsdptool.errors import PlanError
from fsdptool.planning.calibrate import PROBED_RANGE, calibrate
from fsdptool.planning.hardware import load_gpu, machine_for, write_table
from fsdptool.planning.time.measured_kernels import measured_operation, measured_traffic
from fsdptool.records.cluster import KernelTime, Machine
from fsdptool.records.command_documents import Probe
from fsdptool.records.measurements import Measurements, RankMeasurements
from fsdptool.records.trace import Operation
from fsdptool.training.kernel_times import Sizes, measure_kernels

SMALL = Sizes(
    tokens=(16, 64),
    layers=((32, 64),),
    lengths=(16,),
    heads=(16,),
    widths=(64,),
    updates=(1 << 12,),
    budget=0.002,
)


def table_of(kernels: tuple[KernelTime, ...]) -> Machine:
    ranks = RankMeasurements("x86_64", None, None, 1, "gloo", kernel_latency=1e-6, kernels=kernels)
    sharded = Probe("cpu", "gloo", 1, True, True, 0.0, True, None)
    return calibrate(None, [], measured=Measurements("cpu", {}, sharded, ranks, None, 1.0))


@pytest.fixture(scope="module")
def kernels() -> tuple[KernelTime, ...]:
    return tuple(measure_kernels(torch.device("cpu"), sizes=SMALL))


def test_a_probe_times_every_kind_of_kernel(kernels: tuple[KernelTime, ...]) -> None:
    kinds = {item.kind for item in kernels}
    assert kinds == {"product", "attention", "attention_backward", "elementwise", "update"}
    product = next(item for item in kernels if item.kind == "product")
    assert product.flops == 2 * 16 * 32 * 64
    assert product.bytes == 4 * (16 * 32 + 16 * 64 + 32 * 64)
    narrow, wide = (item.bytes for item in kernels if item.kind == "elementwise")
    # Operators of a block read and write one to five tensors of its size, or a row of it.
    assert 16 * 64 * 4 < narrow < 5 * 16 * 64 * 4
    assert wide == pytest.approx(4 * narrow, rel=0.1)


def test_a_timed_size_takes_its_time_and_others_lie_between() -> None:
    sizes = [KernelTime("product", "float32", 2.0**n / 1e9, 2**n, flops=2.0 ** (n + 3)) for n in (10, 14)]
    machine = replace(machine_for(None), kernels=tuple(sizes))
    for item in sizes:
        again = Operation("product", "float32", item.flops, item.bytes)
        assert measured_operation(again, machine) == pytest.approx(item.seconds, rel=1e-3)
    between = measured_operation(Operation("product", "float32", 2.0**15, 2**12), machine)
    assert between is not None
    assert sizes[0].seconds < between < sizes[1].seconds
    assert measured_operation(Operation("product", "bfloat16", 2.0**15, 2**12), machine) is None
    assert measured_traffic("elementwise", 4096, machine) is None
    # No kernel is faster than the launch of the fastest.
    assert measured_operation(Operation("product", "float32", 8.0, 8), machine) == sizes[0].seconds


@pytest.mark.slow
def test_the_time_of_a_plan_comes_from_the_table(
    kernels: tuple[KernelTime, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "qwen3:tiny", "--profile", "cpu-gloo", "--processes", "1", "--seq-len", "32"]
    arguments += ["--no-search", "--format", "json"]

    def step(*more: str) -> dict[str, float]:
        capsys.readouterr()
        assert run([*arguments, *more]) == 0
        candidate = json.loads(capsys.readouterr().out)["candidates"][0]
        low, high = candidate["step_seconds_range"] or (0.0, 0.0)
        return {**candidate["seconds"], "all": candidate["step_seconds"] or 0.0, "low": low, "high": high}

    assert step()["all"] == 0.0
    found = []
    for factor in (1, 3):
        slower = tuple(replace(item, seconds=factor * item.seconds) for item in kernels)
        path = tmp_path / f"{factor}.json"
        path.write_text(write_table((table_of(slower),)))
        found.append(step("--machine", str(path)))
    once, thrice = found
    assert thrice["compute"] == pytest.approx(3 * once["compute"], rel=1e-6)
    assert thrice["optimizer"] == pytest.approx(3 * once["optimizer"], rel=1e-6)
    assert once["low"] == pytest.approx(once["all"] / PROBED_RANGE[1])
    assert once["high"] == pytest.approx(once["all"] / PROBED_RANGE[0])


def test_a_table_of_another_device_is_refused(kernels: tuple[KernelTime, ...], tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    row = table_of(kernels)
    path.write_text(write_table((row,)))
    assert machine_for(None, table=path).kernels == row.kernels
    with pytest.raises(PlanError, match="was measured on cpu, and the plan is for H100-80GB-SXM"):
        machine_for(load_gpu("H100"), table=path)
    path.write_text(write_table((replace(row, match="A100-80GB-SXM"),)))
    with pytest.raises(PlanError, match="was measured on A100-80GB-SXM, and the plan is for cpu"):
        machine_for(None, table=path)


def test_cpu_belongs_to_the_probe() -> None:
    assert run(["calibrate", "--cpu"]) == 2
