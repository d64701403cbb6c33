"""Training methods: one class for each, found by the recipe's name for it.

A method says what it does to a model before its first step, which further models it holds, and how the
loss of a micro-batch is computed. Planner, tracer and trainer ask it and never compare names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fsdptool.errors import ConfigError
from fsdptool.modeling.methods.lora import base_name, derived_tensors, inject, is_adapter, reset_adapters
from fsdptool.modeling.objective import MicroLoss, Task, default_objective
from fsdptool.records.recipe import Lora

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from fsdptool.families.protocol import Family, Objective
    from fsdptool.modeling.methods.lora import Derived
    from fsdptool.modeling.methods.quantised_formats import Format
    from fsdptool.modeling.objective import MicroLoss, Observer
    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import Distillation, MethodName, ModelChoice, Recipe
    from fsdptool.records.sharding import FsdpSettings


class Initialisation(NamedTuple):
    """How parameters that a method adds to a model start."""

    reset: Callable[[], None]
    """Gives all of them their first values."""
    parameters: dict[str, nn.Parameter]
    """By name."""
    derived: dict[str, Derived]
    """What starts from values of the published weights, by name."""


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
    """Whether :meth:`prepare` adds parameters to the model."""
    freezes_model: ClassVar[bool] = False
    """Whether no published parameter is trained."""

    @property
    def changes_model(self) -> bool:
        """Whether :meth:`prepare` changes what a model has or trains: its units are planned on the result."""
        return type(self).prepare is not TrainingMethod.prepare

    def check(self, recipe: Recipe, settings: FsdpSettings) -> None:
        """Refuse what the method does not support.

        Raises:
            ConfigError: Names the two settings that exclude each other, or the missing one.
        """

    def check_libraries(self, recipe: Recipe) -> None:
        """Refuse what cannot be trained with the installed libraries; a plan does not need them.

        Raises:
            ConfigError: Names the missing library.
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

    def initialisation(self, model: nn.Module, recipe: Recipe) -> Initialisation | None:
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


class LoraMethod(TrainingMethod):
    """Trains adapters beside a frozen base, which may be stored quantised (Hu et al. 2021)."""

    name: ClassVar[MethodName] = "lora"
    adds_parameters: ClassVar[bool] = True
    freezes_model: ClassVar[bool] = True

    def check(self, recipe: Recipe, settings: FsdpSettings) -> None:
        """Refuse float8 training, which is for trained weights, and norms of a quantised base."""
        lora = recipe.method.lora or Lora()
        if lora.use_dora and lora.base != "unchanged":
            raise ConfigError(
                f"method.lora.use_dora needs the base's weights as they are, not stored as {lora.base}",
                help="leave the base unchanged, or leave use_dora out",
            )
        if settings.mixed_precision == "fp8":
            raise ConfigError(
                "mixed_precision fp8 trains whole weights, but LoRA keeps them frozen",
                help="use bf16, and method.lora.base: float8 to store the base in 8 bits",
            )

    def check_libraries(self, recipe: Recipe) -> None:
        """Refuse a base format whose kernels are not installed."""
        from fsdptool.modeling.methods.quantised_formats import check_format

        check_format((recipe.method.lora or Lora()).base)

    def prepare(self, model: nn.Module, recipe: Recipe, family: Family, config: Mapping[str, Any]) -> None:
        """Freeze the model, inject adapters and quantise the base."""
        inject(model, recipe, family, config)

    def replicated(self, model: nn.Module, recipe: Recipe) -> tuple[str, ...]:
        """Return the adapters' own matrices if the recipe replicates them; copies of modules stay sharded."""
        lora = recipe.method.lora
        if lora is None or lora.adapters != "replicated":
            return ()
        return tuple(name for name, _ in model.named_parameters() if is_adapter(name))

    def initialisation(self, model: nn.Module, recipe: Recipe) -> Initialisation | None:
        """Return peft's own initialisation of what it adds."""
        start = (recipe.method.lora or Lora()).init_lora_weights
        derived = derived_tensors(model)
        added = {n: p for n, p in model.named_parameters() if is_adapter(n) and n not in derived}
        return Initialisation(partial(reset_adapters, model, start), added, derived)

    def unquantised(self, recipe: Recipe) -> Recipe:
        """Return the recipe with the base as it was published."""
        lora = recipe.method.lora
        if lora is None or lora.base == "unchanged":
            return recipe
        return replace(recipe, method=replace(recipe.method, lora=replace(lora, base="unchanged")))

    def quantised_weights(self, model: nn.Module, recipe: Recipe) -> dict[str, Format]:
        """Return the weights of the layers that the base's format was chosen for."""
        lora = recipe.method.lora
        if lora is None or lora.base == "unchanged":
            return {}
        from fsdptool.modeling.methods.quantised_layers import choose_layers

        return {f"{base_name(path)}.weight": lora.base for path in choose_layers(model, lora.base).layers}


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


TRAINING_METHODS: Mapping[MethodName, TrainingMethod] = {
    method.name: method for method in (TrainingMethod(), LoraMethod(), DistillationMethod())
}
"""By the name that a recipe's ``method.name`` gives each."""


def method_of(recipe: Recipe) -> TrainingMethod:
    """Return the recipe's method."""
    return TRAINING_METHODS[recipe.method.name]
