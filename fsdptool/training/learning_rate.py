"""Learning-rate schedules, as pure functions of the step."""

from __future__ import annotations

import math

from fsdptool.records.recipe import Optimizer, Schedule


def rate(schedule: Schedule, step: int, total: int | None) -> float:
    """Return the factor on the learning rate at ``step``.

    Args:
        schedule: Name, warm-up and floor.
        step: Optimizer steps already taken; 0 at the first.
        total: Steps of the whole run, or None when it has no end (then nothing decays).

    Linear warm-up reaches 1 after ``warmup_steps`` steps; the first step of a warm-up is not at
    zero, which would waste it. ``cosine`` is half a period down to ``minimum_ratio``.
    """
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    if schedule.name == "constant" or total is None:
        return 1.0
    span = max(total - schedule.warmup_steps, 1)
    done = min(max((step - schedule.warmup_steps) / span, 0.0), 1.0)
    falling = 1.0 - done if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.minimum_ratio + (1.0 - schedule.minimum_ratio) * falling


def base_rate(optimizer: Optimizer, data_ranks: int) -> float:
    """Return the learning rate before the schedule, scaled with the ranks if the recipe asks for it."""
    factor = {"none": 1.0, "linear": float(data_ranks), "sqrt": math.sqrt(data_ranks)}
    return optimizer.learning_rate * factor[optimizer.scale_learning_rate]
