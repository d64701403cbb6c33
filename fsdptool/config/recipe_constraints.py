"""What a recipe must not say: numbers out of range, and keys that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.files.tree import Entry, Node
from fsdptool.records.checkpointing import read_selector
from fsdptool.records.recipe import MAX_LORA_RANK, Method

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
        count, saved = node.get("count"), node.get("save_operators")
        if count is not None and isinstance(count.node.value, int) and count.node.value < 1:
            yield count.node, f"a run of {count.node.value} blocks is not possible", "give at least 1 block"
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


_Range = tuple[str, Callable[[float], bool]]
_ONE: _Range = ("at least 1", lambda number: number >= 1)
_NONE: _Range = ("at least 0", lambda number: number >= 0)
_ABOVE: _Range = ("above 0", lambda number: number > 0)
_SHARE: _Range = ("at least 0 and below 1", lambda number: 0 <= number < 1)
_RANK: _Range = (f"from 1 to {MAX_LORA_RANK}", lambda number: 1 <= number <= MAX_LORA_RANK)
_RATIO: _Range = ("from 0 to 1", lambda number: 0 <= number <= 1)

RANGES: dict[str, _Range] = {
    # 0 would divide by zero, or never end, in the middle of a run.
    "steps": _ONE,
    "batch.micro_batch": _ONE,
    "batch.accumulation": _ONE,
    "batch.sequence_length": _ONE,
    "batch.global_batch": _ONE,
    "batch.height": _ONE,
    "batch.width": _ONE,
    "batch.frames": _ONE,
    "checkpoints.every_steps": _ONE,
    "checkpoints.keep_every": _ONE,
    "checkpoints.keep_last": _ONE,
    "evaluation.every_steps": _ONE,
    "evaluation.batches": _ONE,
    "method.lora.rank": _RANK,
    "sharding.checkpointing.every_n": _ONE,
    "sharding.reshard_after_forward": _ONE,
    "tracking.log_every": _ONE,
    "data.workers": _NONE,
    "evaluation.samples": _NONE,
    "optimizer.epsilon": _NONE,
    "optimizer.learning_rate": _NONE,
    "optimizer.weight_decay": _NONE,
    "schedule.warmup_steps": _NONE,
    "sharding.prefetch": _NONE,
    "sharding.expert_parallel": _ONE,
    "epochs": _ABOVE,
    "method.distillation.temperature": _ABOVE,
    "optimizer.clip_grad_norm": _ABOVE,
    "ema.decay": _SHARE,
    "evaluation.holdout": _SHARE,
    "method.lora.dropout": _SHARE,
    "optimizer.betas": _SHARE,
    "optimizer.momentum": _SHARE,
    "method.distillation.alpha": _RATIO,
    "schedule.minimum_ratio": _RATIO,
}
"""Path in the recipe to what its number (or each of its numbers) must be."""


def out_of_range(root: Node) -> Iterator[tuple[Node, str]]:
    """Yield each number that no run can have, with one line that says so."""
    for path, (words, good) in RANGES.items():
        node: Node | None = root
        for name in path.split("."):
            entry = node.get(name) if node is not None and node.kind == "map" else None
            node = entry.node if entry is not None else None
        for item in () if node is None else node.items or [node]:
            if isinstance(item.value, int | float) and not good(item.value):
                yield item, f"{path} must be {words}, not {item.value}"


def finite(value: float) -> bool:
    """Whether a number is one that a float can hold."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
