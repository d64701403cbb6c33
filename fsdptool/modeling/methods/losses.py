"""Distillation: the task's loss mixed with the distance to a frozen, sharded teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fsdptool.distributed.shard import reshard_all

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.families.protocol import Objective
    from fsdptool.records.recipe import Distillation


class Student:
    """Computes ``(1 - alpha) x task + alpha x distance`` for a micro-batch, both as sums.

    Args:
        objective: The task; also measures the distance.
        teacher: Frozen, sharded over the same ranks, in evaluation mode.
        settings: Temperature and alpha.
        teacher_objective: How the teacher predicts, if its family differs.
    """

    def __init__(
        self,
        objective: Objective,
        teacher: nn.Module,
        settings: Distillation,
        teacher_objective: Objective | None = None,
    ) -> None:
        self.objective = objective
        self.teacher = teacher
        self.settings = settings
        self.teacher_objective = teacher_objective or objective

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss and summed metrics."""
        with torch.no_grad():
            wanted = {
                name: value.detach()
                for name, value in self.teacher_objective.predict(self.teacher, batch).items()
            }
        # Its root, and all of it where units stay gathered, would wait for a backward that never comes.
        reshard_all(self.teacher)
        prediction = self.objective.predict(model, batch)
        task = self.objective.loss(prediction, batch)
        distance = self.objective.distance(prediction, wanted, batch, self.settings.temperature)
        alpha = self.settings.alpha
        metrics = dict(self.objective.metrics(prediction, batch))
        metrics["task_loss"] = task.detach()
        metrics["distance"] = distance.detach()
        return (1.0 - alpha) * task + alpha * distance, metrics


class Task:
    """Computes the objective's own loss for a micro-batch, as a sum."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss and summed metrics."""
        prediction = self.objective.predict(model, batch)
        return self.objective.loss(prediction, batch), self.objective.metrics(prediction, batch)
