"""LoRA as peft injects it: the configuration, the names of what it adds, and the values these start from."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdptool.errors import ConfigError
from fsdptool.records.codec import to_json
from fsdptool.records.recipe import Lora

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.families.protocol import Family
    from fsdptool.records.recipe import Recipe

ADAPTER = "default"
_MAGNITUDE = f".lora_magnitude_vector.{ADAPTER}.weight"
_COPY = f".modules_to_save.{ADAPTER}"
_ROWS = f".token_adapter.trainable_tokens_delta.{ADAPTER}"
_OLD_ROWS = f".token_adapter.trainable_tokens_original.{ADAPTER}"

Rows = tuple[int, int]
ReadRows = Callable[[Rows | None], "Tensor"]
"""Returns the rows of a base weight from one number to before another, or all of them."""


class Derived(NamedTuple):
    """A tensor of a method that starts from values of a published weight."""

    source: str
    """The weight, by its name in the published model."""
    compute: Callable[[ReadRows, Rows], Tensor]
    """Returns rows of the tensor."""


def adapter_config(recipe: Recipe, family: Family, config: Mapping[str, Any]) -> Any:
    """Return the ``peft.LoraConfig`` of a recipe.

    Raises:
        ConfigError: Neither the recipe nor the family names targets, or peft refuses a setting.
    """
    from peft import LoraConfig

    lora = recipe.method.lora or Lora()
    defaults = family.lora_targets(config)
    modules = lora.targets if lora.targets is not None else defaults.modules
    parameters = lora.target_parameters or (defaults.parameters if lora.targets is None else ())
    excluded = lora.exclude_modules if lora.exclude_modules is not None else defaults.exclude
    if not modules and not parameters:
        raise ConfigError(
            f"family {family.name} has no default LoRA targets",
            help="name module suffixes under method.lora.targets, for example [q_proj, v_proj]",
        )
    plain = to_json(lora)
    same = (
        *("layers_to_transform", "rank_pattern", "alpha_pattern", "bias", "lora_bias"),
        *("use_rslora", "use_dora", "ensure_weight_tying"),
    )
    try:
        return LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=None if modules == "default" else to_json(modules) or None,
            target_parameters=list(parameters) or None,
            exclude_modules=to_json(excluded) or None,
            layers_pattern=plain["layers_pattern"] or None,
            modules_to_save=plain["modules_to_save"] or None,
            trainable_token_indices=plain["trainable_token_indices"] or None,
            init_lora_weights=True if lora.init_lora_weights == "default" else "gaussian",
            **{name: plain[name] for name in same},
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"method.lora: {_first_line(error)}", help="correct the recipe") from error


def inject(model: nn.Module, recipe: Recipe, family: Family, config: Mapping[str, Any]) -> None:
    """Freeze ``model`` and inject adapters, on meta as the model is; quantise the base if the recipe says so.

    peft decides what is trained: adapters, copies of modules, rows of tables and biases.

    Raises:
        ConfigError: A target is not in the model, a setting is not supported for it, or the base cannot be
            stored in the requested format.
    """
    import torch

    from fsdptool.modeling.methods.quantised_formats import load_kernels

    load_kernels()
    from peft import inject_adapter_in_model

    settings = adapter_config(recipe, family, config)
    # Nothing has values yet; :meth:`LoraMethod.initialisation` draws them where a run holds them.
    settings.init_lora_weights = False
    model.requires_grad_(False)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            # peft's advice does not belong in a plan, and what matters of it is refused below.
            warnings.simplefilter("ignore")
            inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, re.error) as error:
        message = _first_line(error)
        if message.startswith(("Target modules", "No modules", "No `target_modules`", "All modules")):
            names = ", ".join(_layers(model))
            raise ConfigError(
                f"LoRA targets do not match {type(model).__name__}: {message}",
                help=f"name some of its layers under method.lora.targets: {names}" if names else None,
            ) from error
        raise ConfigError(
            f"peft cannot apply method.lora to {type(model).__name__}: {message}",
            help="correct the setting in the recipe, or in adapter_config.json",
        ) from error
    _check_injected(model, recipe.method.lora or Lora(), settings)
    base = (recipe.method.lora or Lora()).base
    if base != "unchanged":
        from fsdptool.modeling.methods.quantised_layers import quantise_base

        quantise_base(model, base)


def _layers(model: nn.Module, most: int = 8) -> list[str]:
    """Return the ends of the names of layers that LoRA can adapt, the most frequent first.

    A number is the place in a list: blocks and layers have the same ones.
    """
    from torch import nn

    ends = Counter(
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if not isinstance(module, nn.Embedding) and getattr(getattr(module, "weight", None), "ndim", 0) >= 2
    )
    return [name for name, _ in ends.most_common() if not name.isdigit()][:most]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _check_injected(model: nn.Module, lora: Lora, settings: Any) -> None:
    """Refuse what peft leaves out without an error, and what cannot be sharded.

    Raises:
        ConfigError: Names the setting.
    """
    # peft names the heads of every task, of which a model has one: none of all must be there.
    if lora.modules_to_save and not any(name.endswith(_COPY) for name, _ in model.named_modules()):
        raise ConfigError(
            f"method.lora.modules_to_save: {type(model).__name__} has no {', '.join(lora.modules_to_save)}",
            help="name modules by the ends of their paths (`fsdptool detect --tree` shows them)",
        )
    for name, (_, indices) in trained_rows(model).items():
        rows = model.get_parameter(name).shape[0]
        if beyond := [index for index in indices if not 0 <= index < rows]:
            raise ConfigError(
                f"method.lora.trainable_token_indices: there is no row {beyond[0]} in {base_name(name)},"
                f" which has {rows:,}",
                help="give the numbers of tokens that the table has",
            )
    if getattr(settings, "target_modules_to_tie", None):
        raise ConfigError(
            "method.lora.ensure_weight_tying ties the adapters of tied layers to one another, whose tensors"
            " cannot be sharded",
            help="leave the tied layers out of the targets, or train them whole with modules_to_save",
        )


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter's own matrices, by peft's naming."""
    return ".lora_" in f".{name}"


