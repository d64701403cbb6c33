"""Recipes: one YAML format for a training run, read into :class:`fsdptool.records.recipe.Recipe` and written.

The format is the record: keys, types and choices come from the dataclasses' annotations, so that
nothing can be in one and not in the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fsdptool import spelling
from fsdptool.config.canonical import COMMON, LAUNCH
from fsdptool.config.dialects import detect_dialect, sniff_dialect
from fsdptool.config.dialects.accelerate.keys import FSDP_KEYS, PARALLELISM_KEYS
from fsdptool.config.dialects.protocol import Dialect
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.files.tree import Entry, Node, ParseError, duplicates, effective_entries, parse_json, to_python
from fsdptool.files.yaml_tree import parse_yaml
from fsdptool.formatting import printable
from fsdptool.records.annotations import (
    Annotation,
    Kind,
    Shape,
    bounds_text,
    fields_of,
    permits,
    read_annotation,
)
from fsdptool.records.checkpointing import read_selector
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.recipe import Data, DataOptions, Evaluation, Method, Recipe

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
    outside = [
        _error(source, node.start, message, "leave it out to use the default")
        for node, message in _out_of_bounds(read_annotation(Recipe), root, "")
    ]
    try:
        _check_record(source, Recipe, root, "")
    except ConfigError as error:
        _refuse_configuration(source, detect_dialect(root)[0])
        _raise_all([error, *outside])
    _raise_all(
        outside
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


def _raise_all(mistakes: list[ConfigError]) -> None:
    """Raise all mistakes as one error: the first, with the others."""
    if mistakes:
        flat = [each for mistake in mistakes for each in (mistake, *mistake.others)]
        raise ConfigError(flat[0].message, help=flat[0].help, others=tuple(flat[1:]))


def _check_record(source: SourceText, record: type, node: Node, where: str) -> None:
    fields = fields_of(record)
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
            _check(source, fields[entry.key].annotation, entry.node, f"{where}.{entry.key}".lstrip("."))
        except ConfigError as error:
            mistakes.append(error)
    for name, field in fields.items():
        # A key that is misspelled is not missing, too.
        if field.required and node.get(name) is None and name not in meant:
            shown = f"{where}.{name}".lstrip(".")
            mistakes.append(_error(source, node.start, f"{shown} is missing", "see `fsdptool schema recipe`"))
    _raise_all(mistakes)


def _unknown(source: SourceText, entry: Entry, record: type, where: str) -> ConfigError:
    key = str(entry.key)
    fields = list(fields_of(record))
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
    if key in fields_of(DataOptions) and record in (Data, Evaluation):
        advice = "write it under data.options:"
    elif key in fields_of(Data) and record is DataOptions:
        advice = "write it under data:"
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
    records = {key: field.annotation.record for key, field in fields_of(Recipe).items()}
    return {key: tuple(fields_of(record)) for key, record in records.items() if record is not None}


def _check(source: SourceText, annotation: Annotation, node: Node, where: str) -> None:
    """Check one value against its annotation, deepest error first."""
    if node.kind == "scalar" and node.value is None and annotation.kinds[0].shape is not Shape.ANY:
        if annotation.optional:
            return
        expected = f"expected {_name(annotation.kinds[0])}"
        raise _error(source, node.start, f"{where} must not be empty", expected)
    failures = []
    for kind in annotation.kinds:
        try:
            _check_kind(source, kind, node, where)
            return
        except ConfigError as error:
            failures.append(error)
            if kind.shape in _WRITTEN_AS.get(node.kind, ()):
                raise
    if len(failures) == 1:
        raise failures[0]
    value = repr(node.value) if node.kind == "scalar" else f"a {node.kind}"
    expected = " or ".join(map(_name, annotation.kinds))
    advice = failures[0].help if annotation.kinds[0].shape is Shape.SCALAR else None
    raise _error(source, node.start, f"{where} must be {expected}, not {value}", advice)


_WRITTEN_AS = {"list": (Shape.LIST, Shape.TUPLE), "map": (Shape.MAPPING, Shape.RECORD)}
"""Shapes that a node's kind decides: what is wrong with such a value lies within it."""


