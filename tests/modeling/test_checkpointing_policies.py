"""Checkpointing policies: as text, and as what a block really computes again in backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdptool.config.recipe import dump_recipe, read_recipe
from fsdptool.errors import ConfigError
from fsdptool.modeling.activation_checkpointing import checkpoint_units
from fsdptool.records.checkpointing import (
    SAVED_OPERATORS,
    BlockPolicy,
    Checkpointing,
    format_policy,
    read_policy,
)
from fsdptool.records.recipe import ModelChoice, Recipe, Sharding
from fsdptool.records.sharding import Unit, UnitPlan

WIDTHS = (3, 5, 7, 11, 13)


class Block(nn.Module):
    """Linear layers whose products are told apart by their width."""

    def __init__(self) -> None:
        super().__init__()
        pairs = zip((2, *WIDTHS), (*WIDTHS, 2), strict=True)
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=i % 3 == 0) for i, o in pairs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
        return x


class Products(TorchDispatchMode):
    """Notes the width of every linear layer's product."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and torch.is_grad_enabled():
            self.widths.append(out.shape[-1])
        return out


def recomputed(policy: str) -> list[int]:
    """Return the widths of the products that backward computes again."""
    (block,) = read_policy(policy).per_block(1)
    recompute = block.mode != "none"
    unit = Unit("0", "block", ("0",), "Block", (), checkpointed=recompute, save_operators=block.saved)
    model = nn.Sequential(Block())
    checkpoint_units(model, UnitPlan("native", (unit,), None, None, None))
    x = torch.randn(4, 2, requires_grad=True)
    loss = model(x).sum()
    with Products() as products:
        loss.backward()
    return products.widths


@pytest.mark.parametrize(
    ("policy", "widths"),
    [
        ("none", []),
        ("full", [3, 5, 7, 11, 13, 2]),
        ("selective", []),
        # torchtitan saves the first product and recomputes the second, in turn.
        ("selective:every-2-matmuls", [5, 11, 2]),
        ("selective:matmul/3", [5, 7, 13, 2]),
        ("selective:matmul#2,matmul#6", [3, 7, 11, 13]),
        ("selective:aten.addmm.default", [3, 7, 11, 13, 2]),
        ("1*selective:aten.mm.default#1", [5, 7, 11, 13, 2]),
    ],
)
def test_backward_computes_again_what_the_policy_did_not_keep(policy: str, widths: list[int]) -> None:
    assert recomputed(policy) == widths


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "full",
        "every_3",
        "selective",
        "selective:every-2-matmuls",
        "selective:attention,matmul#3",
        "12*full+3*selective+1*selective:matmul/4,aten.silu.default#1+16*none",
    ],
)
def test_a_policy_reads_back_from_its_text(text: str) -> None:
    assert format_policy(read_policy(text)) == text


@pytest.mark.parametrize(
    "text",
    ["some", "every_0", "selective:", "full:matmul", "0*full", "2*every_2", "2*full+", "selective:matmul#0"],
)
def test_a_text_that_is_no_policy_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        read_policy(text)


def test_the_runs_of_a_policy_count_every_block() -> None:
    policy = Checkpointing("per_block", blocks=(BlockPolicy(2), BlockPolicy(1, "none")))
    assert [run.mode for run in policy.per_block(3)] == ["full", "full", "none"]
    with pytest.raises(ConfigError, match="describes 3 blocks, and the model has 4"):
        policy.per_block(4)
    assert [run.mode for run in Checkpointing("every_n", every_n=2).per_block(3)] == ["full", "none", "full"]


def test_an_operator_that_torch_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch has no operator"):
        recomputed("selective:aten.no_such_operator.default")


def test_a_recipe_holds_the_policy_and_refuses_an_impossible_one(tmp_path: Path) -> None:
    policy = read_policy("12*full+20*selective:attention,matmul#5")
    recipe = Recipe(ModelChoice("llama3:8b"), sharding=Sharding(checkpointing=policy))
    text = dump_recipe(recipe)
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert read_recipe(path).sharding.checkpointing == policy
    for before, after, complaint in (
        ("count: 12", "count: 0", r"blocks\.count must be at least 1, not 0"),
        ("matmul#5", "matmul#0", "does not name an operator"),
        ("mode: per_block", "mode: full", "require each other"),
    ):
        assert before in text
        path.write_text(text.replace(before, after, 1))
        with pytest.raises(ConfigError, match=complaint):
            read_recipe(path)


class Float8Product(torch.autograd.Function):
    """A float8 product as torchao's layers make it, with a backward that wants its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = torch.ones(())
        one, two = (part.to(torch.float8_e4m3fn) for part in (x, weight))
        out: torch.Tensor = torch._scaled_mm(one, two.t(), scale, scale, out_dtype=torch.bfloat16)
        ctx.save_for_backward(weight)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.saved_tensors[0], None


def test_a_float8_product_is_kept_like_any_other() -> None:
    calls: list[str] = []

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            calls.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(Float8Product.apply(x, self.weight))

    for saved, count in ((SAVED_OPERATORS, 1), ((), 2)):
        model = nn.Sequential(Layer())
        unit = Unit("0", "block", ("0",), "Layer", (), checkpointed=True, save_operators=saved)
        checkpoint_units(model, UnitPlan("native", (unit,), None, None, None))
        x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
        calls.clear()
        with Counted():
            model(x).sum().backward()
        assert calls.count("_scaled_mm") == count
