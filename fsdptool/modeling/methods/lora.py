"""LoRA through peft's own injection, so that peft loads what a run leaves behind."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from fsdptool.errors import ConfigError
from fsdptool.modeling.methods import Initialisation, TrainingMethod
from fsdptool.records.recipe import Lora

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from fsdptool.families.protocol import Family
    from fsdptool.modeling.methods.quantised_formats import Format
    from fsdptool.records.recipe import MethodName, Recipe
    from fsdptool.records.sharding import FsdpSettings

ADAPTER = "default"


class LoraMethod(TrainingMethod):
    """Trains adapters beside a frozen base, which may be stored quantised (Hu et al. 2021)."""

    name: ClassVar[MethodName] = "lora"
    adds_parameters: ClassVar[bool] = True

    def check(self, recipe: Recipe, settings: FsdpSettings) -> None:
        """Refuse float8 training, which is for trained weights."""
        if settings.mixed_precision == "fp8":
            raise ConfigError(
                "mixed_precision fp8 trains whole weights, but LoRA keeps them frozen",
                help="use bf16, and method.lora.base: float8 to store the base in 8 bits",
            )

    def prepare(self, model: nn.Module, recipe: Recipe, family: Family, config: Mapping[str, Any]) -> None:
        """Freeze the model, inject adapters and quantise the base."""
        inject(model, recipe, family, config)

    def replicated(self, model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
        """Return the adapters' parameters if the recipe replicates them."""
        lora = recipe.method.lora
        if lora is None or lora.adapters != "replicated":
            return ()
        return tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)

    def initialisation(self, model: nn.Module) -> Initialisation | None:
        """Return peft's own initialisation of adapters (A Kaiming uniform, B zero)."""
        from peft.tuners.lora import LoraLayer

        def reset() -> None:
            for module in model.modules():
                if isinstance(module, LoraLayer):
                    module.reset_lora_parameters(ADAPTER, init_lora_weights=True)

        return Initialisation(reset, {n: p for n, p in model.named_parameters() if is_adapter(n)})

    def unquantised(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the base as it was published."""
        lora = recipe.method.lora
        if lora is None or lora.base == "unchanged":
            return recipe
        return replace(recipe, method=replace(recipe.method, lora=replace(lora, base="unchanged")))

    def quantised_weights(self, model: nn.Module, recipe: Recipe) -> dict[str, Format]:
        """Return the weights of the layers that the base's format was chosen for."""
        lora = recipe.method.lora
        if lora is None or lora.base == "unchanged":
            return {}
        from fsdptool.modeling.methods.quantised_layers import choose_layers

        return {f"{base_name(path)}.weight": lora.base for path in choose_layers(model, lora.base).layers}


def adapter_config(recipe: Recipe, family: Family, config: Mapping[str, Any]) -> Any:
    """Return the ``peft.LoraConfig`` of a recipe.

    Raises:
        ConfigError: Neither the recipe nor the family names targets.
    """
    from peft import LoraConfig

    lora = recipe.method.lora or Lora()
    defaults = family.lora_targets(config)
    modules = lora.targets if lora.targets is not None else defaults.modules
    parameters = lora.target_parameters or (defaults.parameters if lora.targets is None else ())
    if not modules and not parameters:
        raise ConfigError(
            f"family {family.name} has no default LoRA targets",
            help="name module suffixes under method.lora.targets, for example [q_proj, v_proj]",
        )
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=list(modules) or None,
        target_parameters=list(parameters) or None,
    )


def inject(model: nn.Module, recipe: Recipe, family: Family, config: Mapping[str, Any]) -> None:
    """Freeze ``model`` and inject adapters, on meta as the model is; quantise the base if the recipe says so.

    Raises:
        ConfigError: A target is not in the model, or the base cannot be stored in the requested format.
    """
    import torch

    from fsdptool.modeling.methods.quantised_formats import load_kernels

    load_kernels()
    from peft import inject_adapter_in_model

    settings = adapter_config(recipe, family, config)
    model.requires_grad_(False)
    try:
        with torch.device("meta"):
            inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(
            f"LoRA targets do not match {type(model).__name__}: {str(error).splitlines()[0]}",
            help="name module suffixes that `fsdptool detect` lists under method.lora.targets",
        ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    base = (recipe.method.lora or Lora()).base
    if base != "unchanged":
        from fsdptool.modeling.methods.quantised_layers import quantise_base

        quantise_base(model, base)


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, by peft's naming."""
    return ".lora_" in f".{name}"


def base_name(name: str) -> str:
    """Return the name a parameter had before adapters were injected (peft nests ``base_layer``)."""
    return name.replace(".base_layer", "")
