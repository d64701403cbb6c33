"""The phases of a training run, in the order a person meets them."""

from __future__ import annotations

from enum import StrEnum


class RunPhase(StrEnum):
    """A phase whose memory is predicted by a plan and measured in a run. Values are those of the JSON."""

    LOAD = "load"
    FIRST_STEP = "first step"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    AVERAGE = "average"
    EVALUATION = "evaluation"
    SAMPLING = "sampling"
    SAVE = "save"
    EXPORT = "export"


STEP_PHASES = (RunPhase.FORWARD, RunPhase.BACKWARD, RunPhase.OPTIMIZER)
"""The phases of every optimizer step."""
