"""What the model reads or runs without FSDP2's hooks stays with the root."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdptool.errors import ConfigError
from fsdptool.families.registry import load_registry
from fsdptool.inspection.api import decode, describe, encode
from fsdptool.inspection.build import build
from fsdptool.inspection.census import unit_plan
from fsdptool.layout import group as plan_group
from fsdptool.layout import resolve_sharding
from fsdptool.records.anatomy import ModelSpec, Reference
from fsdptool.records.sharding import FsdpSettings, UnitPlan
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


class Direct(nn.Module):
    """Calls ``forward`` of its blocks, which runs no hook."""

    def __init__(self) -> None:
        super().__init__()
        self.words = Positions(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        """Add up."""
        states = self.words(ids)
        for number, block in enumerate(self.blocks):
            states = states + block.forward(states) * number
        return states


class Rerun(torch.autograd.Function):
    """Runs blocks without gradients, and their parts once more in backward, as Reformer's does."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, blocks: nn.ModuleList) -> Tensor:
        """Run the blocks."""
        ctx.save_for_backward(states)
        ctx.blocks = blocks
        for block in blocks:
            states = block(states)
        return states

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Run them again with gradients."""
        (states,) = ctx.saved_tensors
        with torch.enable_grad():
            start = states = states.detach().requires_grad_()
            for block in ctx.blocks:
                states = block.proj(states)
        states.backward(gradient)
        assert start.grad is not None
        return start.grad, None


class Reversible(Direct):
    """Hands its blocks to an autograd function."""

    def forward(self, ids: Tensor) -> Tensor:
        """Run the blocks inside it."""
        out: Tensor = Rerun.apply(self.words(ids), self.blocks)
        return out


class Head(nn.Module):
    """Multiplies by a table that it is handed."""

    def forward(self, states: Tensor, table: nn.Embedding) -> Tensor:
        """Return the logits."""
        return states @ table.weight.t()


class Handing(nn.Module):
    """Hands its table to the head by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = Head()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits."""
        states = self.words(ids)
        for block in self.blocks:
            states = block(states)
        return self.head(states, table=self.words)


class Normed(nn.Embedding):
    """A table with a norm behind it: backward needs the norm's weight."""

    def __init__(self) -> None:
        super().__init__(64, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, ids: Tensor) -> Tensor:
        """Return normed rows."""
        return self.norm(super().forward(ids))


class Soft(nn.Embedding):
    """Multiplies by its table where it is given probabilities: backward needs the table."""

    def forward(self, ids: Tensor) -> Tensor:
        """Return mixed rows."""
        chosen = nn.functional.one_hot(ids, self.weight.shape[0]).to(self.weight.dtype)
        return chosen @ self.weight


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


def shard_and_train(model: nn.Module, plan: UnitPlan) -> None:
    """Shard as planned, and run one forward and backward."""
    mesh = init_device_mesh("cpu", (2,))
    for unit in plan.units:
        fully_shard(model.get_submodule(unit.modules[0]), mesh=mesh)
        if not unit.unshard_in_backward:
            model.get_submodule(unit.modules[0]).set_unshard_in_backward(False)
    model(torch.arange(8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("kind", [Direct, Reversible])
def test_blocks_that_run_without_hooks_stay_with_the_root(kind: type[nn.Module], group: None) -> None:
    model = kind()
    anatomy = describe(model, SPEC)
    assert anatomy.hookless == ("blocks.0", "blocks.1")
    assert decode(encode(anatomy), SPEC).hookless == anatomy.hookless, "the cache keeps it"
    assert not anatomy.wrap.classes
    assert "DET217" in {finding.code for finding in anatomy.diagnostics}
    shard_and_train(model, unit_plan(anatomy))
    for layout in ("native", "accelerate"):
        with pytest.raises(ConfigError, match="without FSDP2's hooks"):
            plan_group(anatomy, resolve_sharding(FsdpSettings(wrap_classes=("Block",)), layout=layout))


@pytest.mark.parametrize("kind", [Direct, Reversible])
def test_such_blocks_as_units_would_break(kind: type[nn.Module], group: None) -> None:
    """The reason for the rule: torch leaves them sharded."""
    model = kind()
    mesh = init_device_mesh("cpu", (2,))
    for path in ("blocks.0", "blocks.1", ""):
        fully_shard(model.get_submodule(path), mesh=mesh)
    with pytest.raises(RuntimeError, match="mixed torch"):
        model(torch.arange(8)).sum().backward()


def test_a_table_handed_to_another_module_stays_with_the_root(group: None) -> None:
    model = Handing()
    anatomy = describe(model, SPEC)
    assert anatomy.weights_read == ("words",)
    shard_and_train(model, unit_plan(anatomy))


def test_an_embedding_with_more_than_a_table_is_gathered_for_backward(group: None) -> None:
    model = Reader()
    model.words = Normed()
    plan = unit_plan(describe(model, SPEC))
    gathered = {unit.id: unit.unshard_in_backward for unit in plan.units}
    assert gathered["words"] and not gathered["sized"]
    shard_and_train(model, plan)


def test_an_embedding_that_multiplies_by_its_table_stays_with_the_root(group: None) -> None:
    model = Reader()
    model.sized = Soft(64, 16)
    anatomy = describe(model, SPEC)
    assert anatomy.weights_read == ("rows", "tables.0", "sized", "places")
    shard_and_train(model, unit_plan(anatomy))


def test_empty_parameters_are_kept_out_of_the_units() -> None:
    model = Reader()
    model.nothing = nn.Parameter(torch.empty(0, 16))
    anatomy = describe(model, SPEC)
    assert "DET216" in {finding.code for finding in anatomy.diagnostics}
    assert [parameter.fqn for parameter in unit_plan(anatomy).ignored] == ["nothing"]
    with pytest.raises(ConfigError, match="an empty parameter"):
        plan_group(anatomy, resolve_sharding(FsdpSettings(wrap_classes=("Block",)), layout="accelerate"))


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
