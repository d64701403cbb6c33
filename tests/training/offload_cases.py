"""Parameters on the CPU of a mesh of GPUs, as FSDP2's CPU offload leaves them; ranks without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import checkpoint_cases
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdptool.distributed.shard import local, sharded_like
from fsdptool.records.recipe import Optimizer
from fsdptool.training.optimizers.sharded import ShardedOptimizer, build_optimizer
from fsdptool.training.state import EmaWeights, RunState

SHAPES = {"weight": (6, 3), "uneven": (5, 4), "bias": (4,)}


class NoBatches:
    """Data without samples."""

    samples_per_epoch, epoch, samples = 1, 0.0, 0

    def __iter__(self) -> Iterator[list[Mapping[str, torch.Tensor]]]:
        return self

    def __next__(self) -> list[Mapping[str, torch.Tensor]]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def rows_of(values: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows, in memory of their own."""
    chunks = values.chunk(dist.get_world_size())
    rank = dist.get_rank()
    return (chunks[rank] if rank < len(chunks) else values[:0]).clone()


def offloaded_model(scale: float) -> nn.Module:
    """Return parameters whose rows lie on the CPU, sharded over a mesh of GPUs as FSDP2 shards them."""
    # Making the mesh selects the GPU of this rank; nothing else here touches one.
    with mock.patch.object(torch.cuda, "set_device"):
        mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    model = nn.Module()
    for name, shape in SHAPES.items():
        values = scale * torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        meta = TensorMeta(values.shape, values.stride(), values.dtype)
        # fully_shard makes its parameters on meta without `from_local`.
        make: Any = DTensor
        empty = make(rows_of(values).to("meta"), DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)
        model.register_parameter(name, nn.Parameter(sharded_like(rows_of(values), empty)))
    return model


def take_step(model: nn.Module, optimizer: ShardedOptimizer, ema: EmaWeights, step: int) -> None:
    """Take a step whose gradients follow from its number."""
    for name, parameter in model.named_parameters():
        gradient = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(100 * step + len(name)))
        parameter.grad = sharded_like(rows_of(gradient), parameter)
    optimizer.step(1e-2)
    optimizer.zero_grad()
    ema.update(torch.zeros((), dtype=torch.bool))


def state_of(model: nn.Module, kind: str) -> RunState:
    """Return the state of a run over ``model``."""
    named = list(model.named_parameters())
    optimizer = build_optimizer(Optimizer(name=kind), named, rate=1e-2)
    return RunState(model, optimizer, NoBatches(), 0, dist.get_rank(), ema=EmaWeights(named, 0.9))


def continued(folder: str, kind: str, policy: dict[str, Any]) -> dict[str, Any]:
    """Take four steps; save after two, load that into another run, take its last two; compare both."""
    straight = state_of(offloaded_model(1.0), kind)
    saver = checkpoint_cases.checkpointer(folder, **policy)
    for step in range(4):
        if step == 2:
            straight.step = 2
            saver.save(straight)
        assert straight.ema is not None
        take_step(straight.model, straight.optimizer, straight.ema, step)
    saver.close()
    resumed = state_of(offloaded_model(3.0), kind)
    loader = checkpoint_cases.checkpointer(folder, resume="auto", **policy)
    loaded = loader.load(resumed)
    assert resumed.ema is not None
    for step in (2, 3):
        take_step(resumed.model, resumed.optimizer, resumed.ema, step)
    expected, found = straight.tensors(), resumed.tensors()
    return {
        "loaded": loaded,
        "equal": {name: torch.equal(local(expected[name]), local(found[name])) for name in expected},
        "devices": {str(local(value).device) for value in [*expected.values(), *found.values()]},
        # What a load writes to is what the optimizer reads.
        "live": all(
            local(value).untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
            for name, value in resumed.optimizer.state_tensors().items()
            if (again := local(resumed.optimizer.state_tensors()[name])).numel()
        ),
    }
