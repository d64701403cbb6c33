"""What a method does to a model before it is grouped, traced or sharded.

``memory`` traces and ``layout`` groups exactly what this returns, so both see adapters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from fsdptool.families.protocol import Family
    from fsdptool.modeling.methods.quantised_formats import Format
    from fsdptool.records.recipe import Recipe


def prepare_model(model: nn.Module, recipe: Recipe, family: Family, config: Mapping[str, Any]) -> nn.Module:
    """Apply the recipe's method to a freshly built model and return it (changed in place).

    ``full`` and ``distillation`` train what the model itself marks as trainable; ``lora`` freezes
    it and injects adapters with peft. No module changes its class name except adapted layers.

    Args:
        model: On meta.
        recipe: Gives the method and its options.
        family: Gives the default LoRA targets.
        config: The model's raw configuration.

    Raises:
        ConfigError: The method's options do not suit the model.
    """
    if recipe.method.name == "lora":
        from fsdptool.modeling.methods.lora import inject

        inject(model, recipe, family, config)
    elif recipe.method.name == "distillation" and recipe.method.distillation is None:
        raise ConfigError("method distillation needs a teacher", help="name one under method.distillation")
    return model


def replicated_names(model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
    """Return the parameters the method keeps whole on every rank (``layout.group(replicated=...)``)."""
    lora = recipe.method.lora
    if recipe.method.name != "lora" or lora is None or lora.adapters != "replicated":
        return ()
    return tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def plain_base(recipe: Recipe) -> Recipe:
    """Return the recipe with LoRA's base as it was published."""
    lora = recipe.method.lora
    if recipe.method.name != "lora" or lora is None or lora.base == "unchanged":
        return recipe
    return replace(recipe, method=replace(recipe.method, lora=replace(lora, base="unchanged")))


def quantised_weights(model: nn.Module, recipe: Recipe) -> dict[str, Format]:
    """Return the base weights a recipe's run held quantised, by the base model's names.

    Args:
        model: Prepared with :func:`plain_base` of the recipe.
        recipe: The run's.
    """
    lora = recipe.method.lora
    if recipe.method.name != "lora" or lora is None or lora.base == "unchanged":
        return {}
    from fsdptool.distributed.materialize import base_name
    from fsdptool.modeling.methods.quantised_layers import choose_layers

    return {f"{base_name(path)}.weight": lora.base for path in choose_layers(model, lora.base).layers}
