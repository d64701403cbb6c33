"""Checks before anything is built: a raw configuration, and consent to run a model's own code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError, ModelError
from fsdptool.errors import ReferenceError as BadReference
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.recipe import Recipe
from fsdptool.source.references import IMPORT_FLAG, is_import
from fsdptool.spelling import did_you_mean

ZERO_LAYERS = "DET101"
IGNORED_REMOTE_CODE = "DET102"
IGNORED_QUANTIZATION = "DET103"

_SIZE = re.compile(
    r"(^|_)(size|sizes|dim|dims|layers?|blocks?|heads?|experts|channels|embd|embed|width|depths?|model|ff|kv|ranks?)$"
)
_DEPTH = re.compile(r"(^|_)(layers?|blocks?|depths?|heads?|groups)$")
_MAX_SIZE = 2**36
_MAX_DEPTH = 100_000
_NEVER_ZERO = ("hidden_size", "d_model", "n_embd", "num_attention_heads", "num_key_value_heads", "n_head")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")


def check_sizes(config: Mapping[str, Any], where: str) -> tuple[Diagnostic, ...]:
    """Refuse impossible sizes; return findings for implausible ones.

    Building is what they would break: 10^18 layers never end, 10^18 columns overflow.

    Raises:
        ModelError: A size is negative (other than the usual -1 for "unset"), absurdly large, or a width
            or number of heads is 0.
    """
    findings = []
    for path, key, value in _integers(config):
        problem = None
        if value < -1 and _SIZE.search(key) and not _names_a_layer(key):
            problem = f"{path} is {value}: a size cannot be negative"
        elif value == -1 and key in (*_LAYERS, "hidden_size", "vocab_size", "d_model", "num_attention_heads"):
            problem = f"{path} is -1: a size cannot be negative"
        elif value == 0 and path in _NEVER_ZERO:
            problem = f"{path} is 0: the model would be empty"
        elif abs(value) > _MAX_SIZE and _SIZE.search(key):
            problem = f"{path} is {value:,}: no model has such a size"
        elif abs(value) > _MAX_DEPTH and _DEPTH.search(key):
            problem = f"{path} is {value:,}: no model has that many layers"
        if problem:
            raise ModelError(f"{where}: {problem}", help="correct the value")
        if value == 0 and key in _LAYERS and path == key:
            findings.append(
                Diagnostic(
                    code=ZERO_LAYERS,
                    severity="warning",
                    message=f"{where}: {path} is 0: the model has no layers to wrap",
                    help="FSDP2 would gather the whole model at once; set the number of layers of the model",
                )
            )
    return tuple(findings)


def _names_a_layer(key: str) -> bool:
    """Say whether a key holds the position of a layer, which may count from the end (LLaVA: -2)."""
    return key.endswith("_layer") and key not in ("n_layer", "num_layer")


def _integers(value: Any, path: str = "", key: str = "") -> Iterator[tuple[str, str, int]]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield path, key, value
    elif isinstance(value, float) and value.is_integer() and _SIZE.search(key):
        yield path, key, int(value)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _integers(item, f"{path}.{name}" if path else str(name), str(name))
    elif isinstance(value, list):
        for index, item in enumerate(value[:4096]):
            yield from _integers(item, f"{path}[{index}]", key)


def check_known(config: Mapping[str, Any], where: str, *, trust_remote_code: bool) -> tuple[Diagnostic, ...]:
    """Refuse what neither transformers nor diffusers can build, before either is imported.

    The names are read from the libraries' sources as text: importing a transformers config class
    costs 2.5 CPU seconds (5.23).

    Raises:
        BadReference: Unknown ``model_type`` or ``_class_name``, or code from the reference would be
            needed and is not allowed.
    """
    name = config.get("_class_name")
    if isinstance(name, str):
        known = diffusers_classes()
        if known and name not in known:
            raise BadReference(
                f"{where}: class {name!r} is not in diffusers {_version('diffusers')}",
                help=did_you_mean(name, known, cutoff=0.7)
                or "install a diffusers that has it, or a plugin that provides it",
            )
        return ()
    model_type = config.get("model_type")
    known = transformers_model_types()
    if not isinstance(model_type, str) or not known:
        return ()
    remote = bool(config.get("auto_map"))
    if model_type not in known:
        if remote and not trust_remote_code:
            raise BadReference(
                f"{where}: model_type {model_type!r} requires the code that comes with the model (auto_map)",
                help="read that code, then use --trust-remote-code if you trust it",
            )
        if not remote:
            raise BadReference(
                f"{where}: model_type {model_type!r} is unknown to transformers {_version('transformers')}",
                help=did_you_mean(model_type, known, cutoff=0.7)
                or "upgrade transformers, or install a plugin that provides it",
            )
    elif remote and not trust_remote_code:
        return (
            Diagnostic(
                code=IGNORED_REMOTE_CODE,
                severity="info",
                message=f"{where}: auto_map refers to code that comes with the model;"
                f" transformers' own {model_type} is used",
                help="use --trust-remote-code to run that code instead",
            ),
        )
    return ()


def check_quantization(config: Mapping[str, Any], where: str) -> tuple[Diagnostic, ...]:
    """Say that a quantisation in the configuration is not in the shapes that are reported."""
    if not config.get("quantization_config"):
        return ()
    return (
        Diagnostic(
            code=IGNORED_QUANTIZATION,
            severity="info",
            message=f"{where}: quantization_config is ignored: shapes and totals are those of the"
            " unquantised model",
        ),
    )


@cache
def transformers_model_types() -> frozenset[str]:
    """Return every ``model_type`` the installed transformers knows, read from its source text."""
    names: set[str] = set()
    for file in ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py"):
        text = library_source("transformers", file)
        names.update(re.findall(r'[({]\s*"([\w.-]+)"\s*[,:]\s*"\w+Config"', text))
        names.update(re.findall(r'^\s+"([\w.-]+)":\s*"\w+Config"', text, flags=re.M))
    return frozenset(names)


@cache
def diffusers_classes() -> frozenset[str]:
    """Return every public class name of the installed diffusers, read from its source text."""
    return frozenset(
        re.findall(r'^\s+"([A-Z]\w+)",?$', library_source("diffusers", "__init__.py"), flags=re.M)
    )


def library_source(package: str, file: str) -> str:
    """Return the source text of a module of an installed library, which is not imported; else nothing."""
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        try:
            return (Path(folder) / file).read_text(encoding="utf-8")
        except OSError:
            continue
    return ""


def _version(package: str) -> str:
    return metadata.version(package)


FLAG = "--trust-remote-code"


def consented(recipe: Recipe, where: str | Path, *, trust_remote_code: bool) -> Recipe:
    """Return a recipe whose models may run their own code if, and only if, the caller agreed to it.

    Args:
        recipe: From a file: a recipe, a plan, a run folder.
        where: The file or folder, for the message.
        trust_remote_code: What this command line or this call says.

    Raises:
        ConfigError: The file asks for it and the caller did not.
    """
    teacher = recipe.method.distillation.teacher if recipe.method.distillation is not None else None
    for choice in (recipe.model, teacher):
        if choice is not None and choice.trust_remote_code and not trust_remote_code:
            raise _refusal(where, choice.reference)
    if not trust_remote_code:
        return recipe
    return replace(recipe, model=replace(recipe.model, trust_remote_code=True))


def check_consent(spec: ModelSpec | None, where: str | Path, *, trust_remote_code: bool) -> None:
    """Refuse a resolved model from a file that asks to run its own code without the caller's agreement.

    Raises:
        ConfigError: As :func:`consented`.
    """
    if spec is not None and spec.trust_remote_code and not trust_remote_code:
        folder = None if spec.reference.kind == "import" else spec.folder
        raise _refusal(where, folder or spec.reference.id)


def _refusal(where: str | Path, model: str) -> ConfigError:
    named = is_import(model)
    what = f"import {model}" if named else f"run the code that comes with the model {model}"
    flag = IMPORT_FLAG if named else FLAG
    return ConfigError(
        f"{where} asks to {what}",
        help=f"read that code, then give {flag} (in Python: trust_remote_code=True) to run it",
    )
