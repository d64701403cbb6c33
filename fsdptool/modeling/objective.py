"""Which objective a recipe means, and how a micro-batch's loss, backward and validation run.

Trainer and memory tracer run the same code here: what a trace holds is what a step does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_of
from fsdptool.records.run import RunPhase
from fsdptool.spelling import nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.families.protocol import Objective
    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import Recipe


def objective_for(recipe: Recipe, spec: ModelSpec) -> Objective:
    """Return the objective the recipe names, or the family's default for this model.

    Raises:
        ConfigError: The family does not train under it, it has no such option, or it needs a second model.
    """
    family = family_of(spec)
    known = family.objectives()
    name = recipe.objective.name or default_objective(spec)
    if name not in known:
        near = nearest(name, list(known))
        raise ConfigError(
            f"family {family.name} has no objective {name!r}",
            help=f"did you mean {near}?" if near else f"it has: {', '.join(sorted(known))}",
        )
    options = dict(recipe.objective.options)
    taken = inspect.signature(known[name]).parameters
    # Those that are code, and not values, are the family's.
    offered = [
        key for key, item in taken.items() if item.kind is not item.VAR_KEYWORD and not callable(item.default)
    ]
    further = any(item.kind is item.VAR_KEYWORD for item in taken.values())
    for option in options:
        if option not in offered and (option in taken or not further):
            raise _unknown(name, option, offered)
    try:
        objective = known[name](**options)
    except TypeError as error:
        raise ConfigError(f"objective {name}: {error}", help="check objective.options") from error
    if objective.needs_teacher and recipe.method.distillation is None:
        raise ConfigError(
            f"objective {name} needs a reference model",
            help="set method.name: distillation, with the reference as its teacher and alpha: 1",
        )
    return objective


def _unknown(name: str, option: str, offered: list[str]) -> ConfigError:
    near = nearest(option, offered)
    return ConfigError(
        f"objective {name} has no option {option!r}",
        help=f"did you mean {near}?" if near else f"it has: {', '.join(offered) or 'none'}",
    )


def default_objective(spec: ModelSpec) -> str:
    """Return the objective a family trains a model under unless the recipe names another."""
    return spec.objective or family_of(spec).objective_for(spec.config)


class Observer(Protocol):
    """Follows a micro-batch from inside, as the memory tracer does. The trainer passes none."""

    def predicted(self, prediction: Mapping[str, Any], *, distilled: bool = False) -> Mapping[str, Any]:
        """Take note of the model's prediction, from which the loss is computed next.

        Returns:
            With ``distilled``, what a teacher predicts there, in place of a real one; else nothing.
        """

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of ``loss``."""


class MicroLoss(Protocol):
    """Computes the loss of a micro-batch: :class:`Task`, or a method's own."""

    objective: Objective

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Tensor], observer: Observer | None = None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss and summed metrics; the prediction dies with this call."""


class Task:
    """Computes the objective's own loss of a micro-batch, as a sum."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Tensor], observer: Observer | None = None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the summed loss and summed metrics."""
        prediction = self.objective.predict(model, batch)
        if observer is not None:
            observer.predicted(prediction)
        return self.objective.loss(prediction, batch), self.objective.metrics(prediction, batch)


