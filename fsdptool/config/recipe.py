"""Recipes: one YAML format for a training run, read into :class:`fsdptool.records.recipe.Recipe`.

The format is the record: keys, types and choices come from the dataclasses' annotations, so that
nothing can be in one and not in the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fsdptool import spelling
from fsdptool.config.canonical import COMMON, LAUNCH
from fsdptool.config.dialects import detect_dialect, sniff_dialect
from fsdptool.config.dialects.accelerate.keys import FSDP_KEYS, PARALLELISM_KEYS
from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.recipe_constraints import contradictions, finite, out_of_range
from fsdptool.errors import ConfigError
from fsdptool.files.json_tree import parse_json
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.files.tree import Entry, Node, ParseError, duplicates, effective_entries, to_python
from fsdptool.files.yaml_tree import parse_yaml
from fsdptool.records.codec import from_json
from fsdptool.records.recipe import DATA_OPTIONS, Data, Recipe

_BLOCKS = {
    "fsdp_config": [item for item in FSDP_KEYS.items() if item[1] in COMMON[2:]],
    "parallelism_config": [item for item in PARALLELISM_KEYS.items() if item[1] != "sp"],
}
OWNED_BY_YAML = {
    **{name: name for name in LAUNCH if name not in ("rdzv_backend", "debug")},
    **{name: name for name in ("mixed_precision", "distributed_type", *_BLOCKS)},
    **{name: f"{block}.{key}" for block, items in _BLOCKS.items() for key, name in items},
    **{
        key.removeprefix("fsdp_").removeprefix("parallelism_config_"): f"{block}.{key}"
        for block, items in _BLOCKS.items()
        for key, _ in items
    },
    "gradient_checkpointing": "fsdp_config.fsdp_activation_checkpointing",
    "mesh": "parallelism_config",
}
"""Keys a person may look for in a recipe, and where the accelerate YAML has them."""


def read_recipe(path: str | Path | SourceText) -> Recipe:
    """Read a recipe.

    Args:
        path: A YAML file (or JSON by its name), or its text.

    Raises:
        ConfigError: The file cannot be read or does not follow the format; the message has the form
            ``file:line:column: what`` and the help names the nearest known key.
    """
    source = _open(path)
    root = _root(source)
    try:
        _check_record(source, Recipe, root, "")
    except ConfigError:
        _refuse_configuration(source, detect_dialect(root)[0])
        raise
    _raise_all(
        [
            _error(source, node.start, message, "leave it out to use the default")
            for node, message in out_of_range(root)
        ]
        + [_error(source, node.start, message, advice) for node, message, advice in contradictions(root)]
    )
    return from_json(Recipe, to_python(root), where="recipe")


def given_keys(path: str | Path | SourceText) -> frozenset[str]:
    """Return the paths of the keys that a recipe's file gives, as ``method.lora.rank``.

    Raises:
        ConfigError: As :func:`read_recipe`.
    """

    def below(node: Node, prefix: str) -> Iterator[str]:
        for entry in effective_entries(node):
            yield f"{prefix}{entry.key}"
            if entry.node.kind == "map":
                yield from below(entry.node, f"{prefix}{entry.key}.")

    return frozenset(below(_root(_open(path)), ""))


def _root(source: SourceText) -> Node:
    try:
        is_json = (source.path or "").endswith(".json")
        document = parse_json(source.text) if is_json else parse_yaml(source.text)
    except ParseError as error:
        _refuse_configuration(source, sniff_dialect(source.text))
        raise _error(source, error.index, error.message) from error
    root = document.root
    if root is None or root.kind != "map":
        _refuse_configuration(source, sniff_dialect(source.text))
        raise _error(
            source, 0, "a recipe must be a mapping that begins with `model:`", "see `fsdptool schema recipe`"
        )
    return root


def _refuse_configuration(source: SourceText, dialect: Dialect | None) -> None:
    """Raise one error for a file that configures sharding, in the place of one for each of its keys."""
    if dialect is not None:
        raise ConfigError(
            f"{source.path or 'the text'} is not a recipe but a configuration ({dialect.name})",
            help="give it as --config; `fsdptool init` writes a recipe for a model and its data",
        )


def _open(path: str | Path | SourceText) -> SourceText:
    if isinstance(path, SourceText):
        return path
    if isinstance(path, str) and "\n" in path:
        return SourceText(path)
    try:
        return read_source(path)
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error.message}", help="give the path of a recipe") from error


def _error(source: SourceText, index: int | None, message: str, help: str | None = None) -> ConfigError:
    place = ":".join(map(str, source.place(index))) if index is not None else None
    where = ":".join(part for part in (source.path or "recipe", place) if part)
    return ConfigError(f"{where}: {message}", help=help)


@cache
def _hints(record: type) -> Mapping[str, Any]:
    return get_type_hints(record)


def _raise_all(mistakes: list[ConfigError]) -> None:
    """Raise all mistakes as one error: the first, with the others."""
    if mistakes:
        flat = [each for mistake in mistakes for each in (mistake, *mistake.others)]
        raise ConfigError(flat[0].message, help=flat[0].help, others=tuple(flat[1:]))


def _check_record(source: SourceText, record: type, node: Node, where: str) -> None:
    fields = {field.name: field for field in dataclasses.fields(record)}
    mistakes = []
    for loser, winner in duplicates(node):
        line, _ = source.place(winner.key_node.start)
        mistakes.append(
            _error(source, loser.key_node.start, f"{loser.key} is written again on line {line}", "keep one")
        )
    meant = set()
    for entry in effective_entries(node):
        if entry.key not in fields:
            mistakes.append(_unknown(source, entry, record, where))
            meant.add(spelling.nearest(str(entry.key), list(fields), cutoff=0.6))
            continue
        try:
            _check(source, _hints(record)[entry.key], entry.node, f"{where}.{entry.key}".lstrip("."))
        except ConfigError as error:
            mistakes.append(error)
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        # A key that is misspelled is not missing, too.
        if needed and node.get(name) is None and name not in meant:
            shown = f"{where}.{name}".lstrip(".")
            mistakes.append(_error(source, node.start, f"{shown} is missing", "see `fsdptool schema recipe`"))
    _raise_all(mistakes)


def _check_names(source: SourceText, node: Node, where: str, known: tuple[str, ...]) -> None:
    mistakes = []
    for entry in effective_entries(node):
        if entry.key not in known:
            near = spelling.nearest(str(entry.key), known, cutoff=0.6)
            advice = f"did you mean {near}?" if near else f"known keys here: {', '.join(known)}"
            shown = f"{where}.{entry.key}"
            mistakes.append(_error(source, entry.key_node.start, f"unknown key {shown!r}", advice))
    _raise_all(mistakes)


def _unknown(source: SourceText, entry: Entry, record: type, where: str) -> ConfigError:
    key = str(entry.key)
    fields = [field.name for field in dataclasses.fields(record)]
    plain = key.removeprefix("fsdp_").removeprefix("parallelism_config_")
    owner = OWNED_BY_YAML.get(key) or OWNED_BY_YAML.get(plain)
    if owner is None and key != plain:
        block = "fsdp_config" if key.startswith("fsdp_") else "parallelism_config"
        owner = f"{block}.{key}"
    shown = f"{where}.{key}".lstrip(".")
    if owner is not None:
        return _error(
            source,
            entry.key_node.start,
            f"{shown} belongs in the accelerate YAML, not in the recipe",
            f"write it there as {owner}",
        )
    near = spelling.nearest(key, fields, cutoff=0.6)
    if record is Data and key in DATA_OPTIONS:
        advice = "write it under data.options:"
    elif near is None and key in _OTHER_NAMES:
        advice = f"write {_OTHER_NAMES[key]}"
    elif near is None:
        elsewhere = [home for home, names in _homes().items() if key in names]
        if elsewhere:
            advice = f"write it under {elsewhere[0]}:"
        else:
            advice = f"known keys here: {', '.join(fields)}"
    else:
        advice = f"did you mean {near}?"
    return _error(source, entry.key_node.start, f"unknown key {shown!r}", advice)


_OTHER_NAMES = {
    "lr": "optimizer.learning_rate",
    "per_device_train_batch_size": "batch.micro_batch",
    "train_batch_size": "batch.global_batch",
    "gradient_accumulation_steps": "batch.accumulation",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "max_grad_norm": "optimizer.clip_grad_norm",
    "model_name_or_path": "model.reference",
    "dataset": "data.path",
    "max_seq_length": "batch.sequence_length",
}
"""What transformers, TRL and others call a field of the recipe."""


@cache
def _homes() -> Mapping[str, tuple[str, ...]]:
    homes = {}
    for field in dataclasses.fields(Recipe):
        hint = _record_of(_hints(Recipe)[field.name])
        if hint is not None:
            homes[field.name] = tuple(inner.name for inner in dataclasses.fields(hint))
    return homes


def _record_of(hint: Any) -> type | None:
    for option in (hint, *get_args(hint)):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option
    return None


def _check(source: SourceText, hint: Any, node: Node, where: str) -> None:
    """Check one value against its annotation, deepest error first."""
    options = list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]
    if node.kind == "scalar" and node.value is None:
        if type(None) in options:
            return
        raise _error(source, node.start, f"{where} must not be empty", f"expected {_name(hint)}")
    options = [option for option in options if option is not type(None)]
    failures = []
    for option in options:
        try:
            _check_one(source, option, node, where)
            return
        except ConfigError as error:
            failures.append(error)
    raise failures[0]


def _check_one(source: SourceText, hint: Any, node: Node, where: str) -> None:
    origin = get_origin(hint)
    if hint is Any:
        return
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if node.kind != "map":
            raise _error(source, node.start, f"{where} must be a mapping", f"expected {_name(hint)}")
        _check_record(source, hint, node, where)
    elif origin is Literal:
        _check_choice(source, get_args(hint), node, where)
    elif origin is tuple:
        items = get_args(hint)
        if node.kind != "list":
            raise _error(source, node.start, f"{where} must be a list", f"expected {_name(hint)}")
        if items[-1] is not Ellipsis and len(items) != len(node.items):
            raise _error(source, node.start, f"{where} must have {len(items)} items, not {len(node.items)}")
        for index, item in enumerate(node.items):
            _check(source, items[0] if items[-1] is Ellipsis else items[index], item, f"{where}[{index}]")
    elif origin is not None:
        if node.kind != "map":
            raise _error(source, node.start, f"{where} must be a mapping of names to values")
        if where.endswith("data.options"):
            _check_names(source, node, where, DATA_OPTIONS)
    else:
        _check_scalar(source, hint, node, where)


def _check_choice(source: SourceText, choices: tuple[Any, ...], node: Node, where: str) -> None:
    if node.kind == "scalar" and node.value in choices and not isinstance(node.value, bool):
        return
    shown = ", ".join(map(str, choices))
    if node.kind == "scalar" and isinstance(node.value, bool) and "none" in choices and node.value is False:
        advice = "write 'none' (unquoted no, off and false are booleans to YAML)"
    else:
        near = (
            spelling.nearest(node.value, [str(choice) for choice in choices])
            if node.kind == "scalar"
            else None
        )
        advice = f"did you mean {near}?" if near else f"choose one of: {shown}"
    value = repr(node.value) if node.kind == "scalar" else f"a {node.kind}"
    raise _error(source, node.start, f"{where} is {value}, not one of {shown}", advice)


def _check_scalar(source: SourceText, hint: type, node: Node, where: str) -> None:
    value = node.value
    if node.kind != "scalar":
        raise _error(source, node.start, f"{where} must be {_name(hint)}, not a {node.kind}")
    good = isinstance(value, hint) or (hint is float and isinstance(value, int))
    if good and not (hint in (int, float) and isinstance(value, bool)):
        if hint is float and not finite(value):
            raise _error(source, node.start, f"{where} must be a finite number, not {node.raw}")
        return
    advice = None
    if hint in (int, float) and isinstance(value, str):
        with contextlib.suppress(ValueError, OverflowError):
            advice = f"YAML 1.1 reads {value!r} as text; write {_number(hint, value)}"
    elif hint is str:
        advice = f"write it in quotes: '{node.raw}'"
    elif hint is bool and spelling.boolean(value) is not None:
        advice = f"write {str(spelling.boolean(value)).lower()}"
    raise _error(
        source, node.start, f"{where} must be {_name(hint)}, not {type(value).__name__} {value!r}", advice
    )


def _number(hint: type, text: str) -> str:
    number = float(text)
    if not finite(number):
        raise ValueError(text)
    if hint is int and number == int(number):
        return str(int(number))
    shown = repr(number)
    if "e" in shown and "." not in shown:  # 1e-08 is text to YAML 1.1; 1.0e-08 is a number
        shown = shown.replace("e", ".0e")
    return shown


def _name(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    if hint in names:
        return names[hint]
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    record = _record_of(hint)
    if record is not None:
        return "a mapping with " + ", ".join(field.name for field in dataclasses.fields(record))
    if get_origin(hint) is tuple:
        return "a list"
    return "a value"


__all__ = ["OWNED_BY_YAML", "given_keys", "read_recipe"]