def _check_kind(source: SourceText, kind: Kind, node: Node, where: str) -> None:
    match kind.shape:
        case Shape.RECORD:
            if node.kind != "map":
                raise _error(source, node.start, f"{where} must be a mapping", f"expected {_name(kind)}")
            _check_record(source, kind.type, node, where)
        case Shape.CHOICE:
            _check_choice(source, tuple(kind.choices), node, where)
        case Shape.LIST | Shape.TUPLE:
            items = kind.items * len(node.items) if kind.shape is Shape.LIST else kind.items
            if node.kind != "list":
                raise _error(source, node.start, f"{where} must be a list", f"expected {_name(kind)}")
            if len(items) != len(node.items):
                expected = f"{where} must have {len(items)} items, not {len(node.items)}"
                raise _error(source, node.start, expected)
            for index, (annotation, item) in enumerate(zip(items, node.items, strict=True)):
                _check(source, annotation, item, f"{where}[{index}]")
        case Shape.MAPPING:
            if node.kind != "map":
                raise _error(source, node.start, f"{where} must be a mapping of names to values")
            for entry in effective_entries(node):
                _check(source, kind.items[1], entry.node, f"{where}.{entry.key}")
        case Shape.SCALAR:
            _check_scalar(source, kind.type, node, where)


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
        raise _error(source, node.start, f"{where} must be {_SCALARS[hint]}, not a {node.kind}")
    good = isinstance(value, hint) or (hint is float and isinstance(value, int))
    if good and not (hint in (int, float) and isinstance(value, bool)):
        if hint is float and not finite(value):
            raise _error(source, node.start, f"{where} must be a finite number, not {node.raw}")
        return
    advice = None
    if hint in (int, float) and isinstance(value, str):
        with contextlib.suppress(ValueError, OverflowError):
            advice = f"YAML 1.1 reads {value!r} as text; write {_yaml_number(hint, value)}"
    elif hint is str:
        advice = f"write it in quotes: '{node.raw}'"
    elif hint is bool and spelling.boolean(value) is not None:
        advice = f"write {str(spelling.boolean(value)).lower()}"
    raise _error(
        source, node.start, f"{where} must be {_SCALARS[hint]}, not {type(value).__name__} {value!r}", advice
    )


def _yaml_number(hint: type, text: str) -> str:
    number = float(text)
    if not finite(number):
        raise ValueError(text)
    if hint is int and number == int(number):
        return str(int(number))
    shown = repr(number)
    if "e" in shown and "." not in shown:  # 1e-08 is text to YAML 1.1; 1.0e-08 is a number
        shown = shown.replace("e", ".0e")
    return shown


_SCALARS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _name(kind: Kind) -> str:
    if kind.shape is Shape.CHOICE:
        return " or ".join(map(str, kind.choices))
    if kind.shape is Shape.RECORD:
        return "a mapping with " + ", ".join(fields_of(kind.type))
    if kind.shape in (Shape.LIST, Shape.TUPLE):
        return "a list"
    return _SCALARS.get(kind.type, "a value")


_METHODS = ("lora", "distillation")
"""Methods with a block of their own under ``method``."""


def contradictions(root: Node) -> Iterator[tuple[Node, str, str]]:
    """Yield where a recipe's keys contradict each other: the node, one line, and what to do.

    Args:
        root: A mapping whose keys and types were checked.
    """
    yield from _batch(root)
    yield from _method(root)
    yield from _evaluation(root)
    yield from _checkpointing(root)


def _batch(root: Node) -> Iterator[tuple[Node, str, str]]:
    both = _entry(root, "batch", "accumulation"), _entry(root, "batch", "global_batch")
    if both[0] is not None and both[1] is not None and both[1].node.value is not None:
        yield (
            both[1].key_node,
            "batch.accumulation and batch.global_batch determine each other",
            "keep one of the two",
        )


def _method(root: Node) -> Iterator[tuple[Node, str, str]]:
    name = _value(root, "method", "name") or Method().name
    for block in _METHODS:
        settings = _entry(root, "method", block)
        if settings is not None and settings.node.kind == "map" and name != block:
            yield (
                settings.key_node,
                f"method.{block} is given, but method.name is {name}",
                f"write `name: {block}`, or leave the block out",
            )
    distillation = _entry(root, "method", "distillation")
    entry = root.get("method")
    has_teacher = distillation is not None and distillation.node.kind == "map"
    if name == "distillation" and entry is not None and not has_teacher:
        yield (
            entry.key_node,
            "method distillation requires a teacher",
            "name one: method.distillation.teacher.reference",
        )


