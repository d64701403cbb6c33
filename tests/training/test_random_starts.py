"""Every shipped family can start from random weights, made slice by slice from its own rules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdptool.distributed.initialisation import Blueprint, draw_blueprint, replay
from fsdptool.families.protocol import Family
from fsdptool.families.registry import load_registry
from fsdptool.families.synthetic import shrink

FAMILIES = {family.name: family for family in load_registry().all() if family.flavours()}


def blueprint_of(family: Family) -> Blueprint:
    """Return how a shrunk copy of the family's first flavour initialises itself."""
    flavour = next(iter(family.flavours().values()))
    config = shrink(family, flavour.config, flavour.model_class)

    def build() -> torch.nn.Module:
        return family.build(config, model_class=flavour.model_class)

    return draw_blueprint(build, seed=0, library=family.library)


@pytest.mark.sampled(every=12, whole=3)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_parameter_has_a_start(name: str) -> None:
    blueprint = blueprint_of(FAMILIES[name])
    missing = [fqn for fqn, noted in blueprint.notes.items() if not noted and fqn not in blueprint.values]
    assert not missing


def test_truncated_normals_have_their_spread_and_do_not_depend_on_who_draws() -> None:
    blueprint = blueprint_of(FAMILIES["vit"])
    name, shape = "vit.embeddings.position_embeddings", torch.Size((400, 17, 64))

    def rows(first: int, last: int) -> torch.Tensor:
        return replay(blueprint, name, shape, (first, last), dtype=torch.float32, seed=1, key=name)

    whole = rows(0, 400)
    assert float(whole.std()) == pytest.approx(0.02, rel=0.01)
    assert float(whole.mean()) == pytest.approx(0.0, abs=1e-4)
    assert torch.equal(rows(100, 200), whole[100:200])


def test_weight_normalisation_starts_at_the_length_of_its_direction() -> None:
    """As in torch: the direction is the convolution's own start, the length is its norm."""
    one, again = (blueprint_of(FAMILIES["wav2vec2"]) for _ in range(2))
    fqn = "wav2vec2.encoder.pos_conv_embed.conv.parametrizations.weight.original"
    length, direction = one.values[f"{fqn}0"], one.values[f"{fqn}1"]
    torch.testing.assert_close(length, torch.norm_except_dim(direction, 2, 2))
    # Kaiming's uniform start of a convolution (a = sqrt(5)): within 1 / sqrt(fan in), and spread over it.
    bound = (direction.shape[1] * direction.shape[2]) ** -0.5
    assert 0.9 * bound < float(direction.abs().max()) <= bound
    assert abs(float(direction.mean())) < 0.1 * bound
    assert torch.equal(again.values[f"{fqn}1"], direction), "every rank makes the same"


class _Derived(nn.Module):
    """Starts as Nemotron-H and I-BERT do: a weight scaled from itself, a buffer shaped like it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(40, 50))
        self.scale = nn.Parameter(torch.full((1,), 0.25))
        self.unset = nn.Parameter(torch.empty(3))
        self.bias, self.forgotten = nn.Parameter(torch.full((500,), 0.5)), nn.Parameter(torch.empty(500))
        self.register_buffer("rounded", torch.zeros_like(self.weight))
        nn.init.uniform_(self.weight, -1.0, 1.0)
        scaled = self.weight / 4
        self.weight.copy_(scaled)


def test_a_parameter_may_be_scaled_from_itself_and_a_buffer_may_have_its_shape() -> None:
    blueprint = draw_blueprint(_Derived, seed=3, library="transformers")
    assert "unset" not in blueprint.values and "forgotten" not in blueprint.values
    assert torch.equal(blueprint.values["bias"], torch.full((500,), 0.5))
    assert torch.equal(blueprint.buffers["rounded"], torch.zeros(40, 50))
    assert blueprint.values["scale"].tolist() == [0.25], "what the constructor gave and nothing changed"
    whole, part = (
        replay(blueprint, "weight", torch.Size((40, 50)), rows, dtype=torch.float32, seed=3, key="weight")
        for rows in ((0, 40), (10, 20))
    )
    assert 0.24 < float(whole.max()) <= 0.25
    assert torch.equal(part, whole[10:20])


class Listed(nn.Module):
    """Starts from a list of values made on the device of its parameters, as RWKV does, or keeps ones."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(1, 1, 100))
        self.scale = nn.Parameter(torch.full((300,), 3.0))
        ramp = torch.tensor([i / 100 for i in range(100)], dtype=self.mix.dtype, device=self.mix.device)
        self.mix.copy_(torch.pow(ramp[None, None, :], 0.5))


def test_values_may_come_from_a_list_and_never_share_one_element() -> None:
    """A fused optimizer writes through the pointer: an expanded start would be overrun."""
    blueprint = draw_blueprint(Listed, seed=0, library="transformers")

    def start(name: str, *shape: int) -> torch.Tensor:
        size = torch.Size(shape)
        return replay(blueprint, name, size, (0, size[0]), dtype=torch.float32, seed=0, key=name)

    torch.testing.assert_close(start("mix", 1, 1, 100).flatten(), (torch.arange(100) / 100).sqrt())
    scale = start("scale", 300)
    assert torch.equal(scale, torch.full((300,), 3.0))
    assert scale.untyped_storage().nbytes() == 300 * 4
