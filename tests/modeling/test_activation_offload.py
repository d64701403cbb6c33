"""Inputs of checkpointed blocks in host memory: the same gradients, and what stays on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdptool.modeling import activation_offload
from fsdptool.modeling.activation_checkpointing import checkpoint_units
from fsdptool.records.checkpointing import SAVED_OPERATORS
from fsdptool.records.sharding import Unit, UnitPlan


class Block(nn.Module):
    """A residual block with dropout that adds what all blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, *, shared: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Return the next hidden states."""
        scale, mask = shared
        hidden = torch.sigmoid(self.up(self.norm(x))) * mask
        return x + nn.functional.dropout(self.down(hidden), 0.3) * scale


class Model(nn.Module):
    """Blocks in a given order: one may run twice, or not at all."""

    def __init__(self, blocks: int, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks, self.order = nn.ModuleList(Block() for _ in range(blocks)), order
        self.scale = nn.Parameter(torch.full((16,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of the last hidden states."""
        shared = self.scale * 2, torch.rand(2, 8, 1).expand(2, 8, 32)
        for index in self.order:
            x = self.blocks[index](x, shared=shared)
        return x.square().sum()


def checkpointed(order: tuple[int, ...], *, offload: bool, saved: tuple[str, ...] = ()) -> Model:
    """Return the model with the same weights each time."""
    torch.manual_seed(0)
    model = Model(max(order) + 1, order)
    units = tuple(
        Unit(f"b{i}", "block", (f"blocks.{i}",), "Block", (), checkpointed=True, save_operators=saved)
        for i in range(max(order) + 1)
    )
    assert (
        checkpoint_units(model, UnitPlan("native", units, None, None, None), offload=offload)
        == max(order) + 1
    )
    return model


def gradients(model: Model, steps: int = 2) -> list[torch.Tensor | None]:
    """Return the gradients of a few micro-batches."""
    torch.manual_seed(1)
    for _ in range(steps):
        model(torch.randn(2, 8, 16)).backward()
    return [parameter.grad for parameter in model.parameters()]


def frozen(model: Model) -> None:
    """Train the last blocks only."""
    model.scale.requires_grad_(False)
    for block in list(model.blocks)[:-2]:
        block.requires_grad_(False)


def compiled(model: Model) -> None:
    """Compile block by block, as the trainer does."""
    for block in model.blocks:
        block.compile(backend="aot_eager")


def unchanged(model: Model) -> None:
    """Train the model as it is."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "saved", "change"),
    [
        ((0, 1, 2, 3, 4), (), unchanged),
        ((0, 1, 2, 3, 4), SAVED_OPERATORS, unchanged),
        ((0,), (), unchanged),
        ((0, 1, 0, 3, 1, 1), (), unchanged),
        ((0, 1, 2, 3, 4), (), frozen),
        ((0, 1, 2), (), compiled),
    ],
    ids=["full", "selective", "one block", "uneven use", "frozen blocks", "compiled"],
)
def test_gradients_are_those_without_offload_to_the_bit(
    order: tuple[int, ...], saved: tuple[str, ...], change: Callable[[Model], None]
) -> None:
    found = []
    for offload in (False, True):
        model = checkpointed(order, offload=offload, saved=saved)
        change(model)
        found.append(gradients(model))
    assert any(gradient is not None for gradient in found[0])
    for expected, gradient in zip(*found, strict=True):
        assert (gradient is None) == (expected is None)
        assert gradient is None or torch.equal(gradient, expected)


class Copies:
    """Watches the copies, and which of the copied tensors are alive on their device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.alive: list[weakref.ref[Any]] = []
        for name, copy in (
            ("to_host", activation_offload.to_host),
            ("to_device", activation_offload.to_device),
        ):
            monkeypatch.setattr(activation_offload, name, self._watched(name, copy))

    def _watched(self, name: str, copy: Callable[..., Any]) -> Callable[..., Any]:
        def watched(tensor: torch.Tensor, *device: torch.device) -> Any:
            made = copy(tensor, *device)
            self.events.append(name)
            on_device = made[0] if device else tensor
            self.alive.append(weakref.ref(on_device.untyped_storage()))
            return made

        return watched


def test_two_blocks_stay_and_the_others_come_back_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    model = checkpointed((0, 1, 2, 3, 4, 5), offload=True)
    ran: list[int] = []
    for index, block in enumerate(model.blocks):
        block.norm.register_forward_pre_hook(lambda *_, index=index: ran.append(index))
        block.norm.register_forward_pre_hook(lambda *_: copies.events.append("block"))
    loss = model(torch.randn(2, 8, 16))
    # What all blocks share is not copied. The last block's input is on the device when backward begins.
    assert copies.events == ["block", *["to_host", "block"] * 5]
    assert [reference() is not None for reference in copies.alive] == [False] * 4 + [True]
    copies.events.clear()
    loss.backward()
    assert ran[6:] == [5, 4, 3, 2, 1, 0]
    # Each input comes while the block behind it is computed again.
    assert copies.events == ["block", *["to_device", "block"] * 4, "block"]
    assert not any(reference() is not None for reference in copies.alive)


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    model = checkpointed((0, 1, 2, 3), offload=True)
    first = model.blocks[0].forward
    shared = torch.ones(16), torch.ones(1)
    x = torch.randn(2, 8, 16, requires_grad=True) * 1
    hidden = first(x, shared=shared)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \[2, 8, 16\], was changed in place"):
        model.blocks[1].forward(hidden, shared=shared)
