"""What runs in every micro-batch asks a GPU for no more passes than it needs, and waits for none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdptool_diffusion.objectives import Epsilon
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptool.distributed.proof import _checksum
from fsdptool.modeling.expert_parallel import _counted
from fsdptool.modeling.methods import quantised_formats

READ_BY_THE_HOST = {"_local_scalar_dense", "bincount", "nonzero", "_unique2"}
"""Operators after which the host waits for a GPU (torch 2.13)."""


class Reads(TorchFunctionMode):
    """Counts tensors that are copied to the host, or read there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        readers = (torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.item)
        self.count += function in (*readers, torch.Tensor.__int__)
        return function(*args, **(kwargs or {}))


class Seen(TorchDispatchMode):
    """Lists the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_an_int8_weight_is_decoded_in_one_pass(dtype: torch.dtype) -> None:
    codes, scales = quantised_formats.encode("int8", torch.randn(16, 64))
    with Seen() as seen:
        weight = quantised_formats.decode("int8", codes, scales, dtype)
    whole = [name for name in seen.names if name in ("mul", "mul_", "_to_copy", "copy_")]
    # One product; the scales alone, one number a row, change their dtype.
    assert [name for name in whole if name != "_to_copy"] == ["mul"]
    assert whole.count("_to_copy") == (dtype != torch.float32)
    assert weight.dtype == dtype


def test_a_noise_schedule_is_computed_once() -> None:
    objective = Epsilon(denoise=lambda *arguments: arguments[1])
    batch = {"latents": torch.randn(3, 4, 8, 8), "timestep": torch.tensor([0, 500, 999])}
    first = objective.coefficients(batch)
    with Seen() as seen:
        second = objective.coefficients(batch)
        objective.weight({**batch, "noise": batch["latents"]})
    assert all(torch.equal(one, two) for one, two in zip(first, second, strict=True))
    assert not {"linspace", "cumprod", "copy_", "lift_fresh"} & set(seen.names)
    assert not READ_BY_THE_HOST & set(seen.names)


def test_tokens_of_experts_are_counted_where_they_are(alone: dist.ProcessGroup) -> None:
    chosen = torch.tensor([3, 0, 3, 1, 3, 0])
    with Seen() as seen:
        sent, came, local = _counted(chosen, (4, 4), alone)
    assert (sent, came) == ([6], [6])
    assert local.tolist() == [0, 0, 1, 3, 3, 3]
    assert not READ_BY_THE_HOST & set(seen.names)


def test_replicas_are_compared_where_they_are() -> None:
    """A sum of each shard is read by the host, all at once; a changed or moved value changes its sum."""
    shards = [torch.randn(3, 5, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    with Reads() as reads:
        before = _checksum(shards)
    assert reads.count == 1
    for place, shard in enumerate(shards):
        changed = shard.clone()
        changed[2, 4] += 1
        for other in (changed, shard.roll(1, 0)):
            assert _checksum([*shards[:place], other, *shards[place + 1 :]]) != before
