"""What a module receives through the trace's hooks is what it receives through FSDP2's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdptool.memory.tracing.fake_tensors import MicroBatchConditions
from fsdptool.memory.tracing.module_hooks import ModuleHooks
from fsdptool.memory.tracing.recorder import SegmentRecorder


class Pair(nn.Module):
    """Notes whether its two arguments are one tensor, as nn.MultiheadAttention does with keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.one = False

    def forward(self, keys: Tensor, values: Tensor) -> Tensor:
        self.one = keys is values
        return keys * self.weight + values


class Pairs(nn.Module):
    """A block that is a unit of its own, and a module that its parent's unit holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair()])
        self.head = Pair()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs * self.head.weight
        hidden = self.blocks[0](hidden, hidden)
        result: Tensor = self.head(hidden, hidden)
        return result


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Be rank 0 of one."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_arguments_that_are_one_tensor_stay_one_except_at_units(one_rank: None) -> None:
    sharded, traced = Pairs(), Pairs()
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(sharded.blocks[0], mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    recorder = SegmentRecorder([])
    ModuleHooks(recorder, MicroBatchConditions("cpu", None)).attach(traced)
    inputs = torch.ones(2, 4)
    for model in (sharded, traced):
        model(inputs).sum().backward()
    assert sharded.head.one and not sharded.blocks[0].one
    assert (traced.head.one, traced.blocks[0].one) == (sharded.head.one, sharded.blocks[0].one)
    gradients = [parameter.grad for parameter in sharded.parameters()]
    for mine, theirs in zip(traced.parameters(), gradients, strict=True):
        assert mine.grad is not None and theirs is not None
        assert torch.equal(mine.grad, theirs.full_tensor())  # type: ignore[attr-defined]
