"""float8 training: where it is refused, and torchao's emulation sharded over ranks against a plain loop."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from cases import CASES, LLAMA, Case, prepare_case
from pool import Pool
from torch import nn

from fsdptool.errors import ConfigError
from fsdptool.modeling.methods import float8
from fsdptool.records.recipe import Lora, Method, ModelChoice, Recipe, Sharding
from fsdptool.records.sharding import FsdpSettings

FP8 = FsdpSettings(mixed_precision="fp8")
CPU = torch.device("cpu")
WIDE = Case(
    "causal",
    {**LLAMA, "hidden_size": 64, "intermediate_size": 128},
    ("LlamaDecoderLayer",),
    "causal_lm",
    (),
)


class Blocks(nn.Module):
    """Two blocks of one layer, and a head outside them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(32, 32)), nn.Sequential(nn.Linear(32, 30))])
        self.head = nn.Linear(32, 32)


def recipe_of(method: Method | None = None) -> Recipe:
    return Recipe(ModelChoice("llama3:8b"), method=method or Method())


def test_float8_is_refused_where_nothing_computes_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs float8 hardware, which this device \(cpu\) does not have"):
        float8.convert_layers(Blocks(), recipe_of(), FP8, CPU)
    with pytest.raises(ConfigError, match="fp8 trains whole weights, but LoRA keeps them frozen"):
        float8.convert_layers(Blocks(), recipe_of(Method("lora", lora=Lora())), FP8, CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ConfigError, match=r"NVIDIA A100 has 8\.0"):
        float8.convert_layers(Blocks(), recipe_of(), FP8, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(float8, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs torchao, which is not installed") as missing:
        float8.convert_layers(Blocks(), recipe_of(), FP8, torch.device("cuda", 0))
    assert "pip install torchao" in (missing.value.help or "")


def test_other_precisions_convert_nothing() -> None:
    model = Blocks()
    assert float8.convert_layers(model, recipe_of(), FsdpSettings(mixed_precision="bf16"), CPU) == 0
    assert all(type(module).__name__ != "Float8Linear" for module in model.modules())


def train_emulated(folder: Path, recipe: Recipe, steps: int) -> dict[str, Any]:
    """Train the wide case on the pool's ranks with emulated float8 layers."""
    import ranks

    before = CASES["causal"]
    CASES["causal"], os.environ[float8.EMULATE] = WIDE, "1"
    try:
        return ranks.train("causal", folder, recipe, None, steps, 4, {"mixed_precision": "fp8"})
    finally:
        CASES["causal"] = before
        del os.environ[float8.EMULATE]


@pytest.mark.distributed
@pytest.mark.parametrize("world", [1, 2, 4])
def test_emulated_float8_layers_shard_and_train(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    pytest.importorskip("torchao", reason="emulation is torchao's")
    recipe, folder = prepare_case(WIDE, tmp_path, "full")
    # Everything but the float8 layers in fp32, so that the plain loop computes the same.
    recipe = dataclasses.replace(recipe, sharding=Sharding(param_dtype="float32"))
    found = pool.run(train_emulated, world, folder, recipe, 5, timeout=300.0)[0]
    monkeypatch.setitem(CASES, "causal", WIDE)
    plain = reference.run("causal", recipe, found["before"], {}, steps=5)
    build = reference.plain_model

    def converted(*args: Any) -> nn.Module:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(emulate=True, pad_inner_dim=True)
        model: nn.Module = build(*args)
        convert_to_float8_training(model.model.layers, config=config)
        return model

    monkeypatch.setattr(reference, "plain_model", converted)
    expected = reference.run("causal", recipe, found["before"], {}, steps=5)
    assert found["losses"][0] == pytest.approx(expected["losses"][0], rel=1e-6)
    # Later a last bit of a sum moves a scale, and with it what rounds up and what rounds down.
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-3)
    assert abs(found["losses"][0] / plain["losses"][0] - 1) > 1e-5, "float8 rounds"
    trained = [
        name for name, value in found["before"].items() if not torch.equal(value, found["after"][name])
    ]
    assert any(name.endswith("q_proj.weight") for name in trained)
