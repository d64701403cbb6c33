"""LoRA targets that a model does not have are answered with names that it has."""

from __future__ import annotations

import pytest
import torch

from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_of
from fsdptool.modeling.methods.lora import inject
from fsdptool.records.recipe import Lora, Method, ModelChoice, Recipe
from fsdptool.source import resolve


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("gpt2:small", "c_proj, c_attn, c_fc, lm_head"),
        ("sd3:medium", "linear, proj, to_q"),
    ],
)
def test_the_remedy_names_layers_of_the_model(name: str, named: str) -> None:
    spec = resolve(name)
    family = family_of(spec)
    with torch.device("meta"):
        model = family.build(spec.config, model_class=spec.model_class)
    recipe = Recipe(ModelChoice(name), method=Method("lora", lora=Lora(targets=("nope",))))
    with pytest.raises(ConfigError, match=f"LoRA targets do not match {type(model).__name__}") as error:
        inject(model, recipe, family, spec.config)
    assert str(error.value.help).startswith(f"name some of its layers under method.lora.targets: {named}")
