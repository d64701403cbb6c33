"""Blocks that a module holds as attributes are units like blocks in a list."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdptool.inspection import inspect
from fsdptool.inspection.census import Census, unit_plan
from fsdptool.inspection.walk import walk
from fsdptool.inspection.wrap_classes import choose
from fsdptool.records.anatomy import WrapChoice
from fsdptool.source import resolve


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, whatever ``fill`` adds, and a head."""

    def __init__(self, fill: Any) -> None:
        super().__init__()
        self.emb = nn.Embedding(32, 16)
        fill(self)
        self.head = nn.Linear(16, 32)


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        for number in range(depth):
            setattr(self, f"block{number}", Block(width))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(8, 16)
        self.layers = nn.ModuleList(Block() for _ in range(4))


class Attention(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)


class DecoderLayer(nn.Module):
    """Two equal attentions as attributes: inside a block they are no blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = Attention()
        self.cross_attention = Attention()
        self.mlp = Block()


def numbered(net: nn.Module) -> None:
    for number in range(8):
        setattr(net, f"block{number}", Block())


def named(net: nn.Module) -> None:
    for name in ("first", "second", "third"):
        setattr(net, name, Block())


def two_equal_among_others(net: nn.Module) -> None:
    for number, width in enumerate((16, 16, 24, 32)):
        setattr(net, f"block{number}", Block(width))


def nested(net: nn.Module) -> None:
    net.encoder = nn.Module()
    numbered(net.encoder)


def stages(net: nn.Module) -> None:
    """Stages of different widths as attributes, blocks as attributes inside them."""
    for number, width in enumerate((8, 16, 24, 32)):
        setattr(net, f"layer{number}", Stage(width, 3))


def equal_stages(net: nn.Module) -> None:
    for number in range(3):
        setattr(net, f"layer{number}", Stage(16, 3))


def sequences(net: nn.Module) -> None:
    """ResNet: attributes that are different sequences of one class."""
    for number, (width, depth) in enumerate(((8, 2), (16, 3), (24, 4), (32, 2)), 1):
        setattr(net, f"layer{number}", nn.Sequential(*(Block(width) for _ in range(depth))))


def dictionary(net: nn.Module) -> None:
    net.blocks = nn.ModuleDict({f"b{number}": Block() for number in range(4)})


def towers(net: nn.Module) -> None:
    net.query, net.document = Tower(), Tower()


class Branches(nn.Module):
    """Numbered sequences inside a block are its branches, not blocks."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(1, 5):
            setattr(
                self, f"conv{number}", nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 16))
            )


def mixed(net: nn.Module) -> None:
    numbered(net)
    net.layers = nn.ModuleList(Block() for _ in range(2))


def choice_of(model: nn.Module) -> WrapChoice:
    walked = walk(model)
    return choose(Census(walked.modules, walked.parameters))


@pytest.mark.parametrize(
    ("fill", "instances"),
    [
        (numbered, 8),
        (named, 3),
        (two_equal_among_others, 4),
        (nested, 8),
        (stages, 12),
        (equal_stages, 9),
        (sequences, 11),
        (dictionary, 4),
        (towers, 8),
        (mixed, 10),
    ],
)
def test_blocks_are_found_wherever_they_are_held(fill: Any, instances: int) -> None:
    with torch.device("meta"):
        choice = choice_of(Net(fill))
    assert choice.classes == ("Block",)
    (chosen,) = (item for item in choice.candidates if item.chosen)
    assert chosen.instances == instances


def test_equal_parts_of_a_block_are_not_blocks() -> None:
    def layers(net: nn.Module) -> None:
        net.layers = nn.ModuleList(DecoderLayer() for _ in range(3))

    def attributes(net: nn.Module) -> None:
        for number in range(3):
            setattr(net, f"layer{number}", DecoderLayer())

    for fill in (layers, attributes):
        assert choice_of(Net(fill)).classes == ("DecoderLayer",)


def test_branches_of_a_listed_block_are_not_blocks() -> None:
    def layers(net: nn.Module) -> None:
        net.layers = nn.ModuleList(Branches() for _ in range(3))

    assert choice_of(Net(layers)).classes == ("Branches",)


def test_attributes_of_one_kind_only_once_are_not_blocks() -> None:
    def parts(net: nn.Module) -> None:
        net.encoder, net.decoder = Block(16), Block(64)

    assert choice_of(Net(parts)).classes == ()


SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        self.depth, self.emb = depth, nn.Embedding(32, width)
        for number in range(depth):
            setattr(self, f"block{number}", Block(width))
        self.head = nn.Linear(width, 32)

    def forward(self, tokens, labels):
        hidden = self.emb(tokens)
        for number in range(self.depth):
            hidden = getattr(self, f"block{number}")(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())

def example_inputs(micro_batch):
    tokens = torch.zeros(micro_batch, 8, dtype=torch.int64)
    return {"tokens": tokens, "labels": tokens}
"""


def test_the_plan_groups_by_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attribute_blocks.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    anatomy = inspect(resolve("attribute_blocks:Net", trust_remote_code=True), use_cache=False)
    assert anatomy.wrap.classes == ("Block",)
    assert not {"DET206"} & {item.code for item in anatomy.diagnostics}
    units = unit_plan(anatomy).units
    assert [unit.id for unit in units if unit.kind == "block"] == [f"block{number}" for number in range(4)]
