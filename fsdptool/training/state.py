"""What a run is made of between two steps: the model and its average, and the state a checkpoint holds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdptool.distributed.recording import derive_seed
from fsdptool.distributed.shard import local, sharded_like
from fsdptool.errors import WorkerError
from fsdptool.modeling.divided_dropout import agree
from fsdptool.runs import watchdog
from fsdptool.runs.events import EventLog, WorkerPhase

if TYPE_CHECKING:
    from fsdptool.distributed.session import Session
    from fsdptool.families.protocol import Objective
    from fsdptool.runs.signals import SignalFlag
    from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
    from fsdptool.training.data.loader import Loader
    from fsdptool.training.memory_meter import Meter
    from fsdptool.training.optimizers.sharded import ShardedOptimizer
    from fsdptool.training.step import LossScaler, Stepper, StepResult


class EmaWeights:
    """Keeps ``average = decay x average + (1 - decay) x parameter`` in fp32 (fp64 for fp64).

    Args:
        named: Trained parameters, materialised.
        decay: Between 0 and 1.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self.decay = decay
        self._parameters = {name: p for name, p in named if p.requires_grad}
        self._averages = {name: _wide_copy(p) for name, p in self._parameters.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the averages by parameter name, live; DTensors where the parameters are."""
        return dict(self._averages)

    @torch.no_grad()
    def update(self, skipped: torch.Tensor) -> None:
        """Take in the parameters after an optimizer step.

        Args:
            skipped: Whether the averages stay as they are: boolean without dimensions, on the device.
        """
        share = skipped.logical_not().double() * (1.0 - self.decay)
        pairs = [(local(p), local(self._averages[name])) for name, p in self._parameters.items()]
        shares = {kind: share.to(*kind) for kind in {(a.device, a.dtype) for _, a in pairs}}
        for parameter, average in pairs:
            average.lerp_(parameter.to(average.dtype), shares[average.device, average.dtype])

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Let the model hold the averages for the time of an evaluation or an export."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            shard, average = local(parameter), local(self._averages[name])
            kept = shard.to(average.dtype, copy=True)
            shard.copy_(average)
            average.copy_(kept)


def _wide_copy(parameter: torch.Tensor) -> torch.Tensor:
    shard = local(parameter).detach()
    dtype = torch.float64 if shard.dtype == torch.float64 else torch.float32
    return sharded_like(shard.to(dtype, copy=True), parameter)


@dataclass(frozen=True, slots=True)
class RunParts:
    """What surrounds the training loop of a rank."""

    events: EventLog
    stop: SignalFlag
    checkpointer: RunCheckpointer
    meter: Meter


@dataclass(slots=True)
class Assembled:
    """Everything the loop steps with.

    Attributes:
        model: Sharded and materialised.
        stepper: Takes optimizer steps.
        optimizer: Over the trainable parameters.
        scaler: For fp16, else None.
        ema: Sharded average, or None.
        objective: The task, for evaluation.
        rate: Learning rate before the schedule.
        proof: What was proven about the sharding (``summary.json``).
        notes: What a person should know about the origin of the weights, a sentence each.
    """

    model: nn.Module
    stepper: Stepper
    optimizer: ShardedOptimizer
    scaler: LossScaler | None
    ema: EmaWeights | None
    objective: Objective
    rate: float
    proof: dict[str, Any]
    notes: tuple[str, ...]


@dataclass(slots=True)
class RunState:
    """Model, optimizer, data position and counters of a run (``evaluated``: after which step last).

    Frozen parameters are not part of it: they are what they were, and a LoRA checkpoint of a 70 B
    base would otherwise weigh 140 GB. ``materialize`` makes them again from the same origin.
    """

    model: nn.Module
    optimizer: ShardedOptimizer
    batches: Loader
    seed: int
    rank: int
    scaler: LossScaler | None = None
    ema: EmaWeights | None = None
    step: int = 0
    tokens: int = 0
    skipped: int = 0
    evaluated: int = 0

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return ``model/<fqn>``, ``optimizer/<fqn>/<state>`` and ``ema/<fqn>``, live.

        Optimizer states are made if no step has been taken.
        """
        named = dict(self.model.named_parameters())
        tensors = {f"model/{n}": p.detach() for n, p in named.items() if p.requires_grad}
        tensors |= {f"model/{name}": buffer for name, buffer in persistent_buffers(self.model).items()}
        states = self.optimizer.state_tensors()
        tensors |= {f"optimizer/{name}": tensor for name, tensor in states.items()}
        if self.ema is not None:
            tensors |= {f"ema/{name}": tensor for name, tensor in self.ema.tensors().items()}
        return tensors

    def progress(self) -> dict[str, Any]:
        """Return the counters, the data position and the scaler's state; equal on all ranks."""
        return {
            "step": self.step,
            "epoch": self.batches.epoch,
            "samples": self.batches.samples,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "evaluated": self.evaluated,
            "data": self.batches.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def rank_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's random generators' states, and optimizer states no other rank could use."""
        tensors = {"rng_cpu": torch.get_rng_state(), **self.optimizer.own_tensors()}
        if _computes_on_cuda():
            tensors["rng_cuda"] = torch.cuda.get_rng_state()
        return tensors

    def restore(self, progress: Mapping[str, Any], rank_tensors: Mapping[str, torch.Tensor] | None) -> None:
        """Continue from a checkpoint whose tensors are loaded already.

        Raises:
            ConfigError: The optimizer's states cannot be used on this number of ranks.
        """
        self.optimizer.restore_own(rank_tensors)
        self.step = int(progress["step"])
        self.tokens = int(progress["tokens"])
        self.skipped = int(progress.get("skipped", 0))
        self.evaluated = int(progress.get("evaluated", 0))
        self.batches.load_state_dict(progress["data"])
        if self.scaler is not None and progress.get("scaler"):
            self.scaler.load_state_dict(progress["scaler"])
        # Seeds the generators of all devices: of the GPU, too, where the checkpoint is a CPU run's.
        torch.manual_seed(derive_seed(self.seed, "resume", self.step, self.rank))
        if rank_tensors is None:
            return
        torch.set_rng_state(rank_tensors["rng_cpu"].cpu())
        if "rng_cuda" in rank_tensors and _computes_on_cuda():
            torch.cuda.set_rng_state(rank_tensors["rng_cuda"].cpu())


def _computes_on_cuda() -> bool:
    """Say whether this process uses a GPU: a run on the CPU of a machine with GPUs does not."""
    # is_initialized is not annotated in torch 2.13.
    initialised: Any = torch.cuda.is_initialized
    return bool(initialised())


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that belong to a state dict, by name, each tensor once."""
    buffers: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            buffers[f"{path}.{name}" if path else name] = buffer
    return buffers


_ROLLBACKS = 3
"""Rolling back to one checkpoint this often without passing it means that it does not help."""


class NonFinitePolicy:
    """Decides about steps whose loss or gradients are not finite (``on_nonfinite``).

    Every rank decides from the same reduced numbers.

    Args:
        policy: ``stop``, ``skip`` or ``rollback``.
        state: The run.
        parts: Events and checkpointer.
        session: This rank.
    """

    def __init__(self, policy: str, state: RunState, parts: RunParts, session: Session) -> None:
        self._policy = policy
        self._state = state
        self._parts = parts
        self._session = session
        self._rollbacks: dict[int, int] = {}

    def counts(self, outcome: StepResult, position: Mapping[str, Any]) -> bool:
        """Return whether a non-finite step counts as a step; a rollback happens here.

        An fp16 overflow with a finite loss is the scaler's business and always skipped.

        Args:
            outcome: Of the step.
            position: Of the data after the step, from which a rollback goes on.

        Raises:
            WorkerError: The policy is ``stop``, or rolling back does not help.
        """
        step = self._state.step + 1
        if self._state.scaler is not None and math.isfinite(outcome.loss):
            self._state.skipped += 1
            return True
        what = "loss" if not math.isfinite(outcome.loss) else "gradient norm"
        if self._session.is_main:
            self._parts.events.emit("nonfinite", step=step, what=what, policy=self._policy)
        if self._policy == "skip":
            self._state.skipped += 1
            return True
        if self._policy == "rollback":
            self._roll_back(step, position)
            return False
        raise WorkerError(
            f"step {step}: the {what} is not finite",
            help="lower the learning rate, or set on_nonfinite to skip or rollback",
        )

    def _roll_back(self, step: int, position: Mapping[str, Any]) -> None:
        """Return to the newest checkpoint and go on with the data that follows the bad batch."""
        watchdog.enter(WorkerPhase.RESTORING)
        restored = self._parts.checkpointer.rollback(self._state)
        if self._session.dims.tp > 1:
            agree(self._session.tensor)
        times = self._rollbacks.get(step, 0) + 1
        self._rollbacks[step] = times
        if restored is None or times > _ROLLBACKS:
            why = "there is no checkpoint" if restored is None else f"{_ROLLBACKS} rollbacks did not help"
            raise WorkerError(f"step {step} is not finite and {why}", help="lower the learning rate")
        self._state.batches.load_state_dict(position)
