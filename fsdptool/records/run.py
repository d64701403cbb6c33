"""What a training run leaves behind: its start, metrics line by line, and a closing summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

from fsdptool.records.annotations import Count, Keywords, Positive

DeviceType = Literal["cpu", "cuda"]


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


@dataclass(frozen=True, slots=True)
class Start:
    """`run.json` of a run folder: one start of a run, written last and whole.

    Attributes:
        world_size: Total number of processes.
        device: Device type of the processes.
        resume: Checkpoint folder to continue from, ``auto`` for the newest good one, or null for none.
        number: How often the run was started before.
        argv: The command line.
        launch_id: Launch ID, identical on all nodes and unique per launch; null on a single node.
        started: When, in seconds since 1970; null in folders of earlier versions.
        recipe: The recipe that was given, relative to the run folder, so that both can move together; null in
            folders of earlier versions.
    """

    world_size: Positive
    device: DeviceType
    resume: str | None = None
    number: Count = 0
    argv: tuple[str, ...] = ()
    launch_id: str | None = None
    started: float | None = None
    recipe: str | None = None


@dataclass(frozen=True, slots=True)
class Metrics:
    """One line of `metrics.jsonl`: one optimizer step. Seconds and bytes; null is unknown.

    Attributes:
        step: Optimizer step, from 1.
        epoch: Epochs consumed, as a fraction.
        time: Seconds since 1970.
        loss: Mean loss over the global batch; null if it was not finite.
        grad_norm: Norm of the gradients before clipping; null if unknown or not finite.
        lr: Learning rate of the step.
        tokens: Valid tokens of the global batch; null for families without tokens.
        samples: Samples of the global batch.
        step_seconds: Wall time of the step, data included.
        data_seconds: Time spent waiting for data.
        memory_allocated_peak_bytes: Rank 0's peak over the step; null where not measured.
        memory_reserved_peak_bytes: Peak of the caching allocator's segments; null on the CPU.
        mfu: Model FLOPs utilisation, 0 to 1; null where the peak is not known.
        extra: The objective's own metrics (expert load, ...), loss scale, skipped steps, flops_per_second
            (the plan's model FLOPs of a step over its wall time, all ranks).
    """

    step: Positive
    epoch: float
    time: float
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: Count | None
    samples: Count
    step_seconds: float
    data_seconds: float
    memory_allocated_peak_bytes: Count | None
    memory_reserved_peak_bytes: Count | None
    mfu: float | None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankProgress:
    """What one rank is doing, as its watchdog last wrote it. Times are in seconds since 1970.

    Attributes:
        rank: The rank.
        phase: What the main thread is doing.
        step: The optimizer step it works on, from 1; null before the first.
        alive: When the record was written.
        progressed: When the main thread last made progress.
        waiting: Whether the main thread was inside a collective, and so waits for other ranks.
        interval: Seconds between two records; 0 if the record comes from an event, which is not repeated.
    """

    rank: Count
    phase: str
    step: Count | None
    alive: float
    progressed: float
    waiting: bool
    interval: float


RunStatus = Literal["completed", "stopped", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class RunFailure:
    """Why a run failed.

    Attributes:
        rank: The rank that failed first, or null if it is not known.
        message: What happened.
        help: What to do about it, or null.
        exit_code: Exit status of the command.
    """

    rank: Count | None
    message: str
    help: str | None
    exit_code: Count


@dataclass(frozen=True, slots=True)
class Summary:
    """`summary.json` of a run folder, and what `fsdptool train --format json` prints.

    Attributes:
        status: How the run ended.
        exit_code: Exit status of the command (docs/reference/exit-codes.md).
        resumable: Whether ``--resume auto`` has a checkpoint to continue from.
        steps: Optimizer steps recorded in metrics.jsonl.
        world_size: Number of processes.
        mesh: Sizes of the device mesh.
        units: FSDP units of the plan.
        sharding_proof: What rank 0 proved before step 1; empty if the run ended earlier.
        predicted_peak_bytes: Allocated peak per rank that the plan predicts.
        measured_peak_bytes: Allocated peak of every rank; null where unknown.
        instrument: What measured the peaks.
        error_percent: Predicted over the run's largest peak, minus one, in percent; null where no step was
            measured.
        throughput: Rates and step times; null where unknown.
        last_checkpoint: Newest complete checkpoint, relative to the run folder.
        last_good_step: The checkpoint's step.
        export: Exported folder, relative to the run folder.
        restarts: How often the workers were relaunched.
        failure: Why the run failed, or null.
        memory_report: Report on running out of memory, relative to the run folder.
        measured_moments: Allocated peak of every rank at each moment of the run that was measured (load,
            forward, backward, optimizer, evaluation, save, ...); null where a rank did not measure it.
    """

    status: RunStatus
    exit_code: Count
    resumable: bool
    steps: Count
    world_size: Positive
    mesh: Annotated[Mapping[str, Positive], Keywords(required=["dp_replicate", "dp_shard"])]
    units: Count
    sharding_proof: Mapping[str, Any]
    predicted_peak_bytes: Count | None
    measured_peak_bytes: tuple[Count | None, ...]
    instrument: str
    error_percent: float | None
    throughput: Mapping[str, float | None]
    last_checkpoint: str | None
    last_good_step: Count | None
    export: str | None
    restarts: Count
    failure: RunFailure | None
    memory_report: str | None
    measured_moments: Mapping[str, tuple[Count | None, ...]] = field(default_factory=dict)


RunState = Literal["running", "completed", "stopped", "failed", "interrupted", "dead"]
"""A run's status, or ``running``, or ``dead``: its processes are gone and no summary says how it ended."""


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """The memory of one phase, planned and measured.

    Attributes:
        name: The phase.
        predicted_bytes: Allocated peak per rank that the plan predicts, or null.
        measured_bytes: Largest allocated peak of a rank so far, or null.
    """

    name: str
    predicted_bytes: Count | None
    measured_bytes: Count | None

    @property
    def error_percent(self) -> float | None:
        """Predicted over measured bytes, minus one, in percent to one digit; None where one is unknown."""
        if self.predicted_bytes is None or not self.measured_bytes:
            return None
        # Adding zero turns a rounded -0.0 into 0.0.
        return round(100.0 * (self.predicted_bytes - self.measured_bytes) / self.measured_bytes, 1) + 0.0


@dataclass(frozen=True, slots=True)
class RunView:
    """The state of a run: an entry of `fsdptool runs`, and what `fsdptool watch` shows.

    Attributes:
        folder: The run folder.
        model: Reference of the model, or null.
        method: Training method, or null.
        state: Whether the run is running, and how it ended otherwise.
        device: Device type of the processes.
        world_size: Number of processes.
        nodes: Names of the machines that the ranks announced.
        gpus: Ids of the GPUs that the run claims on this machine; empty if it is not running here.
        started: When the run was last started, in seconds since 1970.
        updated: When it last wrote a step or a sign of life, or null.
        step: Optimizer steps done.
        total_steps: Steps of the whole run; null where it is not known yet.
        eta_seconds: Estimated time to the last step; null unless the run is running and steps were timed.
        loss: Loss of the last step, or null.
        grad_norm: Norm of its gradients, or null.
        lr: Its learning rate, or null.
        step_seconds: Median time of the latest steps, or null.
        tokens_per_second, samples_per_second: Rates of the latest steps, or null.
        memory: Memory by phase, planned and measured.
        predicted_peak_bytes: Allocated peak per rank that the plan predicts, or null.
        measured_peak_bytes: Largest measured peak so far, or null.
        ranks: What every rank that started does, or last did.
        last_checkpoint: Step of the newest complete checkpoint, or null.
        resumable: Whether ``--resume auto`` has a checkpoint to continue from, or nothing was lost.
        exit_code: Exit status of the run; null while it is running.
        failure: Why it failed, or null.
        lost_steps: Steps that another start makes again because the run has no checkpoint; 0 while it runs.
    """

    folder: str
    model: str | None
    method: str | None
    state: RunState
    device: DeviceType
    world_size: Positive
    nodes: tuple[str, ...]
    gpus: tuple[str, ...]
    started: float
    updated: float | None
    step: Count
    total_steps: Count | None
    eta_seconds: float | None
    loss: float | None
    grad_norm: float | None
    lr: float | None
    step_seconds: float | None
    tokens_per_second: float | None
    samples_per_second: float | None
    memory: tuple[PhaseMemory, ...]
    predicted_peak_bytes: Count | None
    measured_peak_bytes: Count | None
    ranks: tuple[RankProgress, ...]
    last_checkpoint: Count | None
    resumable: bool
    exit_code: Count | None
    failure: RunFailure | None
    lost_steps: Count = 0


@dataclass(frozen=True, slots=True)
class RunList:
    """What `fsdptool runs --format json` prints; `unreadable` names run folders with damaged files."""

    runs: tuple[RunView, ...]
    unreadable: tuple[str, ...] = ()