def is_copy(name: str) -> bool:
    """Return whether a tensor belongs to the copy of a module that is trained in its place."""
    return f"{_COPY}." in name


def original_name(name: str) -> str:
    """Return the name of the tensor that a copy was made of."""
    return name.replace(_COPY, ".original_module")


def base_name(name: str) -> str:
    """Return the name that a tensor had before adapters were injected.

    peft nests layers (``base_layer``), what it keeps of modules that it copies (``original_module``), and
    their copies.
    """
    plain = f".{name}".replace(_COPY, "").replace(".original_module", "").replace(".token_adapter", "")
    return plain.replace(".base_layer", "")[1:]


def saved_keys(model: Any) -> dict[str, str]:
    """Return the keys that peft gives the tensors of an adapter's file, and their names in the model."""
    from peft import get_peft_model_state_dict

    names = {name: name for name in dict(model.named_parameters(remove_duplicate=False))}
    names |= {name: name for name in dict(model.named_buffers(remove_duplicate=False))}
    keys: dict[str, Any] = get_peft_model_state_dict(
        model, state_dict=names, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return {key: str(name) for key, name in keys.items()}


def reset_adapters(model: nn.Module, start: str) -> None:
    """Let peft give all adapter matrices their first values (``default``: A Kaiming uniform, B zero)."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.reset_lora_parameters(ADAPTER, init_lora_weights=True if start == "default" else start)


def derived_tensors(model: nn.Module) -> dict[str, Derived]:
    """Return the tensors of a prepared model that start from values of the base, by name.

    They are DoRA's magnitudes, the norms of the weights, and trained rows of tables with what they replace.
    """
    found: dict[str, Derived] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, _ in tensors:
        for ending, make in ((_MAGNITUDE, _magnitude), (_ROWS, _table_rows), (_OLD_ROWS, _table_rows)):
            if name.endswith(ending):
                path = name.removesuffix(ending)
                found[name] = Derived(base_name(f"{path}.weight"), partial(make, model.get_submodule(path)))
    return found


def trained_rows(model: nn.Module) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tables of which rows are trained, by name: the name of the rows, and their numbers.

    Tied tables share the rows of the first.
    """
    first: dict[int, str] = {}
    tables: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.endswith(_ROWS):
            path = name.removesuffix(_ROWS)
            wrapper: Any = model.get_submodule(path)
            rows = first.setdefault(id(parameter), name)
            indices = tuple(wrapper.token_adapter.token_indices[ADAPTER])
            tables[f"{path}.token_adapter.base_layer.weight"] = (rows, indices)
    return tables


def _table_rows(wrapper: Any, read: ReadRows, rows: Rows) -> Tensor:
    import torch

    indices = wrapper.token_adapter.token_indices[ADAPTER][slice(*rows)]
    parts = [read((index, index + 1)) for index in indices]
    return torch.cat(parts) if parts else read((0, 0))


def _magnitude(layer: Any, read: ReadRows, rows: Rows) -> Tensor:
    """Return what peft computes of a weight to which nothing is added yet."""
    from torch import nn

    vector = layer.lora_magnitude_vector[ADAPTER]
    row_by_row = isinstance(layer.get_base_layer(), nn.Linear) and not vector.fan_in_fan_out
    norm: Tensor = vector.get_weight_norm(read(rows if row_by_row else None), 0.0, 1.0)
    return norm if row_by_row else norm[slice(*rows)]
