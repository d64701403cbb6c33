"""GPUs of a machine: what tells them apart, which torch can use, and why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fsdptool.distributed import devices
from fsdptool.distributed.devices import Driver, read_listing
from fsdptool.errors import ConfigError
from fsdptool.launch.machine import live_claims, register_claim, requested_gpus
from fsdptool.launch.prepare import choose_device
from fsdptool.records.sharding import FsdpSettings

LISTING = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa0000-d33d-2b2c-524d-9e3d8d2b8a77)
  MIG 1g.5gb      Device  0: (UUID: MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f)
  MIG 1g.5gb      Device  1: (UUID: MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa1111-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 2: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb2222-d33d-2b2c-524d-9e3d8d2b8a77)
"""


class Node:
    """A machine with a driver whose ``nvidia-smi`` prints what the test says."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def show(self, listing: str) -> None:
        """List other GPUs from now on, as in a job or a container of its own."""
        (self._folder / "listing").write_text(listing)
        devices.list_gpus.cache_clear()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(f'#!/bin/sh\nexec /bin/cat "{tmp_path}/listing"\n')
    (programs / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path / "locks"))
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    monkeypatch.setattr(devices, "DRIVER_FILES", {Driver.NVIDIA: (str(tmp_path),)})
    made = Node(tmp_path)
    made.show(LISTING)
    yield made
    devices.list_gpus.cache_clear()


def test_ids_of_every_kind_name_one_gpu(node: Node) -> None:
    assert [len(gpu.instances) for gpu in read_listing(LISTING)] == [2, 0, 0]
    first = read_listing(LISTING)[0].instances[0]
    assert devices.uuid_of("0") == devices.uuid_of(first) == devices.uuid_of("GPU-aaaa0") == first
    assert devices.uuid_of("1") == devices.uuid_of("GPU-aaaa1111") != devices.uuid_of("2")
    assert devices.uuid_of("GPU-aaaa") is None, "two begin so"
    assert devices.uuid_of("3") is None


def test_jobs_that_number_their_gpus_from_0_do_not_refuse_each_other(node: Node, tmp_path: Path) -> None:
    """Slurm shows each job its own GPUs alone; a node of several jobs has one registry for each user."""
    first, second = (f"GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-{letter * 8})\n" for letter in "ab")
    node.show(first)
    with register_claim(frozenset("0"), tmp_path / "first"):
        assert live_claims() == [(frozenset("0"), str(tmp_path / "first"))]
        node.show(second)
        assert live_claims() == [(frozenset({"GPU-aaaaaaaa"}), str(tmp_path / "first"))]
        with register_claim(frozenset("0"), tmp_path / "second"):
            pass


@pytest.mark.parametrize("other", ["0", "1", "GPU-bbbbbbbb"])
def test_one_gpu_has_one_run_by_whatever_id(node: Node, tmp_path: Path, other: str) -> None:
    listed = [f"GPU {{}}: NVIDIA H100 80GB HBM3 (UUID: GPU-{letter * 8})\n" for letter in "ab"]
    node.show(listed[0].format(0) + listed[1].format(1))
    with register_claim(frozenset("1"), tmp_path / "first"):
        if other == "0":
            node.show(listed[1].format(0))  # a job that has this GPU alone
        with (
            pytest.raises(ConfigError, match=rf"GPU {other} is in use by the run in .*first"),
            register_claim(frozenset({other}), tmp_path / "second"),
        ):
            pass


def test_without_uuids_numbers_are_compared_and_the_message_says_so(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "DRIVER_FILES", {})
    with (
        register_claim(frozenset("0"), tmp_path / "first"),
        pytest.raises(ConfigError, match="GPU 0 is in use") as refused,
        register_claim(frozenset("0"), tmp_path / "second"),
    ):
        pass
    assert refused.value.help is not None and "set FSDPTOOL_LOCKS" in refused.value.help


def test_the_first_visible_gpus_are_those_of_the_ranks(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.VISIBLE, "10,2,1")
    assert requested_gpus(FsdpSettings(num_processes=2)) == {"10", "2"}
    monkeypatch.setenv(devices.VISIBLE, "")
    assert requested_gpus(FsdpSettings(num_processes=2)) == frozenset()


@pytest.mark.parametrize(
    ("visible", "name"),
    [
        (None, "NVIDIA A100-SXM4-80GB"),
        ("1,0", "NVIDIA T4"),
        ("GPU-bbbb", "NVIDIA T4"),
        ("MIG-cccc", "NVIDIA L4"),
        ("7", "NVIDIA A100-SXM4-80GB"),
    ],
)
def test_a_machine_of_several_kinds_is_named_by_its_first_visible_gpu(
    node: Node, monkeypatch: pytest.MonkeyPatch, visible: str | None, name: str
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setattr(devices, "count_gpus", lambda: 3)
    if visible is not None:
        monkeypatch.setenv(devices.VISIBLE, visible)
    node.show(
        "GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-aaaa)\n"
        "GPU 1: NVIDIA T4 (UUID: GPU-bbbb)\n"
        "GPU 2: NVIDIA L4 (UUID: GPU-dddd)\n  MIG 1g.5gb Device 0: (UUID: MIG-cccc)\n"
    )
    assert devices.gpu_name() == name


@pytest.mark.parametrize(
    ("driver", "built", "said"),
    [
        (Driver.NVIDIA, "the CPU only", r"NVIDIA GPUs, and torch \S+ is built for the CPU only: .* for CUDA"),
        (Driver.WINDOWS, "the CPU only", r"Windows \(WSL2\) GPUs, and torch .* build for CUDA"),
        (Driver.AMD, "13.0", r"AMD GPUs, and torch \S+ is built for CUDA 13.0: install its build for ROCm"),
        (Driver.NVIDIA, "13.0", r"NVIDIA GPUs that torch .* cannot start: \S+ \S+"),
        (Driver.INTEL, "the CPU only", "Intel GPUs, on which fsdptool does not train"),
    ],
)
def test_a_gpu_that_cannot_be_used_has_a_reason(
    driver: Driver, built: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(devices.VISIBLE, raising=False)
    intel = tmp_path / "renderD128" / "device"
    intel.mkdir(parents=True)
    (intel / "vendor").write_text("0x8086\n")
    monkeypatch.setattr(devices, "_RENDERERS", tmp_path)
    files = {} if driver is Driver.INTEL else {driver: (str(tmp_path),)}
    monkeypatch.setattr(devices, "DRIVER_FILES", files)
    monkeypatch.setattr(torch.version, "cuda", None if built == "the CPU only" else built)
    with pytest.raises(ConfigError, match=said):
        choose_device(FsdpSettings(num_processes=8), Path("fsdp.yaml"))
