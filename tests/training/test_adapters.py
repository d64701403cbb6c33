"""Training continues from an adapter's own weights, and is what peft's model does in a plain loop."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from cases import CASES, recipe_for
from pool import Pool
from ranks import train
from torch import nn

from fsdptool.errors import ConfigError
from fsdptool.records.recipe import ModelChoice, Recipe
from fsdptool.source import adapted, resolve

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

TABLES = {"modules_to_save": ["embed_tokens", "lm_head"]}
QV: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "tables saved": ("causal", QV | TABLES),
    "tied tables saved apart": ("qwen3 tied", QV | TABLES),
    "tied tables saved together": ("qwen3 tied", QV | TABLES | {"ensure_weight_tying": True}),
    "DoRA": ("causal", QV | {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "DoRA of a table and a head": (
        "causal",
        QV | {"use_dora": True, "target_modules": ["embed_tokens", "lm_head", "v_proj"]},
    ),
    "DoRA, transposed": ("gpt2", QV | {"use_dora": True, "target_modules": ["c_attn", "c_proj"]}),
    "rsLoRA, ranks and alphas by pattern": (
        "causal",
        QV | {"use_rslora": True, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 3}},
    ),
    "rows": ("causal", QV | {"trainable_token_indices": [5, 11, 70]}),
    "rows of a tied table": ("qwen3 tied", QV | {"trainable_token_indices": [5, 11, 70]}),
    "a saved norm, an adapted table": (
        "causal",
        QV | {"modules_to_save": ["norm"], "target_modules": ["embed_tokens", "q_proj"]},
    ),
    "biases": ("gpt2", QV | {"bias": "all", "lora_bias": True, "target_modules": ["c_attn"]}),
    "a denoiser": ("flow", QV | {"target_modules": ["to_q"], "modules_to_save": ["proj_out"], "use_dora": True}),
}


def write_base(folder: Path, config: dict[str, Any]) -> Path:
    """Save a base with weights, as its library does."""
    torch.manual_seed(3)
    model: Any = reference.plain_model(CASES["causal"], config, torch.float32)
    model.save_pretrained(folder / "base")
    if "_class_name" not in config:
        (folder / "base" / "config.json").write_text(json.dumps(config))
    return folder / "base"


def library_base(folder: Path, config: dict[str, Any]) -> nn.Module:
    if "_class_name" in config:
        from diffusers import SD3Transformer2DModel

        return SD3Transformer2DModel.from_pretrained(folder).train()
    import transformers

    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder, dtype=torch.float32)
    return model.train()


def write_adapter(folder: Path, base: Path, config: dict[str, Any], settings: dict[str, Any]) -> Path:
    """Let peft save an adapter that has been trained: every trained value differs from a fresh one."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(4)
    model = get_peft_model(library_base(base, config), LoraConfig(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(str(folder / "adapter"))
    written = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    written["base_model_name_or_path"] = str(base)
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(written))
    return folder / "adapter"


def recipe_of(name: str, adapter: Path) -> Recipe:
    """Return the recipe of a case with nothing but the adapter as its model."""
    plain = recipe_for(CASES[name], str(adapter), "full")
    plain = dataclasses.replace(plain, model=ModelChoice(str(adapter)))
    return adapted(plain, resolve(str(adapter)))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_training_continues_from_an_adapter_as_peft_does(pool: Pool, tmp_path: Path, kind: str) -> None:
    """Eight steps on two ranks against ``PeftModel.from_pretrained`` in one process: weights within 1e-6."""
    from peft import PeftModel

    name, settings = ADAPTERS[kind]
    config = CASES[name].config
    base = write_base(tmp_path, config)
    adapter = write_adapter(tmp_path, base, config, settings)
    recipe = recipe_of(name, adapter)
    found, other = pool.run(train, 2, name, tmp_path, recipe, None, 8)
    assert found["hash"] == other["hash"]
    peft_model: Any = PeftModel.from_pretrained(library_base(base, config), str(adapter), is_trainable=True)
    theirs = peft_model.base_model.model
    start = dict(theirs.named_parameters(remove_duplicate=False))
    assert start.keys() == found["before"].keys()
    for key, value in start.items():
        assert torch.equal(found["before"][key], value.detach()), key
    trained = {key for key, value in start.items() if value.requires_grad}
    expected = reference.run(name, recipe, {}, {}, steps=8, model=theirs)
    losses, weights, _ = reference.compare(found, expected)
    assert losses <= 1e-6
    assert weights <= 1e-6
    moved = {key for key in trained if not torch.equal(found["before"][key], found["after"][key])}
    assert {key.partition("lora_")[0] for key in moved} == {key.partition("lora_")[0] for key in trained}
