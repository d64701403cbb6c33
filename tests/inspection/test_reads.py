"""Embeddings that the model reads without calling them stay with the root."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdptool.families.registry import load_registry
from fsdptool.inspection.api import decode, describe, encode
from fsdptool.inspection.build import build
from fsdptool.inspection.census import unit_plan
from fsdptool.records.anatomy import ModelSpec, Reference
from fsdptool.testing.families import small_spec


class Block(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, states: Tensor) -> Tensor:
        """Project."""
        return self.proj(states)


class Positions(nn.Embedding):
    """A table with a second way to look up rows, which runs no hook."""

    def later(self, ids: Tensor) -> Tensor:
        """Return the rows behind ``ids``."""
        return super().forward(ids + 1)


class Reader(nn.Module):
    """Calls one table, reads three by hand, and only asks a fifth for its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16)
        self.rows = nn.Embedding(64, 16)
        self.tables = nn.ModuleList([nn.Embedding(64, 16)])
        self.sized = nn.Embedding(64, 16)
        self.places = Positions(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.tie_nothing()

    def tie_nothing(self) -> None:
        """Touch weights before training."""
        self.words.weight.data.zero_()

    def forward(self, ids: Tensor) -> Tensor:
        """Use each table its way."""
        states = self.words(ids) + self.sized(ids % self.sized.weight.shape[0])
        states = states + self.rows.weight.mean(0) + self.tables[0].weight.mean(0)
        states = states + self.places(ids) + self.places.later(ids)
        for block in self.blocks:
            states = block(states)
        return states


@pytest.fixture
def group() -> Iterator[None]:
    """Two ranks, of which this process is the first."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


SPEC = ModelSpec(Reference("config", "reader"), "generic", None, "diffusers", "Reader", {})


def test_what_is_read_by_hand_stays_with_the_root_and_trains(group: None) -> None:
    model = Reader()
    anatomy = describe(model, SPEC)
    assert anatomy.weights_read == ("rows", "tables.0", "places")
    assert decode(encode(anatomy), SPEC).weights_read == anatomy.weights_read, "the cache keeps it"
    plan = unit_plan(anatomy)
    assert {unit.id for unit in plan.units} == {"words", "sized", "blocks.0", "blocks.1", "root"}
    mesh = init_device_mesh("cpu", (2,))
    for unit in plan.units:
        fully_shard(model.get_submodule(unit.modules[0]), mesh=mesh)
    model(torch.arange(8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_unit_of_its_own_would_break(group: None) -> None:
    """The reason for the rule: torch does not gather what is not called."""
    model = Reader()
    mesh = init_device_mesh("cpu", (2,))
    for path in ("rows", "blocks.0", "blocks.1", ""):
        fully_shard(model.get_submodule(path), mesh=mesh)
    with pytest.raises(RuntimeError, match="mixed torch"):
        model(torch.arange(8)).sum().backward()


@pytest.mark.parametrize(
    ("family", "read"),
    [
        ("deberta-v3", ("encoder.rel_embeddings",)),
        ("gemma4", ("model.language_model.embed_tokens",)),
        ("llama3", ()),
        ("gpt2", ()),
    ],
)
def test_shipped_models_that_read_by_hand_are_known(family: str, read: tuple[str, ...]) -> None:
    shipped = load_registry().get(family)
    spec = small_spec(shipped, next(iter(shipped.flavours().values())))
    assert describe(build(spec, initialise=False), spec).weights_read == read
