"""Process groups of a run: which there are, how long they wait, and how many files they hold open."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import session_cases as cases
import torch
import torch.distributed as dist
from pool import Pool

from fsdptool.distributed import devices, rendezvous, session
from fsdptool.distributed.devices import Driver
from fsdptool.errors import ConfigError
from fsdptool.records.sharding import FsdpSettings


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("dims", "names"),
    [
        ({"dp_shard": 4}, ("dp_shard",)),
        ({"dp_replicate": 2, "dp_shard": 2}, ("dp_replicate", "dp_shard")),
        ({"dp_shard": 2, "tp": 2}, ("dp_shard", "tp")),
        ({"dp_shard": 1, "tp": 4}, ("dp_shard", "tp")),
        ({"dp_shard": 2, "cp": 2}, ("dp_shard", "cp")),
    ],
)
def test_every_group_of_a_mesh_has_the_timeout_of_the_run(
    pool: Pool, dims: dict[str, int], names: tuple[str, ...]
) -> None:
    """Dimensions of one rank have no groups at all, but for the one that parameters are sharded over."""
    for found in pool.run(cases.mesh_facts, 4, dims):
        assert found["names"] == names
        # The default group is the pool's own, which another test made with torch's default.
        assert found["timeouts"] == {7.0}


@pytest.mark.distributed
def test_a_checkpointer_connects_each_pair_of_ranks_once(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run(cases.open_files, 4, str(tmp_path)):
        assert found["group"] >= 3
        # One group, and the log of events.
        assert found["checkpointer"] <= found["group"] + 2
        assert found["soft"] == found["hard"]


@pytest.mark.distributed
def test_ranks_wait_for_work_that_takes_longer_than_a_collective_may(pool: Pool) -> None:
    assert pool.run(cases.wait_long, 2, True) == [None, None]


@pytest.mark.distributed
def test_ranks_do_not_wait_for_work_that_does_not_get_on(pool: Pool) -> None:
    first, second = pool.run(cases.wait_long, 2, False)
    assert first == "no rank has reported progress for 1 s"
    assert second == "no rank has reported progress for 30 s", "the first to lose patience decides for all"


@pytest.mark.parametrize(("ranks", "value"), [(256, None), (257, "1")])
def test_many_ranks_connect_when_they_first_speak(
    monkeypatch: pytest.MonkeyPatch, ranks: int, value: str | None
) -> None:
    name = "TORCH_GLOO_LAZY_INIT"
    # Set first, so that it is taken away again afterwards.
    monkeypatch.setenv(name, "")
    monkeypatch.delenv(name)
    rendezvous._allow_connections(ranks)
    assert os.environ.get(name) == value


def test_the_first_of_several_machines_listens_on_one_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", rendezvous.FOLDER):
        monkeypatch.delenv(name, raising=False)
    own = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "GROUP_RANK": "0"}
    for name, value in {**own, rendezvous.LISTEN: "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    rendezvous.join("gloo")
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
    finally:
        dist.destroy_process_group()


def test_a_gpu_that_torch_cannot_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on the CPU would wait for ever for ranks that meet over NCCL."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(devices, "DRIVER_FILES", {Driver.NVIDIA: (str(tmp_path / "missing"),)})
    assert session.device_of_rank(FsdpSettings(), 0) == torch.device("cpu")
    monkeypatch.setattr(devices, "DRIVER_FILES", {Driver.NVIDIA: (str(tmp_path),)})
    # In torch's words, which depend on its build.
    with pytest.raises(ConfigError, match=r"GPUs that torch cannot use: .*(?:CUDA enabled|NVIDIA driver)"):
        session.device_of_rank(FsdpSettings(), 0)
    assert session.device_of_rank(FsdpSettings(use_cpu=True), 0) == torch.device("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert session.device_of_rank(FsdpSettings(), 0) == torch.device("cpu")


@pytest.mark.parametrize(
    ("listed", "kept"), [("0", {0}), ("1,5-7", {1}), ("0-63", None), ("64-71", None), ("", None)]
)
def test_a_worker_stays_on_the_cores_beside_its_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, kept: set[int] | None
) -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text(f"{listed}\n")
    bound: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    assert session.bind_to_gpu(gpu, tmp_path) == kept
    assert bound == ([] if kept is None else [frozenset(kept)])
    monkeypatch.setenv(session.BIND, "0")
    assert session.bind_to_gpu(gpu, tmp_path) is None
