"""One optimizer step: accumulation, global normalisation, clipping, the scaler, non-finite values.

A step is launched and later settled. Launching never waits for the device: what the update depends on (the
norm, whether all numbers are finite) stays there, and what the host must know (stops, unused parameters) is
agreed on the CPU. Settling waits for the step's own numbers, by when the next step may run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from fsdptool.distributed.collective_order import CollectiveOrder
from fsdptool.distributed.shard import grads_by_dtype, local
from fsdptool.families.objectives.context import share
from fsdptool.families.objectives.packed_attention import with_documents
from fsdptool.modeling.objective import GradientSync, MicroLoss, gradient_syncs, run_micro_batch
from fsdptool.modeling.tensor_parallel import by_name
from fsdptool.records.run import RunPhase

if TYPE_CHECKING:
    from torch import Tensor

    from fsdptool.distributed.session import Session
    from fsdptool.records.tensor_plan import Placement
    from fsdptool.runs.signals import SignalFlag
    from fsdptool.training.optimizers.sharded import ShardedOptimizer


@dataclass(slots=True)
class LossScaler:
    """Dynamic loss scale for fp16: doubles after ``interval`` good steps, halves on overflow.

    The overflow verdict comes from the global gradient norm, which every rank computes from the
    same reduction, so ranks cannot disagree; ``torch.amp.GradScaler`` would ask each rank about its
    own shards. Constants are those of ``torch.amp.GradScaler`` (torch 2.13).
    """

    scale: float = 65536.0
    interval: int = 2000
    good_steps: int = 0

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step."""
        if overflow:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the count of good steps, as plain data."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with a saved scale."""
        self.scale, self.good_steps = float(state["scale"]), int(state["good_steps"])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step came to, equal on all ranks.

    Attributes:
        loss: Summed loss over global weight.
        grad_norm: Global 2-norm of the gradients before clipping.
        weight: Global number of items (valid tokens, samples).
        finite: Whether loss and gradients were; parameters only change if so.
        stop: Signal number some rank was asked to stop with, or 0.
        metrics: The objective's summed extras over the global weight (vectors as lists).
    """

    loss: float
    grad_norm: float
    weight: int
    finite: bool
    stop: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that the device may still compute.

    Attributes:
        stop: Signal number some rank was asked to stop with, or 0.
        skipped: Whether the parameters stay as they were, a boolean on the device.
        scale: Loss scale that its gradients contain.
        shapes: Of the objective's metrics, in the order of their values.
        numbers: Squares of the gradients, loss, metrics and weight, summed over ranks: fp64, page-locked.
        copied: Passed once ``numbers`` are there; None on the CPU, where they are.
    """

    stop: int
    skipped: Tensor
    scale: float
    shapes: Mapping[str, torch.Size]
    numbers: Tensor
    copied: torch.Event | None


