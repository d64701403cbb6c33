"""The training loop: build, prepare, shard, load and prove a model, then step until the run ends.

Read it from top to bottom. :func:`train` is a whole run on one rank; :func:`assemble` makes what the loop
steps with; :func:`build_sharded` builds and shards a model, which ``modeling/prepare.py`` changes in between;
:class:`Trainer` is the loop. One optimizer step is ``training/step.py``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdptool.distributed.collective_order import CollectiveOrder
from fsdptool.distributed.initialisation import Blueprint, model_blueprint, note_initialisation
from fsdptool.distributed.materialize import Origins, materialize, published_parameters
from fsdptool.distributed.proof import prove
from fsdptool.distributed.recording import derive_seed
from fsdptool.distributed.session import close_session, open_session
from fsdptool.distributed.shard import gather_in_float8, reshard_all, shard
from fsdptool.distributed.weights import open_adapter, open_weights, random_start_notes
from fsdptool.modeling import build_model, choose_kernels_of_cuda
from fsdptool.modeling.compilation import compile_modules
from fsdptool.modeling.context_parallel import check_context
from fsdptool.modeling.divided_dropout import agree
from fsdptool.modeling.fused_loss import fuse_head
from fsdptool.modeling.methods import Teacher, method_of
from fsdptool.modeling.objective import objective_for
from fsdptool.modeling.prepare import prepare_model
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.tensor_parallel import by_name
from fsdptool.modeling.units import compiled_modules
from fsdptool.records.run import Metrics, RunPhase
from fsdptool.runs import watchdog
from fsdptool.runs.events import WorkerPhase
from fsdptool.runs.folder import read_inputs, read_prediction
from fsdptool.runs.trackers import open_trackers
from fsdptool.runs.watchdog import PhaseReport, no_report, report_phase
from fsdptool.training.checkpoint.checkpointer import open_checkpointer
from fsdptool.training.checkpoint.split_tensors import Division
from fsdptool.training.data import build_batches, build_evaluation
from fsdptool.training.evaluate import Evaluated, Validation
from fsdptool.training.memory_meter import open_meter
from fsdptool.training.optimizers.sharded import base_rate, build_optimizer, rate, total_steps
from fsdptool.training.sampling import Sampler, open_sampler
from fsdptool.training.state import Assembled, EmaWeights, NonFinitePolicy, RunParts, RunState
from fsdptool.training.step import Launched, LossScaler, Stepper, StepResult, StopAgreement

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.distributed.session import Session
    from fsdptool.distributed.weights import FolderWeights
    from fsdptool.modeling.methods.lora import Derived
    from fsdptool.records.anatomy import ModelSpec
    from fsdptool.records.recipe import ModelChoice, Recipe
    from fsdptool.records.resolved_run import ResolvedRun
    from fsdptool.records.sharding import FsdpSettings, UnitPlan
    from fsdptool.runs.events import EventLog
    from fsdptool.runs.folder import RunInputs
    from fsdptool.runs.signals import SignalFlag
    from fsdptool.training.data.loader import Loader


def train(
    folder: Path, events: EventLog, flag: SignalFlag, *, trust_remote_code: bool = False
) -> Mapping[str, Any]:
    """Train what the run folder describes; returns the fields of the closing ``finished`` event.

    Raises:
        ConfigError: The folder asks to run the model's own code, and ``trust_remote_code`` is not set.
    """
    inputs = read_inputs(folder, trust_remote_code=trust_remote_code)
    recipe, spec = inputs.recipe, inputs.spec
    # The process group first: everything below is collective.
    session = open_session(inputs.settings, recipe.sharding.expert_parallel)
    if session.device.type == "cuda":
        choose_kernels_of_cuda()
    mesh = {name: size for name, size in asdict(session.dims).items() if size is not None}
    division = Division(session.tensor, by_name(inputs.units.placements))
    checkpointer = open_checkpointer(
        folder, recipe, inputs.settings, events=events, mesh=mesh, division=division
    )
    if session.is_main:
        events.add_trackers(open_trackers(folder, recipe), every=recipe.tracking.log_every)
    parts = RunParts(events, flag, checkpointer, open_meter(session.device))
    torch.manual_seed(recipe.seed)

    with parts.meter.moment(RunPhase.LOAD):
        assembled = assemble(inputs, session, phase=partial(report_phase, events))
    if session.is_main:
        events.emit("proof", **assembled.proof)
        for note in assembled.notes:
            events.emit("warning", message=note)
    # Data after the model: its position is restored with the checkpoint, which `Trainer.run` loads.
    rank, world = session.data_rank, session.data_ranks
    device = session.device
    batches = build_batches(recipe, spec, rank=rank, world=world, device=device)
    held_out = build_evaluation(recipe, spec, rank=rank, world=world, device=device)
    sampler = open_sampler(recipe, spec, assembled.objective, session, folder, held_out or batches)
    prediction = read_prediction(folder)
    trainer = Trainer(
        recipe,
        assembled,
        batches,
        held_out,
        parts,
        session,
        step_flops=prediction.step_flops if prediction is not None else None,
        peak_flops=prediction.peak_flops if prediction is not None and device.type == "cuda" else None,
        sampler=sampler,
    )
    report_phase(events, WorkerPhase.TRAINING)
    ended = trainer.run()
    batches.close()
    if held_out is not None:
        held_out.close()
    close_session()
    return {
        "status": ended.status,
        "step": ended.step,
        "signal": ended.signal,
        "loss": ended.last_loss,
        "instrument": parts.meter.instrument,
        "peaks": list(parts.meter.peaks()),
        "moments": parts.meter.moments(),
    }


def assemble(inputs: RunInputs, session: Session, *, phase: PhaseReport = no_report) -> Assembled:
    """Build, shard, fill and prove the model of a run, and make its optimizer.

    Args:
        inputs: The run's records.
        session: This rank.
        phase: Called as each phase begins.

    Raises:
        FsdptoolError: The records do not suit the model or this machine.
        WorkerError: The sharding is not what the unit plan lists.
    """
    spec, plan, settings = inputs.spec, inputs.units, inputs.settings
    run = resolve_run(inputs.recipe, settings, ranks=session.world_size)
    recipe = run.recipe
    objective = objective_for(recipe, spec)
    check_context(spec, run)
    model, notes = build_sharded(
        spec, recipe.model, plan, settings, session, recipe=recipe, seed=recipe.seed, phase=phase
    )
    phase(WorkerPhase.PROVING)
    # Before anything is computed from the parameters: a run whose sharding is wrong never starts.
    proof = prove(model, plan, session)
    teacher, teacher_notes = _build_teacher(inputs, run, session, phase)
    notes += teacher_notes
    # The optimizer last: it keeps this rank's rows, which exist only now.
    named = list(model.named_parameters())
    learning_rate = base_rate(recipe.optimizer, session.data_ranks)
    optimizer = build_optimizer(recipe.optimizer, named, rate=learning_rate)
    scaler = LossScaler() if plan.param_dtype == "float16" else None
    # After everything that changes a model: from here on each of its collectives waits for its turn.
    order = CollectiveOrder([model] if teacher is None else [model, teacher.model], session)
    stepper = Stepper(
        model,
        method_of(recipe).micro_loss(recipe, objective, teacher),
        optimizer,
        session,
        clip=recipe.optimizer.clip_grad_norm,
        unsharded=recipe.sharding.accumulation == "unsharded",
        scaler=scaler,
        placements=plan.placements,
        order=order,
    )
    ema = EmaWeights(named, recipe.ema.decay) if recipe.ema.decay is not None else None
    return Assembled(model, stepper, optimizer, scaler, ema, objective, learning_rate, proof, notes)


def build_sharded(
    spec: ModelSpec,
    choice: ModelChoice,
    plan: UnitPlan,
    settings: FsdpSettings,
    session: Session,
    *,
    recipe: Recipe | None,
    seed: int,
    phase: PhaseReport = no_report,
) -> tuple[nn.Module, tuple[str, ...]]:
    """Build a model on meta, shard it and give each rank its rows.

    Args:
        spec: The model.
        choice: dtype, attention and where weights come from.
        plan: Its units.
        settings: Activation checkpointing offload.
        session: This rank.
        recipe: Method and recomputation; None freezes the model (a teacher).
        seed: Seed of random weights.
        phase: Called as each phase begins.

    Returns:
        The model, and notes about parameters that start at random.
    """
    phase(WorkerPhase.BUILDING)
    # Build on meta: no rank ever holds the whole model.
    model = build_model(spec, choice, cp=session.dims.cp)
    # The files are matched with the parameters' own names, so before adapters rename them.
    weights = open_weights(spec, choice, model)
    published = published_parameters(model)
    adapters: Blueprint | None = None
    derived: Mapping[str, Derived] = {}
    continued: FolderWeights | None = None

    def after_method(model: nn.Module) -> None:
        nonlocal adapters, derived, continued
        added = method_of(recipe).initialisation(model, recipe) if recipe is not None else None
        if added is not None:
            adapters, derived = note_initialisation(added.reset, added.parameters), added.derived
            continued = open_adapter(spec, choice, model)
        phase(WorkerPhase.SHARDING)

    prepare_model(
        model,
        spec,
        recipe,
        settings,
        plan,
        session.tensor,
        float8_device=session.device,
        after_method=after_method,
        head=fuse_head if recipe is not None and recipe.objective.fused else None,
        compile=partial(compile_modules, paths=compiled_modules(plan))
        if recipe is not None and recipe.sharding.compile
        else None,
    )
    shard(model, plan, session)
    # Values last: every rank reads or draws its own rows only.
    phase(WorkerPhase.LOADING if weights is not None else WorkerPhase.INITIALISING)
    blueprint = model_blueprint(spec, choice, seed=seed)
    missing = materialize(
        model,
        Origins(
            blueprint,
            weights,
            adapters,
            seed,
            by_name(plan.placements),
            session.tensor,
            derived,
            continued,
            published,
        ),
        session,
        offload=plan.cpu_offload,
    )
    for files in (weights, continued):
        if files is not None:
            files.close()
    # Tells FSDP how to gather the rows that are there now.
    gather_in_float8(model, plan, session)
    return model, random_start_notes(spec, choice, missing, pretrained=weights is not None)


def _build_teacher(
    inputs: RunInputs, run: ResolvedRun, session: Session, phase: PhaseReport
) -> tuple[Teacher | None, tuple[str, ...]]:
    """Build, shard and prove the method's teacher, if it has one; returns it and notes about its weights."""
    choice = method_of(run.recipe).teacher_choice(run.recipe)
    if choice is None:
        return None, ()
    assert inputs.teacher_spec is not None and inputs.teacher_units is not None
    check_context(inputs.teacher_spec, run)
    model, notes = build_sharded(
        inputs.teacher_spec,
        choice,
        inputs.teacher_units,
        inputs.settings,
        session,
        recipe=None,
        seed=inputs.recipe.seed,
        phase=partial(phase, model="teacher"),
    )
    prove(model, inputs.teacher_units, session)
    teacher = Teacher(model, objective_for(inputs.recipe, inputs.teacher_spec), reshard_all)
    return teacher, tuple(f"teacher: {note}" for note in notes)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: ``completed`` or ``stopped`` (with the signal's number)."""

    status: str
    step: int
    signal: int = 0
    last_loss: float | None = None
    evaluation: Evaluated | None = None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step and what it was launched with.

    Attributes:
        step: Its number.
        launched: What the stepper knows of it.
        learning_rate: Of this step.
        began: When it was begun (``time.perf_counter``).
        waited: Seconds that the host waited for its data.
        epoch: Epochs handed out, its own samples included.
        position: Of the data, after its own samples.
        memory: Allocated and reserved peak bytes.
    """

    step: int
    launched: Launched
    learning_rate: float
    began: float
    waited: float
    epoch: float
    position: Mapping[str, Any]
    memory: tuple[int | None, int | None]


class Trainer:
    """Runs a recipe from wherever the checkpoint left it to its last step.

    Args:
        recipe: The run.
        assembled: Model, optimizer, stepper.
        batches: Training data of this rank.
        held_out: Validation data of this rank, or None.
        parts: Events, stop flag, checkpointer, meter.
        session: This rank.
        step_flops: The plan's model FLOPs of one step over all ranks, at the planned shapes, or None.
        peak_flops: The device's peak FLOP/s in the run's dtype, or None.
        sampler: Writes samples at each evaluation, or None.

    Attributes:
        ahead: Whether a step is launched before what the one before it came to is read: on devices that
            compute while the host goes on. An fp16 step needs the loss scale that the one before it leaves.
    """

    def __init__(
        self,
        recipe: Recipe,
        assembled: Assembled,
        batches: Loader,
        held_out: Loader | None,
        parts: RunParts,
        session: Session,
        *,
        step_flops: float | None = None,
        peak_flops: float | None = None,
        sampler: Sampler | None = None,
    ) -> None:
        self.recipe, self.assembled, self.batches = recipe, assembled, batches
        self.parts, self.session = parts, session
        self.step_flops, self.peak_flops = step_flops, peak_flops
        batch = recipe.batch
        per_step = batch.micro_batch * batch.accumulation * session.data_ranks
        self.samples_per_step = per_step if batch.global_batch is None else batch.global_batch
        self.state = RunState(
            assembled.model,
            assembled.optimizer,
            batches,
            recipe.seed,
            session.rank,
            assembled.scaler,
            assembled.ema,
        )
        self.nonfinite = NonFinitePolicy(recipe.on_nonfinite, self.state, parts, session)
        self.stop = StopAgreement(session, parts.stop)
        self.validation = Validation(recipe, assembled, held_out, sampler, parts, session, self.stop)
        assembled.stepper.moment = parts.meter.moment
        self.ahead = session.device.type != "cpu" and assembled.scaler is None
        self._last_loss: float | None = None
        self._settled = 0.0

    def run(self) -> Ended:
        """Train to the end, or to a stop that all ranks agreed on.

        Ranks agree once a step, once a batch of an evaluation and once a sample.

        Raises:
            WorkerError: Non-finite loss or gradients under ``on_nonfinite: stop``, or rollbacks that
                do not help.
            StorageError: A checkpoint could not be written.
        """
        checkpointer, state = self.parts.checkpointer, self.state
        watchdog.enter(WorkerPhase.RESTORING)
        # Ranks with other samples drop other elements; a tensor-parallel group has the same ones.
        group = self.session.rank // self.session.dims.tp
        torch.manual_seed(derive_seed(self.recipe.seed, "training", group))
        checkpointer.load(state)
        if self.session.dims.tp > 1:
            agree(self.session.tensor)
        # Every forward is a sign of life: of a long accumulation, an evaluation, a sample.
        self.assembled.model.register_forward_pre_hook(watchdog.beat)
        total = total_steps(self.recipe, self.batches, self.samples_per_step)
        self.parts.events.emit("length", steps=total)
        # Not only what a signal while reading asks for: a run that ended inside the evaluation of its
        # checkpoint's step makes that evaluation now.
        if not self.stop.agree():
            self.validation.run(state)
        flight: _Flight | None = None
        while state.step < total and not self.stop.signal:
            earlier, flight = flight, self._launch(total, state.step + (1 if flight is None else 2))
            checkpointer.poll()
            self.parts.events.memory(self.parts.meter.moments())
            if earlier is not None and not self._settle(earlier)[1]:
                flight = None  # rolled back: what was launched after the bad step never counts
                continue
            if self._may_go_on(flight, total):
                continue
            outcome, counts = self._settle(flight)
            flight = None
            self.stop.signal = outcome.stop
            if self.stop.signal or not counts:  # rolled back: what is due there was done before
                continue
            if checkpointer.due(state.step) and state.step < total:
                self._save()
            self.validation.run(state)
        if self.stop.signal or self.recipe.checkpoints.at_end or checkpointer.due(state.step):
            self._save(wait=True)
        watchdog.enter(WorkerPhase.SAVING)
        checkpointer.close()
        status = "stopped" if self.stop.signal else "completed"
        return Ended(status, state.step, self.stop.signal, self._last_loss, self.validation.latest)

    def step(self, total: int) -> StepResult:
        """Take one optimizer step of ``total`` and wait for it."""
        return self._settle(self._launch(total, self.state.step + 1))[0]

    def _may_go_on(self, flight: _Flight, total: int) -> bool:
        """Say whether the next step may be launched now: nothing happens between this one and it."""
        due = self.parts.checkpointer.due(flight.step) or self.validation.due(flight.step)
        return self.ahead and not flight.launched.stop and flight.step < total and not due

    def _launch(self, total: int, step: int) -> _Flight:
        """Launch a step: data, forward and backward, update, average."""
        began = time.perf_counter()
        watchdog.enter(WorkerPhase.LOADING_DATA, step)
        micro_batches = next(self.batches)
        watchdog.enter(WorkerPhase.TRAINING)
        waited = time.perf_counter() - began
        learning_rate = self.assembled.rate * rate(self.recipe.schedule, step - 1, total)
        with self.parts.meter.step(step):
            launched = self.assembled.stepper.launch(
                micro_batches, rate=learning_rate, stop=self.parts.stop.requested
            )
        if self.assembled.ema is not None:
            with self.parts.meter.moment(RunPhase.AVERAGE):
                self.assembled.ema.update(launched.skipped)
        position, memory = self.batches.state_dict(), self.parts.meter.last()
        return _Flight(step, launched, learning_rate, began, waited, self.batches.epoch, position, memory)

    def _settle(self, flight: _Flight) -> tuple[StepResult, bool]:
        """Wait for a launched step, count and report it; returns whether it counts: a rollback does not."""
        state = self.state
        outcome = self.assembled.stepper.settle(flight.launched)
        # From the end of the step before, if that was running when this one was launched.
        began, self._settled = max(flight.began, self._settled), time.perf_counter()
        if not outcome.finite and not self.nonfinite.counts(outcome, flight.position):
            return outcome, False
        state.step += 1
        state.tokens += outcome.weight
        self._last_loss = outcome.loss
        self.parts.events.step(step_metrics(self, flight, outcome, self._settled - began))
        return outcome, True

    def _save(self, *, wait: bool = False) -> None:
        if self.state.step == 0:
            return  # a stop before the first step: there is nothing yet that a new start would not make
        watchdog.enter(WorkerPhase.SAVING)
        with self.parts.meter.moment(RunPhase.SAVE):
            self.parts.checkpointer.save(self.state, wait=wait)


def step_metrics(trainer: Trainer, flight: _Flight, outcome: StepResult, seconds: float) -> Metrics:
    """Return the metrics of the step that ``trainer`` has just settled.

    Args:
        trainer: After the step.
        flight: How it was launched.
        outcome: What it came to.
        seconds: The whole step took.
    """
    state, scaler, session = trainer.state, trainer.assembled.scaler, trainer.session
    extra: dict[str, Any] = dict(outcome.metrics)
    if state.skipped:
        extra["skipped"] = state.skipped
    if scaler is not None:
        extra["loss_scale"] = scaler.scale
    mfu = None
    if trainer.step_flops is not None:
        extra["flops_per_second"] = trainer.step_flops / seconds
        if trainer.peak_flops is not None:
            mfu = trainer.step_flops / (seconds * trainer.peak_flops * session.world_size)
    allocated, reserved = flight.memory
    return Metrics(
        step=state.step,
        epoch=flight.epoch,
        time=time.time(),
        loss=outcome.loss,
        grad_norm=outcome.grad_norm,
        lr=flight.learning_rate,
        tokens=outcome.weight if trainer.assembled.objective.unit == "tokens" else None,
        samples=trainer.samples_per_step,
        step_seconds=seconds,
        # What a running step hides of the wait costs nothing.
        data_seconds=min(flight.waited, seconds),
        memory_allocated_peak_bytes=allocated,
        memory_reserved_peak_bytes=reserved,
        mfu=mfu,
        extra=extra,
    )
