"""The oracle: torch's own ``fully_shard`` on fake tensors and a fake process group, watched.

It answers what the simulation answers, slowly and from the real code: one step of the trainer on
rank 0 of any number of ranks, without data, network or GPU. Tests and ``benchmarks/memory`` hold
the simulation against it; a torch minor version it was not run on is ``unverified``.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fsdptool.distributed.collective_order import CollectiveOrder
from fsdptool.families.objectives.packed_attention import under_masks
from fsdptool.families.protocol import Objective, TensorSpec
from fsdptool.memory.tracing.fake_tensors import fake_batch
from fsdptool.memory.tracing.gradient_sums import GradientSums
from fsdptool.memory.tracing.kernels import kernels_of, replaced
from fsdptool.memory.tracing.operators import copied_bytes
from fsdptool.modeling import activation_offload
from fsdptool.modeling.objective import GradientSync, ModelLoss, Task, gradient_syncs, run_micro_batch
from fsdptool.records.plan import OWN_LOOP, TrainingLoop
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import FsdpSettings, UnitPlan
from fsdptool.records.trace import Profile


@dataclass(slots=True)
class Observation:
    """Bytes alive on rank 0: before step 2, at its peak, and at the peak of each of its phases."""

    resting: int
    peak: int
    phases: dict[str, int] = field(default_factory=dict)


class LiveBytes(TorchDispatchMode):
    """Counts bytes of live storages; enter it above the ``FakeTensorMode`` whose tensors it counts.

    Kernels' own buffers, which fake tensors do not show, count while their operator runs.
    """

    def __init__(self, mode: Any, profile: Profile = "cuda") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._profile = profile
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.level = 0
        self.peak = 0
        self._sums = GradientSums()
        self._summed: tuple[int, int] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operator and count what it allocated."""
        if any(issubclass(kind, DTensor) for kind in types):
            # The local tensors' operators come by again, one by one.
            return NotImplemented
        before = self._sums.reusable(func, args)
        self._settle()
        out = func(*args, **(kwargs or {}))
        if before is not None:
            # What a real backward adds into has to end first; until it does, the sum is not counted.
            self._summed = (before.untyped_storage()._cdata, out.untyped_storage().nbytes())
        self.count(leaf for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor))
        self.peak = max(self.peak, self.level + copied_bytes(func, args, self._profile))
        return out

    def count(self, tensors: Any) -> None:
        """Count storages not seen before."""
        for tensor in tensors:
            # Sharding propagation makes tensors of global shape in a fake mode of its own.
            if getattr(tensor, "fake_mode", None) is not self._mode or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known:
                self._known[key] = (weakref.ref(storage, self._gone(key)), storage.nbytes())
                self._sums.made(storage)
                if self._summed is None:
                    self._change(storage.nbytes())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Follow ``resize_``, with which FSDP2 frees and fills unsharded parameters."""
        key = storage._cdata
        self._settle()
        if key in self._known:
            reference, before = self._known[key]
            self._known[key] = (reference, storage.nbytes())
            self._change(storage.nbytes() - before)

    def _gone(self, key: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            _, size = self._known.pop(key, (None, 0))
            if self._summed is not None and self._summed[0] == key:
                size -= self._summed[1]
                self._summed = None
            self._settle()
            self._change(-size)

        return gone

    def _settle(self) -> None:
        """Count a sum in full: what it was added to is still alive."""
        if self._summed is not None:
            _, size = self._summed
            self._summed = None
            self._change(size)

    def _change(self, size: int) -> None:
        self.level += size
        self.peak = max(self.peak, self.level)


@contextmanager
def _watched_resizing(counter: LiveBytes) -> Iterator[None]:
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        counter.resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


@contextmanager
def _separate_propagation() -> Iterator[None]:
    # DTensor's sharding propagation would reuse our fake mode and count tensors of global shape
    # (torch 2.13, ``torch/distributed/tensor/_sharding_prop.py``).
    from torch.distributed.tensor import _sharding_prop

    module: Any = _sharding_prop
    original = module.detect_fake_mode
    module.detect_fake_mode = lambda *_: None
    try:
        yield
    finally:
        module.detect_fake_mode = original


@contextmanager
def fake_ranks(world_size: int) -> Iterator[None]:
    """Be rank 0 of ``world_size`` ranks whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def observe(
    make: Callable[[], nn.Module],
    plan: UnitPlan,
    objective: Objective,
    specs: tuple[TensorSpec, ...],
    recipe: Recipe,
    settings: FsdpSettings,
    *,
    world_size: int,
    profile: Profile = "cuda",
    step: bool = True,
    loop: TrainingLoop = OWN_LOOP,
) -> Observation:
    """Run two steps as a training loop runs them, on rank 0, and return what step 2 held.

    Args:
        make: Builds the model on meta, adapters and checkpointing applied.
        plan: Its units.
        objective, specs: Loss and micro-batch.
        recipe: Accumulation and optimizer.
        settings: ParallelDims.
        world_size: Ranks.
        profile: Whose kernels.
        step: Whether to run the optimizer, too (slow on fake DTensors).
        loop: Whose loop it is: the trainer's own, or one that gives the model its labels.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fsdptool.distributed.session import open_session
    from fsdptool.distributed.shard import shard
    from fsdptool.training.optimizers.sharded import build_optimizer

    with fake_ranks(world_size):
        session = open_session(settings)
        model = make()
        shard(model, plan, session)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        counter = LiveBytes(mode, profile)
        _fill(model, mode, counter)
        with ExitStack() as stack:
            for context in (
                kernels_of(profile),
                _separate_propagation(),
                _watched_resizing(counter),
                mode,
                counter,
                under_masks() if loop.masked else nullcontext(),
                # What is in host memory is no memory of the device.
                replaced(activation_offload, "to_host", lambda tensor: (tensor.to("meta"), None)),
                replaced(
                    activation_offload,
                    "to_device",
                    lambda host, device: (torch.empty_like(host, device=device), None),
                ),
            ):
                stack.enter_context(context)
            collecting = gc.isenabled()
            gc.disable()
            try:
                optimizer = (
                    build_optimizer(recipe.optimizer, model.named_parameters(), rate=1e-4) if step else None
                )
                order = CollectiveOrder([model], session) if loop == OWN_LOOP else None
                if order is not None:
                    # The other ranks of a fake group say nothing: they need what rank 0 needs.
                    order._exchange = lambda wanted: [wanted] * world_size  # type: ignore[method-assign]
                runner = _Runner(
                    model, objective, specs, recipe, mode, counter, optimizer, session, loop, order
                )
                runner.step()
                if type(recipe.sharding.reshard_after_forward) is int:
                    runner.step()  # counts once the order is settled
                return runner.step()
            finally:
                if collecting:
                    gc.enable()


@dataclass(slots=True)
class _Runner:
    model: nn.Module
    objective: Objective
    specs: tuple[TensorSpec, ...]
    recipe: Recipe
    mode: Any
    counter: LiveBytes
    optimizer: Any
    session: Any
    loop: TrainingLoop
    order: CollectiveOrder | None
    ahead: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def step(self) -> Observation:
        """Take one step in the order of ``training/step.py``."""
        counter = self.counter
        count = self.recipe.batch.accumulation
        seen = Observation(counter.level, 0)
        batches = self.ahead or self._read(count)
        if self.loop.program == OWN_LOOP.program:
            self.ahead = self._read(count)  # as the loader's thread does on a GPU
        divisor = torch.ones((), dtype=torch.float64)
        unsharded = self.recipe.sharding.accumulation == "unsharded"
        syncs = gradient_syncs(count, unsharded=unsharded, marked=self.loop.marks_last)
        loss = ModelLoss if self.loop.loss_in_forward else Task
        for index, (batch, sync) in enumerate(zip(batches, syncs, strict=True)):
            self._announce(sync)
            with self.order.micro_batch(sync, index) if self.order is not None else nullcontext():
                run_micro_batch(
                    self.model,
                    loss(self.objective),
                    batch,
                    scale=1.0,
                    divisor=divisor,
                    moment=lambda name, i=index: self._moment(seen, f"{name} {i}"),  # type: ignore[misc]
                )
        counter.peak = counter.level
        if self.optimizer is not None:
            self.optimizer.step(1e-4)
            seen.phases["optimizer"] = counter.peak
        for parameter in self.model.parameters():
            parameter.grad = None
        seen.peak = max(seen.phases.values())
        return seen

    def _read(self, count: int) -> list[dict[str, torch.Tensor]]:
        batches = [dict(fake_batch(self.specs, self.mode)) for _ in range(count)]
        self.counter.count(tensor for batch in batches for tensor in batch.values())
        return batches

    @contextmanager
    def _moment(self, seen: Observation, name: str) -> Iterator[None]:
        self.counter.peak = self.counter.level
        yield
        seen.phases[name] = self.counter.peak

    def _announce(self, sync: GradientSync) -> None:
        model: Any = self.model
        if self.loop.marks_last:
            model.set_is_last_backward(sync.last)
        if self.recipe.sharding.accumulation == "unsharded":
            model.set_requires_gradient_sync(sync.reduce)
        elif self.session.dims.dp_replicate > 1:
            model.set_requires_all_reduce(sync.last)


def _fill(model: nn.Module, mode: Any, counter: LiveBytes) -> None:
    """Give every meta parameter and buffer a fake tensor, ties kept, and count it."""
    made: dict[int, Any] = {}
    kept: list[torch.Tensor] = []
    with mode:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in made:
                    made[id(parameter)] = _fake_parameter(parameter, counter)
                    kept.append(parameter)
                module._parameters[name] = made[id(parameter)]
            for name, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(buffer) not in made:
                    made[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
                    counter.count([made[id(buffer)]])
                    kept.append(buffer)
                module._buffers[name] = made[id(buffer)]


def _fake_parameter(parameter: nn.Parameter, counter: LiveBytes) -> nn.Parameter:
    from fsdptool.distributed.shard import sharded_like

    rows = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    filled = torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
    counter.count([filled])
    return nn.Parameter(sharded_like(filled, parameter), requires_grad=parameter.requires_grad)
