"""LoRA targets that a model does not have are answered with names that it has."""

from __future__ import annotations

import pytest
import torch

from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_of
from fsdptool.modeling.methods.lora import inject
from fsdptool.records.recipe import Lora, Method, ModelChoice, Recipe
from fsdptool.source import resolve


def test_the_remedy_names_layers_of_the_model() -> None:
    spec = resolve("gpt2:small")
    family = family_of(spec)
    with torch.device("meta"):
        model = family.build(spec.config, model_class=spec.model_class)
    recipe = Recipe(ModelChoice("gpt2:small"), method=Method("lora", lora=Lora(targets=("nope",))))
    with pytest.raises(ConfigError, match="LoRA targets do not match GPT2LMHeadModel") as error:
        inject(model, recipe, family, spec.config)
    assert (
        error.value.help == "name some of its layers under method.lora.targets: c_proj, c_attn, c_fc, lm_head"
    )
