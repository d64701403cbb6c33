"""Distillation: the task's loss mixed with the distance to a frozen teacher's predictions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fsdptool.errors import ConfigError
from fsdptool.modeling.methods import Teacher, TrainingMethod
from fsdptool.modeling.objective import default_objective

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.families.protocol import Objective
    from fsdptool.modeling.objective import MicroLoss, Observer
    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import Distillation, MethodName, ModelChoice, Recipe
    from fsdptool.records.sharding import FsdpSettings


class DistillationMethod(TrainingMethod):
    """Trains a student on its task and on what a teacher predicts (Hinton et al. 2015)."""

    name: ClassVar[MethodName] = "distillation"

    def check(self, recipe: Recipe, settings: FsdpSettings) -> None:
        """Refuse a recipe that names no teacher."""
        self.teacher_choice(recipe)

    def teacher_choice(self, recipe: Recipe) -> ModelChoice | None:
        """Return the recipe's teacher.

        Raises:
            ConfigError: The recipe names none.
        """
        return _options(recipe).teacher

    def check_teacher(self, student: ModelSpec, teacher: ModelSpec) -> None:
        """Refuse a teacher that was trained for another task.

        An encoder sees the token that a decoder is to predict, and their logits may well have one shape.
        """
        expected, actual = default_objective(student), default_objective(teacher)
        if expected != actual:
            raise ConfigError(
                f"the teacher {teacher.reference.id} is a model for {actual}, the student one for {expected}",
                help="choose a teacher that is trained for the student's objective",
            )

    def micro_loss(self, recipe: Recipe, objective: Objective, teacher: Teacher | None = None) -> MicroLoss:
        """Return the mixed loss."""
        return Student(objective, teacher, _options(recipe))


class Student:
    """Computes ``(1 - alpha) x task + alpha x distance`` for a micro-batch, both as sums.

    Args:
        objective: The task; also measures the distance.
        teacher: The teacher; None where an observer answers for it.
        options: Temperature and alpha.
    """

    def __init__(self, objective: Objective, teacher: Teacher | None, options: Distillation) -> None:
        self.objective = objective
        self.teacher = teacher
        self.options = options

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Tensor], observer: Observer | None = None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss and summed metrics."""
        target: Mapping[str, Any] = {}
        if observer is None:
            assert self.teacher is not None
            target = predict_frozen(self.teacher.model, self.teacher.objective, batch)
            # Its root, and all of it where units stay gathered, would wait for a backward that never comes.
            self.teacher.release(self.teacher.model)
        prediction = self.objective.predict(model, batch)
        if observer is not None:
            target = observer.predicted(prediction, distilled=True)
        task = self.objective.loss(prediction, batch)
        distance = self.objective.distance(prediction, target, batch, self.options.temperature)
        metrics = dict(self.objective.metrics(prediction, batch))
        metrics["task_loss"] = task.detach()
        metrics["distance"] = distance.detach()
        alpha = self.options.alpha
        return (1.0 - alpha) * task + alpha * distance, metrics


def predict_frozen(model: nn.Module, objective: Objective, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a frozen model predicts, detached; nothing else of its forward stays alive."""
    import torch

    with torch.no_grad():
        return {name: value.detach() for name, value in objective.predict(model, batch).items()}


def _options(recipe: Recipe) -> Distillation:
    if recipe.method.distillation is None:
        raise ConfigError("method distillation needs a teacher", help="name one under method.distillation")
    return recipe.method.distillation
