"""Validation and samples during training, under any reshard setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdptool.distributed.shard import reshard_all
from fsdptool.families.objectives.context import share
from fsdptool.modeling.objective import add_validation_loss
from fsdptool.records.run import RunPhase
from fsdptool.runs import watchdog
from fsdptool.runs.events import WorkerPhase
from fsdptool.training.step import per_item, to_device

if TYPE_CHECKING:
    from torch import Tensor

    from fsdptool.distributed.collective_order import CollectiveOrder
    from fsdptool.distributed.session import Session
    from fsdptool.families.protocol import Objective
    from fsdptool.records.recipe import Recipe
    from fsdptool.training.data.loader import Loader
    from fsdptool.training.sampling import Sampler
    from fsdptool.training.state import Assembled, RunParts, RunState
    from fsdptool.training.step import StopAgreement


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Mean loss per item over a pass of the validation data, equal on all ranks; NaN without items."""

    loss: float
    items: int
    metrics: Mapping[str, Any] = field(default_factory=dict)


def evaluate(
    model: nn.Module,
    objective: Objective,
    data: Iterable[Sequence[Mapping[str, Tensor]]],
    session: Session,
    order: CollectiveOrder,
) -> Evaluated:
    """Return the loss over ``data``; the model is left as it was found.

    A forward without a backward leaves what is not resharded after forward (the root at least)
    gathered; the next optimizer step would not reach those copies, so everything is resharded.
    """
    was_training = model.training
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=session.device)
    sums: dict[str, Tensor] = {}
    try:
        with torch.no_grad():
            for index, batch in enumerate(chain.from_iterable(data)):
                moved = share(to_device(batch, session.device))
                with order.micro_batch("validation", index == 0):
                    add_validation_loss(model, objective, moved, total, sums)
    finally:
        reshard_all(model)
        model.train(was_training)
    message = torch.cat([total, *(value.double().reshape(-1) for value in sums.values())])
    # Ranks of a tensor-parallel group evaluate the same items.
    reduced = session.sum(message / session.dims.tp).cpu()
    reduced[1].round_()
    items = max(float(reduced[1]), 1.0)
    metrics, at = {}, 2
    for name, value in sums.items():
        metrics[name] = per_item(reduced[at : at + value.numel()].view(value.shape), items)
        at += value.numel()
    loss = float(reduced[0]) / items if reduced[1] else math.nan
    return Evaluated(loss, int(reduced[1]), metrics)


class Validation:
    """Evaluates and samples while a run trains, at the steps ``evaluation.every_steps`` names.

    Args:
        recipe: Says when.
        assembled: The model and its average, which is evaluated where there is one.
        data: Validation data of this rank, or None.
        sampler: Generates at each evaluation, or None.
        parts: Events and meter.
        session: This rank.
        stop: Asked before each batch and each sample.

    Attributes:
        latest: The last whole evaluation.
    """

    def __init__(
        self,
        recipe: Recipe,
        assembled: Assembled,
        data: Loader | None,
        sampler: Sampler | None,
        parts: RunParts,
        session: Session,
        stop: StopAgreement,
    ) -> None:
        self._every = recipe.evaluation.every_steps
        self._assembled = assembled
        self._data = data
        self._sampler = sampler
        self._parts = parts
        self._session = session
        self._stop = stop
        self.latest: Evaluated | None = None

    def run(self, state: RunState) -> None:
        """Evaluate and sample after this step if that is due, was not done, and no stop comes between."""
        if not self.due(state.step) or state.step == state.evaluated:
            return
        self.evaluate(state.step)
        if not self._stop.signal:
            self.sample(state.step)
        if not self._stop.signal:
            state.evaluated = state.step

    def due(self, step: int) -> bool:
        """Say whether the recipe wants an evaluation after ``step``."""
        return self._every is not None and step % self._every == 0

    def evaluate(self, step: int) -> Evaluated | None:
        """Measure the validation loss and report it; a stop cuts it short, and nothing is reported."""
        if self._data is None:
            return None
        with self._parts.meter.moment(RunPhase.EVALUATION), self._averaged():
            result = evaluate(
                self._assembled.model,
                self._assembled.objective,
                self._until_stopped(iter(self._data)),
                self._session,
                self._assembled.stepper.order,
            )
        if self._stop.signal:
            return None
        if self._session.is_main:
            self._parts.events.emit("evaluation", step=step, loss=result.loss, metrics=dict(result.metrics))
        self.latest = result
        return result

    def sample(self, step: int) -> None:
        """Let all ranks generate and rank 0 write."""
        if self._sampler is None:
            return
        watchdog.enter(WorkerPhase.SAMPLING)
        with self._parts.meter.moment(RunPhase.SAMPLING), self._averaged():
            samples = self._sampler.make(self._assembled.model, stop=self._stop.agree)
        if self._stop.signal:
            return
        # Outside the moment: the plan does not include the VAE that decodes on rank 0's host.
        files = self._sampler.write(samples, step)
        if self._session.is_main:
            self._parts.events.emit("samples", step=step, files=[str(file) for file in files])

    def _averaged(self) -> AbstractContextManager[None]:
        ema = self._assembled.ema
        return ema.swapped() if ema is not None else nullcontext()

    def _until_stopped(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass validation data on until a stop is asked for, and say when a rank waits for it."""
        while not self._stop.agree():
            watchdog.enter(WorkerPhase.LOADING_DATA)
            try:
                step = next(batches)
            except StopIteration:
                return
            finally:
                watchdog.enter(WorkerPhase.EVALUATING)
            yield step
