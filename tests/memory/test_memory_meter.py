"""The CPU meter on real collectives."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

_SCRIPT = """
import torch
import torch.distributed as dist
from fsdptool.training.memory_meter import CpuMeter, live_bytes

SIZE = 1_000_000
dist.init_process_group("gloo")
whole, part, received = torch.randn(SIZE), torch.empty(SIZE // 2), torch.empty(SIZE)
meter = CpuMeter()
before = live_bytes()
with meter.step(1):
    for _ in range(20):
        dist.reduce_scatter_tensor(part, whole)
        dist.all_gather_into_tensor(received, part)
if dist.get_rank() == 0:
    print(meter.last()[0] - before)
dist.destroy_process_group()
"""


@pytest.mark.distributed
def test_buffers_that_gloo_threads_release_do_not_add_up() -> None:
    """Twenty collectives in a row never hold more than one staging buffer, 4 bytes an element."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _SCRIPT],
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=180)[0].split() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert 4_000_000 <= int(said[0][-1]) < 4_100_000


@pytest.mark.slow
def test_fake_tensors_hold_nothing() -> None:
    """Compiling leaves some behind, of a device they only pretend to be on."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fsdptool.training.memory_meter import live_bytes

    before = live_bytes()
    with FakeTensorMode():
        fake = torch.empty(1 << 20)
    real = torch.empty(1 << 10)
    assert live_bytes() - before == real.numel() * 4
    assert fake.device == real.device


@pytest.mark.slow
def test_a_profile_that_took_long_to_prepare_is_prepared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """kineto refuses one of two seconds, and to stop that ends the process; here half of that is waited."""
    import torch
    from torch.profiler import profile

    from fsdptool.training import memory_meter as meter

    prepare, took = profile.prepare_trace, [meter._PREPARED_WITHIN + 0.1]

    def slowly(self: Any) -> None:
        prepare(self)
        if took:
            time.sleep(took.pop())

    monkeypatch.setattr(profile, "prepare_trace", slowly)
    found = meter.CpuMeter()
    with found.step(1):
        before = meter.live_bytes()
        held = torch.ones(1000)
    assert not took and found.last() == (before + held.nbytes, None)
