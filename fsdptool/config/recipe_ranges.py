"""What a recipe's numbers may be: a count from one, a share below one, nothing that is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from fsdptool.files.tree import Node

_Range = tuple[str, Callable[[float], bool]]
_ONE: _Range = ("at least 1", lambda number: number >= 1)
_NONE: _Range = ("at least 0", lambda number: number >= 0)
_ABOVE: _Range = ("above 0", lambda number: number > 0)
_SHARE: _Range = ("at least 0 and below 1", lambda number: 0 <= number < 1)
MAX_RANK = 1 << 16
"""Beyond the width of every published layer: an adapter would be larger than what it adapts."""

_RANK: _Range = (f"from 1 to {MAX_RANK}", lambda number: 1 <= number <= MAX_RANK)
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
