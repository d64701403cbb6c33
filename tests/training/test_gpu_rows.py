"""benchmarks/gpu: ranks that do not exist have real values, and what is said of a profile is right."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

from own_rows import use_own_rows
from step_rows import longest_gap

RANKS, WIDTH = 4, 8


def test_every_part_of_a_parameter_is_this_rank_s_own() -> None:
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    try:
        model = nn.Linear(WIDTH, WIDTH, bias=False)
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
        use_own_rows(model)
        assert isinstance(model.weight, DTensor)
        own = model.weight.to_local().detach().clone()
        seen: list[torch.Tensor] = []
        model.register_forward_hook(lambda module, *_: seen.append(module.weight.detach().clone()))
        batch = torch.randn(2, WIDTH)
        model(batch).sum().backward()
        assert torch.equal(seen[0], own.repeat(RANKS, 1))
        # The average of equal ranks.
        gradient = model.weight.grad
        assert isinstance(gradient, DTensor)
        expected = batch.sum(0).expand(WIDTH // RANKS, WIDTH)
        torch.testing.assert_close(gradient.to_local(), expected)
    finally:
        dist.destroy_process_group()


def test_a_gap_is_a_time_within_which_nothing_runs() -> None:
    assert longest_gap([(0, 4), (1, 2), (5, 6), (9, 10), (5, 8)]) == 1
    assert longest_gap([]) == 0
