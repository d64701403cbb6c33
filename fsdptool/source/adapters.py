"""What ``adapter_config.json`` of a PEFT adapter says, as the LoRA settings of a recipe. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from typing import Any

from fsdptool.errors import ConfigError, ReferenceError  # noqa: A004 - a reference names a model here
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.recipe import MAX_LORA_RANK, Lora, Method, Recipe
from fsdptool.source.references import short

_NAMES = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "targets",
    **{
        name: name
        for name in (
            *("target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern"),
            *("rank_pattern", "alpha_pattern", "modules_to_save", "trainable_token_indices"),
            *("ensure_weight_tying", "bias", "lora_bias", "use_rslora", "use_dora"),
        )
    },
}
"""Settings of peft's ``LoraConfig`` (0.21) by those of a recipe."""

_LISTS = ("layers_to_transform", "layers_pattern")
"""What peft takes as one value or as a list."""

_REFUSED = {
    "layer_replication": "it repeats blocks of the base",
    "megatron_config": "it adapts layers of Megatron",
    "use_qalora": "QALoRA computes with pooled inputs",
    "use_bdlora": "its matrices are block-diagonal",
    "velora_config": "VeLoRA compresses activations",
    "monteclora_config": "MonteCLoRA samples its matrices",
    "kasa_config": "KaSA changes the weights of the base",
    "arrow_config": "it routes between several adapters",
    "alora_invocation_tokens": "aLoRA adapts the tokens after an invocation only",
}
"""Settings that change how a model with an adapter computes, and how."""

_STARTS = {True: "default", "gaussian": "gaussian"}
_CONTINUED = (False, "eva", "orthogonal")
"""Initial values of ``lora_A`` and ``lora_B`` that only matter to an adapter without weights of its own."""

_HEADS = {
    "SEQ_CLS": ("classifier", "score"),
    "TOKEN_CLS": ("classifier", "score"),
    "QUESTION_ANS": ("qa_outputs",),
}
"""What peft 0.21 adds to ``modules_to_save`` for a task (``peft_model.py``)."""

_FREE = frozenset(
    {"dropout", "adapters", "base", "alpha", "alpha_pattern", "use_rslora", "init_lora_weights"}
)
"""Settings that may differ from those an adapter's weights were made with: their names and shapes stay."""


def read_adapter(adapter: Mapping[str, Any], where: str) -> Lora:
    """Return the settings of an adapter.

    Args:
        adapter: Its ``adapter_config.json``.
        where: The reference, for messages.

    Raises:
        ReferenceError: It is not LoRA, uses what is not supported, or has values of a wrong kind; the message
            names it.
    """
    _check_kind(adapter, where)
    values: dict[str, Any] = {}
    for theirs, ours in _NAMES.items():
        value = adapter.get(theirs)
        if value is not None:
            values[ours] = [value] if theirs in _LISTS and not isinstance(value, list) else value
    # peft's own defaults where the file is silent; a recipe's would be the family's.
    values = {"rank": 8, "alpha": 8, "exclude_modules": [], **values}
    if "targets" not in values:
        values["targets"] = [] if values.get("target_parameters") else "default"
    heads = _HEADS.get(str(adapter.get("task_type")), ())
    if heads and isinstance(values.get("modules_to_save", []), list):
        values["modules_to_save"] = list(dict.fromkeys([*values.get("modules_to_save", []), *heads]))
    start = adapter.get("init_lora_weights", True)
    values["init_lora_weights"] = "default" if start in _CONTINUED else _STARTS.get(start, start)
    try:
        lora = from_json(Lora, values, where="adapter_config.json")
    except ConfigError as error:
        raise ReferenceError(
            f"{where}: {_by_their_names(error.message)}", help="correct adapter_config.json"
        ) from error
    ranks = {"r": lora.rank, **{f"rank_pattern[{key!r}]": rank for key, rank in lora.rank_pattern.items()}}
    for name, rank in ranks.items():
        if not 1 <= rank <= MAX_LORA_RANK:
            raise ReferenceError(
                f"{where}: adapter_config.json: {short(name)} is {rank}, not from 1 to {MAX_LORA_RANK}",
                help="correct adapter_config.json",
            )
    if not 0 <= lora.dropout < 1:
        raise ReferenceError(
            f"{where}: adapter_config.json: lora_dropout is {lora.dropout}, not at least 0 and below 1",
            help="correct adapter_config.json",
        )
    return lora