def _evaluation(root: Node) -> Iterator[tuple[Node, str, str]]:
    when = _entry(root, "evaluation", "every_steps")
    if when is None or when.node.value is None:
        return
    own = _entry(root, "evaluation", "data")
    has_data = own is not None and own.node.kind == "map"
    if not (has_data or _value(root, "evaluation", "holdout") or _value(root, "evaluation", "samples")):
        yield (
            when.key_node,
            "evaluation.every_steps is given without data to evaluate on",
            "set evaluation.holdout to a share of the data, or give evaluation.data or evaluation.samples",
        )


def _checkpointing(root: Node) -> Iterator[tuple[Node, str, str]]:
    policy = _entry(root, "sharding", "checkpointing")
    if policy is None or policy.node.kind != "map":
        return
    mode, blocks = policy.node.get("mode"), policy.node.get("blocks")
    per_block = mode is not None and mode.node.value == "per_block"
    runs = blocks.node.items if blocks is not None else []
    if per_block != bool(runs):
        yield (
            policy.key_node,
            "sharding.checkpointing.blocks and mode per_block require each other",
            "give both, or neither",
        )
    for node in (policy.node, *runs):
        saved = node.get("save_operators")
        for item in saved.node.items if saved is not None else ():
            try:
                read_selector(str(item.value))
            except ConfigError as error:
                yield item, error.message, error.help or ""


def _entry(root: Node, block: str, key: str) -> Entry | None:
    entry = root.get(block)
    return entry.node.get(key) if entry is not None and entry.node.kind == "map" else None


def _value(root: Node, block: str, key: str) -> Any:
    entry = _entry(root, block, key)
    return entry.node.value if entry is not None else None


def _out_of_bounds(annotation: Annotation, node: Node, where: str) -> Iterator[tuple[Node, str]]:
    """Yield each value beyond its bounds, with one line that says so; other mistakes are passed over."""
    for kind in annotation.kinds:
        if kind.shape is Shape.RECORD and node.kind == "map":
            fields = fields_of(kind.type)
            for entry in effective_entries(node):
                path = f"{where}.{entry.key}".lstrip(".")
                if entry.key in fields:
                    yield from _out_of_bounds(fields[str(entry.key)].annotation, entry.node, path)
        elif kind.shape in (Shape.LIST, Shape.TUPLE) and kind.items:
            if node.kind == "list" and len(node.items) < kind.keywords.get("minItems", 0):
                yield node, f"{where} must not be an empty list"
            for index, item in enumerate(node.items):
                yield from _out_of_bounds(kind.items[min(index, len(kind.items) - 1)], item, where)
        elif node.value == "" and kind.type is str and kind.keywords.get("minLength"):
            yield node, f"{where} must not be an empty text"
        elif (
            kind.is_number
            and isinstance(node.value, int | float)
            and not isinstance(node.value, bool)
            and not permits(kind.keywords, node.value)
        ):
            yield node, f"{where} must be {bounds_text(kind.keywords)}, not {node.value}"


