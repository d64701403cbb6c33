"""What a recipe says twice, or says and then does not use: each would train something else in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdptool.files.tree import Entry, Node
from fsdptool.records.recipe import Method

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


def _batch(root: Node) -> Iterator[tuple[Node, str, str]]:
    both = _entry(root, "batch", "accumulation"), _entry(root, "batch", "global_batch")
    if both[0] is not None and both[1] is not None and both[1].node.value is not None:
        yield (
            both[1].key_node,
            "batch.accumulation and batch.global_batch decide each other",
            "keep one of the two",
        )


def _method(root: Node) -> Iterator[tuple[Node, str, str]]:
    name = _value(root, "method", "name") or Method().name
    for block in _METHODS:
        given = _entry(root, "method", block)
        if given is not None and given.node.kind == "map" and name != block:
            yield (
                given.key_node,
                f"method.{block} is given and method.name is {name}",
                f"write `name: {block}`, or leave the block out",
            )
    taught = _entry(root, "method", "distillation")
    entry = root.get("method")
    if name == "distillation" and entry is not None and (taught is None or taught.node.kind != "map"):
        yield (
            entry.key_node,
            "method distillation needs a teacher",
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
            "evaluation.every_steps is given, and nothing to evaluate on",
            "set evaluation.holdout to a share of the data, or give evaluation.data or evaluation.samples",
        )


def _entry(root: Node, block: str, key: str) -> Entry | None:
    entry = root.get(block)
    return entry.node.get(key) if entry is not None and entry.node.kind == "map" else None


def _value(root: Node, block: str, key: str) -> Any:
    entry = _entry(root, block, key)
    return entry.node.value if entry is not None else None