class _Labelled:
    """A model that gets its labels with every call, and the loss that it answered with."""

    def __init__(self, model: nn.Module, labels: Tensor) -> None:
        self._model = model
        self._labels = labels
        self.loss: Tensor | None = None

    def __call__(self, **arguments: Any) -> Any:
        output = self._model(**arguments, labels=self._labels)
        self.loss = getattr(output, "loss", None)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class ModelLoss(Task):
    """The loss that the model's own forward computes from ``labels``, as transformers' Trainer takes it.

    fsdptool never trains with it: it shows what other loops hold.
    """

    def __call__(
        self, model: nn.Module, batch: Mapping[str, Tensor], observer: Observer | None = None
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the model's loss, without metrics."""
        missing = f"{type(model).__name__} computes no loss from labels"
        advice = "plan another loss: --loss whole or --loss chunked"
        if "labels" not in batch or "labels" not in inspect.signature(model.forward).parameters:
            raise ConfigError(missing, help=advice)
        labelled: Any = _Labelled(model, batch["labels"])
        prediction = self.objective.predict(labelled, batch)
        if labelled.loss is None:
            raise ConfigError(missing, help=advice)
        if observer is not None:
            observer.predicted(prediction)
        return labelled.loss, {}


@contextmanager
def unconverted_parameters() -> Iterator[None]:
    """Refuse conversions of parameters by the model's own forward, while entered.

    ``module.to(dtype)`` in a forward (the routers of Switch Transformers, transformers 5.23) replaces what
    FSDP gathered by a copy that no later all-gather updates (torch 2.13, ``_fsdp_param.py``,
    ``init_unsharded_param`` fills the gathered tensor it knows): training would go on with old values. A
    conversion that changes nothing is allowed.

    Raises:
        ConfigError: A module converts its parameters.
    """
    from torch import nn, no_grad

    original = nn.Module._apply

    def convert(module: nn.Module, function: Callable[..., Any], recurse: bool = True) -> nn.Module:
        with no_grad():
            if any(function(parameter) is not parameter for parameter in module.parameters(recurse)):
                raise ConfigError(
                    f"{type(module).__name__} converts its parameters while it runs: FSDP2 would not update"
                    " the converted copy",
                    help="use mixed_precision: no",
                )
        for part in module.modules() if recurse else (module,):
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = function(buffer)
        return module

    nn.Module._apply = convert  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


@contextmanager
def apart_until_the_end() -> Iterator[None]:
    """Let attention to packed documents end with the block: sampling attends to whole sequences."""
    from fsdptool.families.objectives.packed_attention import leave

    try:
        yield
    finally:
        leave()


@dataclass(frozen=True, slots=True)
class GradientSync:
    """What FSDP does with the gradients of one micro-batch.

    Attributes:
        last: Whether FSDP takes it for the step's last: only then does it finish its reductions, and HSDP
            all-reduce.
        reduce: Whether its gradients are reduce-scattered; False keeps them unsharded.
    """

    last: bool
    reduce: bool


def gradient_syncs(count: int, *, unsharded: bool, marked: bool = True) -> Iterator[GradientSync]:
    """Yield what happens to the gradients of each of a step's micro-batches.

    Args:
        count: Micro-batches.
        unsharded: Whether gradients are accumulated unsharded (``sharding.accumulation``).
        marked: Whether the loop tells FSDP which micro-batch is the last (``set_is_last_backward``), as
            ``fsdptool train`` does; FSDP takes every one for the last otherwise.
    """
    for index in range(count):
        last = index == count - 1
        yield GradientSync(last or not marked, reduce=last or not unsharded)


def run_micro_batch(
    model: nn.Module,
    micro_loss: MicroLoss,
    batch: Mapping[str, Tensor],
    *,
    scale: float,
    divisor: Tensor,
    moment: Callable[[RunPhase], AbstractContextManager[None]],
    observer: Observer | None = None,
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Run forward and backward of one micro-batch; gradients add up in the parameters.

    Args:
        model: In training mode.
        micro_loss: The method's loss.
        batch: On the model's device.
        scale: Loss scale (fp16); else 1.
        divisor: What the whole step's loss is divided by.
        moment: Entered around forward and backward ; what measures memory is there.
        observer: Follows from inside; None in a run.

    Returns:
        The summed loss, detached, and the summed metrics.
    """
    # Backward runs the forward of checkpointed blocks again.
    with unconverted_parameters(), apart_until_the_end():
        with moment(RunPhase.FORWARD):
            loss, metrics = micro_loss(model, batch, observer)
        with moment(RunPhase.BACKWARD):
            if observer is None:
                (loss * (scale / divisor)).backward()  # type: ignore[no-untyped-call]
            else:
                observer.backward(loss * (scale / divisor))
    return loss.detach(), metrics


def add_validation_loss(
    model: nn.Module,
    objective: Objective,
    batch: Mapping[str, Tensor],
    total: Tensor,
    sums: dict[str, Tensor],
    observer: Observer | None = None,
) -> None:
    """Add one micro-batch of validation; its prediction dies here, before the next one's forward.

    Args:
        model: In evaluation mode; gradients are switched off by the caller.
        objective: The task.
        batch: On the model's device.
        total: Summed loss and summed weight so far, fp64; added to.
        sums: Summed metrics so far; added to.
        observer: Follows from inside; None in a run.
    """
    with unconverted_parameters(), apart_until_the_end():
        prediction = objective.predict(model, batch)
    if observer is not None:
        observer.predicted(prediction)
    total[0] += objective.loss(prediction, batch)
    total[1] += objective.weight(batch)
    for name, value in objective.metrics(prediction, batch).items():
        sums[name] = sums[name] + value if name in sums else value.clone()