def finite(value: float) -> bool:
    """Whether a number is one that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


_ORDER = (
    *("model", "method", "objective", "data", "batch", "steps", "epochs", "optimizer", "schedule"),
    *("sharding", "checkpoints", "evaluation", "ema", "tracking", "seed", "on_nonfinite"),
)
_SHOWN = frozenset(
    {
        *("method.lora.rank", "method.lora.alpha", "data.source", "batch.micro_batch"),
        *("optimizer.learning_rate",),
    }
)
"""Values that a person looks for, written even where they are the defaults."""

_COMMENTS: Mapping[str, str] = {
    "model.reference": "family:flavour, Hugging Face id or folder",
    "model.variant": "of the weights, as from_pretrained takes it: fp16",
    "model.weights": "auto, pretrained or random",
    "model.dtype": "dtype of the stored parameters",
    "model.overrides": "replace values of the model's configuration",
    "model.trust_remote_code": "also needs --trust-remote-code on the command line",
    "method.lora.alpha": "adapters are scaled by alpha / rank",
    "method.lora.base": "how the frozen weights are stored",
    "method.lora.adapters": "sharded or replicated",
    "data.text_column": "the column with the training text",
    "data.tokenizer": "auto (the model's), bytes, a folder or a Hugging Face id",
    "data.packing": "false: one sample per sequence, padded",
    "data.assistant_only_loss": "learn only what the assistant says",
    "batch.micro_batch": "samples per GPU in one forward pass",
    "batch.sequence_length": "tokens per sample",
    "batch.accumulation": "micro-batches per optimizer step",
    "batch.global_batch": "samples per optimizer step, over all GPUs",
    "steps": "optimizer steps",
    "epochs": "passes over the data; or steps: N",
    "schedule.warmup_steps": "steps until the learning rate is reached",
    "sharding.checkpointing": "which activations are recomputed in backward",
    "sharding.reduce_dtype": "dtype in which gradients are reduced",
    "sharding.reshard_after_forward": "ranks that hold the gathered parameters between forward and backward",
    "sharding.layout": "native or accelerate's FSDP units",
    "checkpoints.every_steps": "the last step is always saved",
    "evaluation.holdout": "share of the training data",
    "ema.decay": "moving average of the trained parameters",
}
_YOURS = (
    "  # Generated samples. For your own data, replace the line above, for example by",
    "  # source: jsonl                # text, jsonl, parquet, dataset, images: docs/how-to/name-data.md",
    "  # path: data/train.jsonl",
)
_COLUMN = 34


def dump_recipe(recipe: Recipe, *, header: str = "") -> str:
    """Return a recipe as YAML that :func:`fsdptool.config.recipe.read_recipe` reads back to an equal record.

    Values that equal their defaults are left out, except those that every run decides.

    Args:
        recipe: What to write.
        header: Comment for the top of the file.
    """
    head = [f"# {printable(line)}".rstrip() for line in header.splitlines()]
    sections = []
    fields = {field.name: field for field in dataclasses.fields(Recipe)}
    for name in (*_ORDER, *(fields.keys() - set(_ORDER))):
        lines = list(_lines(name, getattr(recipe, name), _default(fields[name]), name))
        if name == "data" and recipe.data.source == "synthetic":
            lines += _YOURS
        if lines:
            sections.append(lines)
    text = "".join(f"{line}\n" for line in head)
    for before, lines in zip([[], *sections], sections, strict=False):
        # Single values stand together; a section stands apart.
        apart = len(lines) > 1 or len(before) > 1
        text += ("\n" if apart and before else "") + "\n".join(lines) + "\n"
    return text


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return dataclasses.MISSING


def _lines(name: str, value: Any, default: Any, path: str) -> Iterator[str]:
    """Yield the lines of one key, unindented; none where it may be left out."""
    if dataclasses.is_dataclass(value):
        inner = [
            f"  {line}"
            for field in dataclasses.fields(value)
            for line in _lines(
                field.name, getattr(value, field.name), _inner_default(field, default), f"{path}.{field.name}"
            )
        ]
        if inner:
            yield _commented(f"{name}:", path)
            yield from inner
        elif value != default:
            yield _commented(f"{name}: {{}}", path)
    elif value != default or path in _SHOWN:
        first, *rest = _yaml({name: to_json(value)})
        yield _commented(first, path)
        yield from rest


def _inner_default(field: dataclasses.Field[Any], outer: Any) -> Any:
    """Return the default of a field within a section: the section's own default decides, if it has one."""
    return getattr(outer, field.name) if dataclasses.is_dataclass(outer) else _default(field)


def _commented(line: str, path: str) -> str:
    comment = _COMMENTS.get(path)
    return f"{line:<{_COLUMN - 2 * path.count('.')}} # {comment}" if comment else line


def _yaml(entry: Mapping[str, Any]) -> list[str]:
    import yaml

    text: str = yaml.safe_dump(dict(entry), sort_keys=False, allow_unicode=True, width=100)
    return text.splitlines()
