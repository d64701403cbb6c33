"""Training methods: one class for each, found by the recipe's name for it.

A method says what it does to a model before its first step, which further models it holds, and how the
loss of a micro-batch is computed. Planner, tracer and trainer ask it and never compare names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fsdptool.modeling.objective import MicroLoss, Task

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.families.protocol import Family, Objective
    from fsdptool.modeling.methods.quantised_formats import Format
    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import MethodName, ModelChoice, Recipe
    from fsdptool.records.sharding import FsdpSettings


class Initialisation(NamedTuple):
    """How parameters that a method adds to a model start."""

    reset: Callable[[], None]
    """Gives all of them their first values."""
    parameters: dict[str, nn.Parameter]
    """By name."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A frozen model in evaluation mode whose predictions a method learns from.

    Attributes:
        model: Sharded over the same ranks as the trained model.
        objective: How it predicts; its family may differ from the student's.
        release: Called with the model after each of its forwards.
    """

    model: nn.Module
    objective: Objective
    release: Callable[[nn.Module], None]


class TrainingMethod:
    """Trains every parameter that the model itself marks as trainable; other methods override this."""

    name: ClassVar[MethodName] = "full"
    adds_parameters: ClassVar[bool] = False
    """Whether :meth:`prepare` changes which parameters the model has: its units are then planned on the
    prepared model."""

    def check(self, recipe: Recipe, settings: FsdpSettings) -> None:
        """Refuse what the method does not support.

        Raises:
            ConfigError: Names the two settings that exclude each other, or the missing one.
        """

    def prepare(self, model: nn.Module, recipe: Recipe, family: Family, config: Mapping[str, Any]) -> None:
        """Change a model that was just built on meta, in place.

        Args:
            model: On meta.
            recipe: Gives the method's options.
            family: Gives the default LoRA targets.
            config: The model's raw configuration.

        Raises:
            ConfigError: The method's options do not suit the model.
        """

    def replicated(self, model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
        """Return the parameters of a prepared model that stay whole on every rank."""
        return ()

    def initialisation(self, model: nn.Module) -> Initialisation | None:
        """Return how parameters that :meth:`prepare` added start; None if it added none."""
        return None

    def unquantised(self, recipe: Recipe) -> Recipe:
        """Return the recipe with every weight as it was published, as an export needs it."""
        return recipe

    def quantised_weights(self, model: nn.Module, recipe: Recipe) -> dict[str, Format]:
        """Return the weights a run stored quantised, by the base model's names.

        Args:
            model: Prepared by the :meth:`unquantised` recipe.
            recipe: The run's.
        """
        return {}

    def teacher_choice(self, recipe: Recipe) -> ModelChoice | None:
        """Return the teacher that the recipe names, or None for a method without one."""
        return None

    def check_teacher(self, student: ModelSpec, teacher: ModelSpec) -> None:
        """Refuse a teacher that the trained model cannot learn from.

        Raises:
            ConfigError: Their families train them under different objectives.
        """

    def micro_loss(self, recipe: Recipe, objective: Objective, teacher: Teacher | None = None) -> MicroLoss:
        """Return what computes the loss of a micro-batch.

        Args:
            recipe: Gives the method's options.
            objective: The task.
            teacher: For a method that has one; None where an observer answers for it.
        """
        return Task(objective)


@cache
def training_methods() -> Mapping[MethodName, TrainingMethod]:
    """Return every method by the name that a recipe's ``method.name`` gives it."""
    from fsdptool.modeling.methods.distillation import DistillationMethod
    from fsdptool.modeling.methods.lora import LoraMethod

    return {method.name: method for method in (TrainingMethod(), LoraMethod(), DistillationMethod())}


def method_of(recipe: Recipe) -> TrainingMethod:
    """Return the recipe's method."""
    return training_methods()[recipe.method.name]