class Stepper:
    """Runs optimizer steps on a sharded model.

    Losses are sums; FSDP sums gradients over ranks (``shard.shard``), so dividing each loss by the
    global weight makes the step independent of the number of ranks and of how tokens fall on them.

    Args:
        model: Sharded.
        micro_loss: The method's loss of a micro-batch.
        optimizer: Over ``model``'s trainable parameters.
        session: This rank.
        clip: Largest global gradient norm, or None.
        unsharded: Hold gradients unsharded between micro-batches instead of reducing each time.
        scaler: For fp16, else None.
        placements: Where each parameter lies on a tensor-parallel group; empty without one.
        order: Of the collectives of ``model`` and of whatever ``micro_loss`` runs.

    Attributes:
        moment: Entered around each forward, each backward and the update, with its name; what measures
            memory puts itself here.
    """

    moment: Callable[[RunPhase], AbstractContextManager[None]]

    def __init__(
        self,
        model: nn.Module,
        micro_loss: MicroLoss,
        optimizer: ShardedOptimizer,
        session: Session,
        *,
        clip: float | None = None,
        unsharded: bool = False,
        scaler: LossScaler | None = None,
        placements: Sequence[Placement] = (),
        order: CollectiveOrder | None = None,
    ) -> None:
        self.model = model
        self.order = order or CollectiveOrder([model], session)
        self.micro_loss = micro_loss
        self.optimizer = optimizer
        self.session = session
        self.clip = clip
        self.unsharded = unsharded
        self.scaler = scaler
        self.moment = lambda _name: nullcontext()
        self._trained = _trained(model, by_name(placements))

    def run(self, micro_batches: Sequence[Mapping[str, Tensor]], *, rate: float, stop: int = 0) -> StepResult:
        """Take one step and wait for what it came to; arguments as for :meth:`launch`."""
        return self.settle(self.launch(micro_batches, rate=rate, stop=stop))

    def launch(
        self, micro_batches: Sequence[Mapping[str, Tensor]], *, rate: float, stop: int = 0
    ) -> Launched:
        """Launch one step, without waiting for the device. Collective.

        Parameters stay as they are if the loss or a gradient turns out not to be finite.

        Args:
            micro_batches: This rank's share, on the CPU or on the device; equally many on every rank.
            rate: Learning rate of this step.
            stop: Signal number this rank was asked to stop with, or 0.
        """
        device = self.session.device
        batches = [share(to_device(batch, device)) for batch in micro_batches]
        weight = self._global_weight(batches)
        divisor = weight.clamp(min=1.0)
        scale = self.scaler.scale if self.scaler is not None else 1.0
        total = torch.zeros((), dtype=torch.float64, device=device)
        sums: dict[str, Tensor] = {}
        syncs = gradient_syncs(len(batches), unsharded=self.unsharded)
        for index, (batch, sync) in enumerate(zip(batches, syncs, strict=True)):
            self._announce(sync)
            with self.order.micro_batch(sync, index):
                loss, extra = run_micro_batch(
                    self.model, self.micro_loss, batch, scale=scale, divisor=divisor, moment=self.moment
                )
            total += loss
            for name, value in extra.items():
                sums[name] = sums[name] + value if name in sums else value.detach()
        with self.moment(RunPhase.OPTIMIZER):
            used = self._used()
            answer = self.session.begin_most(stop, not all(used))
            self._reduce_gradients()
            message = self._sum(total, sums)
            agreed, unused = answer()
            if unused:
                self._forget_unused(used)
            skipped = (message[0] + message[1]).isfinite().logical_not()
            self.optimizer.step(rate, factor=self._factor(message[0], scale), skip=skipped)
            self.optimizer.zero_grad()
        host, copied = _begin_copy(torch.cat([message, weight.reshape(1)]))
        shapes = {name: value.shape for name, value in sums.items()}
        return Launched(agreed, skipped, scale, shapes, host, copied)

    def settle(self, launched: Launched) -> StepResult:
        """Return what a step came to: the only place of a step where the host waits for the device."""
        if launched.copied is not None:
            launched.copied.synchronize()
        numbers, at = launched.numbers, 2
        squares, loss, weight = (float(numbers[place]) for place in (0, 1, -1))
        items = max(weight, 1.0)
        metrics = {}
        for name, shape in launched.shapes.items():
            metrics[name] = per_item(numbers[at : at + shape.numel()].view(shape), items)
            at += shape.numel()
        norm = math.sqrt(squares) / launched.scale
        finite = math.isfinite(squares) and math.isfinite(loss)
        if self.scaler is not None:
            self.scaler.update(overflow=not finite)
        return StepResult(loss / items, norm, int(weight), finite, launched.stop, metrics)

    def _global_weight(self, batches: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the number of items over all ranks and micro-batches."""
        counts = [self.micro_loss.objective.weight(batch) for batch in batches]
        weight = torch.stack([count.to(self.session.device, torch.float64) for count in counts]).sum()
        # Ranks of a tensor-parallel group count the same items. Rounded: a third of a count is not exact.
        return self.session.sum(weight / self.session.dims.tp).round()

    def _announce(self, sync: GradientSync) -> None:
        model = self.model
        assert isinstance(model, FSDPModule)
        model.set_is_last_backward(sync.last)
        if self.unsharded:
            model.set_requires_gradient_sync(sync.reduce)
        elif self.session.dims.dp_replicate > 1:
            # HSDP keeps its partial sums between micro-batches and all-reduces once.
            model.set_requires_all_reduce(sync.last)

    def _used(self) -> list[bool]:
        """Say of each trained parameter whether this rank computed a gradient of it in this step."""
        if self.session.world_size == 1:
            return []
        own = self.order.used
        used = [id(p) in own if isinstance(p, DTensor) else p.grad is not None for p in self._trained.all]
        own.clear()
        return used

    def _forget_unused(self, used: Sequence[bool]) -> None:
        """Take the zeros away from parameters that no rank used: the optimizer leaves them alone, as on one
        rank, without decay and without a count of the step."""
        for parameter, anywhere in zip(self._trained.all, self.session.begin_most(*used)(), strict=True):
            if not anywhere:
                parameter.grad = None

    def _reduce_gradients(self) -> None:
        """Sum what FSDP leaves to the step: gradients of parameters that are whole on ranks with other data,
        or whole inside divided layers."""
        session, trained = self.session, self._trained
        if session.world_size == 1:
            return
        replicated = [*trained.replicated_divided, *trained.replicated_whole]
        for parameter in (*replicated, *trained.replicated_partial):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        _sum_gradients(trained.sharded_partial, session.tensor.process_group)
        _sum_gradients(replicated, session.data_group)
        _sum_gradients(trained.replicated_partial, None)

    def _sum(self, total: Tensor, sums: Mapping[str, Tensor]) -> Tensor:
        """Sum squares of gradients, loss and metrics over all ranks in one message; [2 + metrics], fp64."""
        dims, world, device = self.session.dims, self.session.world_size, self.session.device
        # Each gradient counts once, however many ranks hold it.
        trained = self._trained
        squares = (
            _squares(trained.sharded_divided, device) / dims.dp_replicate
            + _squares((*trained.sharded_whole, *trained.sharded_partial), device)
            / (dims.dp_replicate * dims.tp)
            + _squares(trained.replicated_divided, device) / (world // dims.tp)
            + _squares((*trained.replicated_whole, *trained.replicated_partial), device) / world
        )
        tail = [value.to(device, torch.float64).reshape(-1) / dims.tp for value in sums.values()]
        return self.session.sum(torch.cat([torch.stack([squares, total / dims.tp]), *tail]))

    def _factor(self, squares: Tensor, scale: float) -> Tensor | None:
        """Return what gradients are multiplied by, fp64 on the device; None leaves them as they are."""
        if self.clip is None:
            return None if scale == 1.0 else torch.full_like(squares, 1.0 / scale)
        # The same guard as torch.nn.utils.clip_grad_norm_ (2.13).
        return (self.clip / (squares.sqrt() / scale + 1e-6)).clamp(max=1.0) / scale


@dataclass(frozen=True, slots=True)
class _Trained:
    """The trained parameters by who holds them and whose gradients are theirs.

    ``sharded`` ones are FSDP's; ``replicated`` ones are whole on all ranks with other data. Of a
    tensor-parallel group each rank holds a part of a *divided* one, all hold a *whole* one with equal
    gradients, and the gradients of a *partial* one add up.
    """

    sharded_divided: list[nn.Parameter] = field(default_factory=list)
    sharded_whole: list[nn.Parameter] = field(default_factory=list)
    sharded_partial: list[nn.Parameter] = field(default_factory=list)
    replicated_divided: list[nn.Parameter] = field(default_factory=list)
    replicated_whole: list[nn.Parameter] = field(default_factory=list)
    replicated_partial: list[nn.Parameter] = field(default_factory=list)

    @property
    def all(self) -> list[nn.Parameter]:
        return [parameter for name in self.__slots__ for parameter in getattr(self, name)]


def _trained(model: nn.Module, placements: Mapping[str, Placement]) -> _Trained:
    trained = _Trained()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        placement = placements.get(name)
        if placement is None or (placement.dim is None and not placement.partial_gradient):
            kind = "whole"
        else:
            kind = "partial" if placement.dim is None else "divided"
        held = "sharded" if isinstance(parameter, DTensor) else "replicated"
        getattr(trained, f"{held}_{kind}").append(parameter)
    return trained


def _sum_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Sum gradients over a group (None: all ranks), in one message per dtype; 16 bits are summed in fp32."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(local(parameter.grad))
    for dtype, grads in by_dtype.items():
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        flat = torch.cat([grad.reshape(-1).to(wide) for grad in grads])
        dist.all_reduce(flat, group=group)
        for grad, part in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
            grad.copy_(part.view_as(grad))


class StopAgreement:
    """Agrees between steps whether some rank was asked to stop; a step asks in its own message.

    Attributes:
        signal: The signal number all ranks agreed to stop with, or 0.
    """

    def __init__(self, session: Session, flag: SignalFlag) -> None:
        self._session = session
        self._flag = flag
        self.signal = 0

    def agree(self) -> int:
        """Return the signal that some rank was asked to stop with, or 0. Collective."""
        self.signal = self._session.most(self._flag.requested)
        return self.signal


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return ``batch`` on ``device``; pinned memory is copied without waiting.

    What a GPU's attention needs to know of packed documents is computed before.
    """
    batch = with_documents(batch, device)
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def per_item(value: Tensor, items: float) -> Any:
    """Scalars become means per item; vectors (expert load) stay sums, as lists."""
    return float(value) / items if value.dim() == 0 else value.tolist()


def _begin_copy(values: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Begin to copy values to the host; returns the copy, and what is passed once it is complete."""
    if values.device.type == "cpu":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    # Not torch.cuda.Event: it waits in a Python frame of torch, and the watchdog would blame this rank.
    copied = torch.Event(values.device.type)
    copied.record()
    return host, copied


def _squares(parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
    """Return the sum of squares of this rank's gradients, fp64, on ``device``."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for grads in grads_by_dtype(parameters).values():
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=_norm_dtype(grads[0].dtype)))
        total = total + norms.double().square().sum().to(device)
    return total


def _norm_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
