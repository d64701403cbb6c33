"""The run itself: steps, checkpoints, evaluations, stops, and what to do about non-finite values."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError, WorkerError
from fsdptool.records.run import Metrics
from fsdptool.runs import watchdog
from fsdptool.runs.events import WorkerPhase
from fsdptool.training.evaluate import Evaluated, evaluate
from fsdptool.training.optimizers.sharded import rate
from fsdptool.training.state import RunState

if TYPE_CHECKING:
    from fsdptool.distributed.session import Session
    from fsdptool.records.recipe import Recipe
    from fsdptool.training.assemble import Assembled
    from fsdptool.training.interfaces import Batches, RunParts
    from fsdptool.training.sampling import Sampler
    from fsdptool.training.step import Outcome

_ROLLBACKS = 3
"""Rolling back to one checkpoint this often without passing it means that it does not help."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: ``completed`` or ``stopped`` (with the signal's number)."""

    status: str
    step: int
    signal: int = 0
    last_loss: float | None = None
    evaluation: Evaluated | None = None


def total_steps(recipe: Recipe, batches: Batches, samples_per_step: int) -> int:
    """Return the optimizer steps of the run.

    Raises:
        ConfigError: The recipe names neither ``steps`` nor ``epochs``.
    """
    if recipe.steps is not None:
        return recipe.steps
    if recipe.epochs is None:
        raise ConfigError("the recipe says neither steps nor epochs", help="set one of them")
    return max(math.ceil(recipe.epochs * batches.samples_per_epoch / samples_per_step), 1)