def _check_kind(adapter: Mapping[str, Any], where: str) -> None:
    kind, base = adapter.get("peft_type", "LORA"), short(str(adapter.get("base_model_name_or_path")))
    other = f"name its base to train that ({base}), or use peft itself"
    if kind != "LORA":
        raise ReferenceError(
            f"{where} is a PEFT adapter of type {short(str(kind))}, and of these only LORA is supported",
            help=other,
        )
    for name, why in _REFUSED.items():
        if adapter.get(name):
            raise ReferenceError(
                f"{where}: {name} in adapter_config.json is not supported: {why}", help=other
            )
    start = adapter.get("init_lora_weights", True)
    if not isinstance(start, bool | str) or (start not in _STARTS and start not in _CONTINUED):
        raise ReferenceError(
            f"{where}: init_lora_weights {short(repr(start))} in adapter_config.json is not supported: such"
            " an adapter belongs to weights of the base that its initialisation changed",
            help="convert it with peft's save_pretrained(path_initial_model_for_weight_conversion=...)",
        )


def _by_their_names(message: str) -> str:
    """Return a message about a recipe's settings with peft's names for them."""
    for theirs, ours in _NAMES.items():
        before, key, rest = message.partition(f"adapter_config.json.{ours}")
        if key and rest[:1] in (":", ".", "["):
            return f"{before}adapter_config.json: {theirs}{rest}"
    return message


def adapted(recipe: Recipe, spec: ModelSpec, given: Collection[str] = ()) -> Recipe:
    """Return the recipe with the method that its model asks for: an adapter is trained as its file says.

    What the recipe says wins: values that differ from the defaults, and those that are ``given``.

    Args:
        recipe: As read, or as options made it.
        spec: Its model.
        given: Paths of the keys that a person wrote (``method.name``, ``method.lora.rank``).

    Raises:
        ConfigError: The recipe asks for a method that does not train adapters.
    """
    if spec.adapter is None:
        return recipe
    name = recipe.method.name
    if name == "distillation" or (name == "full" and "method.name" in given):
        base = short(str(spec.adapter.get("base_model_name_or_path")))
        raise ConfigError(
            f"method {name} trains every parameter, and {spec.reference.id} is a LoRA adapter",
            help=f"leave the method out to train the adapter, name its base ({base}), or merge them first",
        )
    own, asked = read_adapter(spec.adapter, spec.reference.id), recipe.method.lora or Lora()
    changes = {
        field.name: getattr(asked, field.name)
        for field in fields(Lora)
        if f"method.lora.{field.name}" in given or getattr(asked, field.name) != getattr(Lora(), field.name)
    }
    return replace(recipe, method=Method("lora", replace(own, **changes)))


def check_continues(recipe: Recipe, spec: ModelSpec) -> None:
    """Refuse settings that the weights of an adapter do not fit, before a run starts.

    Raises:
        ConfigError: Names the setting, or the missing file.
    """
    if spec.adapter is None or recipe.model.weights == "random":
        return
    name = spec.reference.id
    if spec.adapter_weights is None:
        start = spec.adapter.get("init_lora_weights", True)
        if recipe.model.weights == "pretrained" or start in _CONTINUED:
            raise ConfigError(
                f"{name} has no adapter_model.safetensors on this machine, from which a run could go on",
                help="download the whole adapter, or set model.weights: random to train a new one",
            )
        return
    if not spec.adapter_weights.endswith(".safetensors"):
        raise ConfigError(
            f"{name} has its weights in adapter_model.bin, which is a pickle and not read",
            help="load it with peft and save it again: save_pretrained writes adapter_model.safetensors",
        )
    own, asked = read_adapter(spec.adapter, name), recipe.method.lora or Lora()
    for field in fields(Lora):
        ours, theirs = getattr(asked, field.name), getattr(own, field.name)
        if field.name not in _FREE and ours != theirs:
            raise ConfigError(
                f"method.lora.{field.name} is {to_json(ours)}, but the weights of {name} were made with"
                f" {to_json(theirs)}",
                help="leave it out to continue from them, or set model.weights: random to train a new one",
            )
