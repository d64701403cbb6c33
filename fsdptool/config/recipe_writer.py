"""Writes recipes for people: what differs from the defaults, commented, in the order of decisions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from fsdptool.formatting import printable
from fsdptool.records.codec import to_json
from fsdptool.records.recipe import Recipe

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
    "  # source: jsonl                # text, jsonl, parquet, dataset, images or latents (docs/data.md)",
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
        lines = list(_entry(name, getattr(recipe, name), _default(fields[name]), name))
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


def _entry(name: str, value: Any, default: Any, path: str) -> Iterator[str]:
    """Yield the lines of one key, unindented; none where it may be left out."""
    if dataclasses.is_dataclass(value):
        inner = [
            f"  {line}"
            for field in dataclasses.fields(value)
            for line in _entry(
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