class Loop:
    """Runs a recipe from wherever the checkpoint left it to its last step.

    Args:
        recipe: The run.
        assembled: Model, optimizer, stepper.
        batches: Training data of this rank.
        validation: Validation data of this rank, or None.
        parts: Events, stop flag, checkpointer, meter.
        session: This rank.
        step_flops: The plan's model FLOPs of one step over all ranks, at the planned shapes, or None.
        peak_flops: The device's peak FLOP/s in the run's dtype, or None.
        sampler: Writes samples beside each evaluation, or None.
    """

    def __init__(
        self,
        recipe: Recipe,
        assembled: Assembled,
        batches: Batches,
        validation: Batches | None,
        parts: RunParts,
        session: Session,
        *,
        step_flops: float | None = None,
        peak_flops: float | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.recipe = recipe
        self.sampler = sampler
        self.assembled = assembled
        self.batches = batches
        self.validation = validation
        self.parts = parts
        self.session = session
        self.step_flops = step_flops
        self.peak_flops = peak_flops
        self.state = RunState(
            assembled.model,
            assembled.optimizer,
            batches,
            recipe.seed,
            session.rank,
            assembled.scaler,
            assembled.ema,
        )
        assembled.stepper.moment = parts.meter.moment
        self._rolled_back: dict[int, int] = {}
        self._evaluated: Evaluated | None = None
        self._last_loss: float | None = None
        self._stop = 0

    def run(self) -> Ended:
        """Train to the end, or to a stop that all ranks agreed on.

        Ranks agree once a step, once a batch of an evaluation and once a sample.

        Raises:
            WorkerError: Non-finite loss or gradients under ``on_nonfinite: stop``, or rollbacks that
                do not help.
            StorageError: A checkpoint could not be written.
        """
        checkpointer = self.parts.checkpointer
        watchdog.enter(WorkerPhase.RESTORING)
        checkpointer.load(self.state)
        # Every forward is a sign of life: of a long accumulation, an evaluation, a sample.
        self.assembled.model.register_forward_pre_hook(watchdog.beat)
        samples_per_step = self._samples_per_step()
        total = total_steps(self.recipe, self.batches, samples_per_step)
        # Not only what a signal while reading asks for: a run that ended inside the evaluation of its
        # checkpoint's step makes that evaluation now.
        if not self._asked():
            self._validate()
        while self.state.step < total and not self._stop:
            before = self.state.step
            self._stop = self._step(total).stop
            checkpointer.poll()
            if self._stop or self.state.step <= before:  # rolled back: what is due there was done before
                continue
            if checkpointer.due(self.state.step) and self.state.step < total:
                self._save()
            self._validate()
        if self._stop or self.recipe.checkpoints.at_end or checkpointer.due(self.state.step):
            self._save(wait=True)
        watchdog.enter(WorkerPhase.SAVING)
        checkpointer.close()
        status = "stopped" if self._stop else "completed"
        return Ended(status, self.state.step, self._stop, self._last_loss, self._evaluated)

    def _asked(self) -> int:
        """Return the signal that some rank was asked to stop with, or 0: the same on all ranks, at once."""
        self._stop = self.session.most(self.parts.stop.requested)
        return self._stop

    def _save(self, *, wait: bool = False) -> None:
        if self.state.step == 0:
            return  # a stop before the first step: there is nothing yet that a new start would not make
        watchdog.enter(WorkerPhase.SAVING)
        with self.parts.meter.moment("save"):
            self.parts.checkpointer.save(self.state, wait=wait)

    def evaluate(self) -> Evaluated | None:
        """Measure the validation loss (of the average, where there is one) and report it.

        A stop cuts it short; then nothing is reported.
        """
        if self.validation is None:
            return None
        ema = self.assembled.ema
        with (
            self.parts.meter.moment("evaluation"),
            ema.swapped() if ema is not None else nullcontext(),
        ):
            found = evaluate(
                self.assembled.model, self.assembled.objective, self._fed(iter(self.validation)), self.session
            )
        if self._stop:
            return None
        if self.session.is_main:
            self.parts.events.emit(
                "evaluation", step=self.state.step, loss=found.loss, metrics=dict(found.metrics)
            )
        self._evaluated = found
        return found

    def sample(self) -> None:
        """Let all ranks generate (from the average, where there is one) and rank 0 write."""
        if self.sampler is None:
            return
        ema = self.assembled.ema
        watchdog.enter(WorkerPhase.SAMPLING)
        with (
            self.parts.meter.moment("sampling"),
            ema.swapped() if ema is not None else nullcontext(),
        ):
            made = self.sampler.make(self.assembled.model, stop=self._asked)
        if self._stop:
            return
        # Outside the moment: the VAE that decodes on rank 0's host is no part of the plan.
        files = self.sampler.write(made, self.state.step)
        if self.session.is_main:
            self.parts.events.emit("samples", step=self.state.step, files=[str(file) for file in files])

    def _validate(self) -> None:
        """Evaluate and sample after this step if that is due, was not done, and no stop comes between."""
        every, step = self.recipe.evaluation.every_steps, self.state.step
        if every is None or step % every or step == self.state.evaluated:
            return
        self.evaluate()
        if not self._stop:
            self.sample()
        if not self._stop:
            self.state.evaluated = step

    def _fed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Pass validation data on until a stop is asked for, and say when a rank waits for it."""
        while not self._asked():
            watchdog.enter(WorkerPhase.LOADING_DATA)
            try:
                step = next(batches)
            except StopIteration:
                return
            finally:
                watchdog.enter(WorkerPhase.EVALUATING)
            yield step

    def _samples_per_step(self) -> int:
        batch = self.recipe.batch
        if batch.global_batch is not None:
            return batch.global_batch
        return batch.micro_batch * batch.accumulation * self.session.data_ranks

    def _step(self, total: int) -> Outcome:
        began = time.perf_counter()
        watchdog.enter(WorkerPhase.LOADING_DATA)
        micro_batches = next(self.batches)
        watchdog.enter(WorkerPhase.TRAINING)
        loaded = time.perf_counter()
        state = self.state
        learning_rate = self.assembled.rate * rate(self.recipe.schedule, state.step, total)
        with self.parts.meter.step(state.step + 1):
            outcome = self.assembled.stepper.run(
                micro_batches, rate=learning_rate, stop=self.parts.stop.requested
            )
        if not outcome.finite and not self._forgive(outcome):
            return outcome
        state.step += 1
        state.tokens += outcome.weight
        self._last_loss = outcome.loss
        if self.assembled.ema is not None and outcome.finite:
            with self.parts.meter.moment("average"):
                self.assembled.ema.update()
        self._report(outcome, learning_rate, began, loaded)
        return outcome

    def _forgive(self, outcome: Outcome) -> bool:
        """Decide about a non-finite step; returns whether it counts as a step.

        Every rank decides from the same reduced numbers. An fp16 overflow with a finite loss is the
        scaler's business and always skipped.
        """
        step = self.state.step + 1
        if self.assembled.scaler is not None and math.isfinite(outcome.loss):
            self.state.skipped += 1
            return True
        what = "loss" if not math.isfinite(outcome.loss) else "gradient norm"
        if self.session.is_main:
            self.parts.events.emit("nonfinite", step=step, what=what, policy=self.recipe.on_nonfinite)
        if self.recipe.on_nonfinite == "skip":
            self.state.skipped += 1
            return True
        if self.recipe.on_nonfinite == "rollback":
            self._roll_back(step)
            return False
        raise WorkerError(
            f"step {step}: the {what} is not finite",
            help="lower the learning rate, or set on_nonfinite to skip or rollback",
        )

    def _roll_back(self, step: int) -> None:
        """Return to the newest checkpoint and go on with the data that follows the bad batch."""
        position = self.batches.state_dict()
        watchdog.enter(WorkerPhase.RESTORING)
        found = self.parts.checkpointer.rollback(self.state)
        times = self._rolled_back.get(step, 0) + 1
        self._rolled_back[step] = times
        if found is None or times > _ROLLBACKS:
            why = "there is no checkpoint" if found is None else f"{_ROLLBACKS} rollbacks did not help"
            raise WorkerError(f"step {step} is not finite and {why}", help="lower the learning rate")
        self.batches.load_state_dict(position)

    def _report(self, outcome: Outcome, learning_rate: float, began: float, loaded: float) -> None:
        now = time.perf_counter()
        allocated, reserved = self.parts.meter.last()
        tokens = outcome.weight if self.assembled.objective.unit == "tokens" else None
        extra: Mapping[str, Any] = dict(outcome.metrics)
        if self.state.skipped:
            extra = {**extra, "skipped": self.state.skipped}
        if self.assembled.scaler is not None:
            extra = {**extra, "loss_scale": self.assembled.scaler.scale}
        seconds = now - began
        if self.step_flops is not None:
            extra = {**extra, "flops_per_second": self.step_flops / seconds}
        self.parts.events.step(
            Metrics(
                step=self.state.step,
                epoch=self.batches.epoch,
                time=time.time(),
                loss=outcome.loss,
                grad_norm=outcome.grad_norm,
                lr=learning_rate,
                tokens=tokens,
                samples=self._samples_per_step(),
                step_seconds=seconds,
                data_seconds=loaded - began,
                memory_allocated_peak_bytes=allocated,
                memory_reserved_peak_bytes=reserved,
                mfu=self._mfu(seconds),
                extra=extra,
            )
        )

    def _mfu(self, seconds: float) -> float | None:
        if self.step_flops is None or self.peak_flops is None:
            return None
        return self.step_flops / (seconds * self.peak_flops * self.session.world_size)
