"""Runs the real forward, loss and backward on fake tensors and writes down what happens.

What runs is the trainer's own code: ``modeling/objective.py`` (one micro-batch of a step or of
validation) and ``modeling/methods`` (the method's loss).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdptool.families.objectives.context import Context, share, using
from fsdptool.families.objectives.fused_head import returning_logits
from fsdptool.memory.tracing.compiled_blocks import is_compiled
from fsdptool.memory.tracing.fake_tensors import (
    FollowedValues,
    KnownValues,
    MicroBatchConditions,
    fake_batch,
    materialise,
)
from fsdptool.memory.tracing.module_hooks import ModuleHooks
from fsdptool.memory.tracing.recorder import SegmentRecorder
from fsdptool.modeling.methods import predict_frozen
from fsdptool.modeling.objective import MicroLoss, add_validation_loss, run_micro_batch
from fsdptool.modeling.tensor_group import noticing
from fsdptool.records.run import RunPhase
from fsdptool.records.trace import Trace

if TYPE_CHECKING:
    from fsdptool.families.protocol import Objective, TensorSpec


def run_trace(
    model: nn.Module,
    micro_loss: MicroLoss,
    specs: Sequence[TensorSpec],
    conditions: MicroBatchConditions,
    *,
    fine: bool = True,
    values: FollowedValues = FollowedValues.NONE,
) -> Trace:
    """Trace one micro-batch of a model that was built on meta; the model is consumed.

    Args:
        model: On meta, as it will be trained (adapters injected, blocks checkpointed).
        micro_loss: The method's loss, as ``train`` computes it.
        specs: The micro-batch.
        conditions: Precision, kernels, method.
        fine: Whether to mark module boundaries inside blocks, too.
        values: Which values to follow, for models that decide shapes by them.
    """
    from fsdptool.memory.tracing.fake_mode import TracingMode
    from fsdptool.memory.tracing.kernels import kernels_of, offloading, recomputation

    mode = TracingMode()
    materialise(model, mode, conditions)
    # Samples are generated from whole sequences.
    split = conditions.sharing > 1 and conditions.off_step is not RunPhase.SAMPLING
    context = Context(conditions.sharing, 0, ring=conditions.ring) if split else None
    with mode, using(context):
        batch: dict[str, Any] = dict(share(fake_batch(specs, mode)))
    recorder = SegmentRecorder(
        [*model.parameters(), *model.buffers(), *batch.values()],
        conditions.profile,
        # A mode that follows values has to see each call.
        mode if values is FollowedValues.NONE else None,
    )
    hooks = ModuleHooks(recorder, conditions)
    compiled = [path for path, module in model.named_modules() if is_compiled(module)]
    hooks.attach(model, fine=fine, opaque=compiled)
    autocast = ExitStack()
    observer = _Observer(recorder, hooks, autocast)
    _watch_gradients(model, recorder)
    # A collection in the middle would free cycles at a point no real run shares.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with ExitStack() as stack:
            stack.enter_context(kernels_of(conditions.profile, flash=conditions.flash))
            if conditions.autocast is not None:
                stack.callback(autocast.close)
                autocast.enter_context(torch.autocast("cpu", conditions.autocast))
            if not compiled:
                # A compiled block recomputes inside its own program.
                stack.enter_context(recomputation(recorder))
            if conditions.profile == "cuda":
                stack.enter_context(offloading(recorder))
            stack.enter_context(using(context))
            stack.enter_context(noticing(recorder.exchanged))
            stack.enter_context(mode)
            if values is not FollowedValues.NONE:
                stack.enter_context(KnownValues(batch, specs, draw=values is FollowedValues.DRAWN))
            stack.enter_context(recorder)
            objective = micro_loss.objective
            if conditions.teacher:
                _predict_teacher(model, objective, batch, recorder)
            elif conditions.off_step is RunPhase.EVALUATION:
                _validate(model, objective, batch, recorder, observer)
            elif conditions.off_step is RunPhase.SAMPLING:
                _sample(model, objective, batch, recorder)
            else:
                _step(model, micro_loss, batch, recorder, observer)
    finally:
        if collecting:
            gc.enable()
    traced = recorder.trace(
        profile=conditions.profile,
        compute_dtype=str(conditions.autocast or conditions.compute or _prevailing(model)).removeprefix(
            "torch."
        ),
        input_bytes=tuple(tensor.untyped_storage().nbytes() for tensor in batch.values()),
        torch=torch.__version__.split("+")[0],
    )
    recorder.detach()
    return traced


class _Observer:
    """Marks where the trainer's own loss and backward begin, and answers for a teacher.

    Args:
        recorder: Where to mark.
        hooks: Told when backward begins.
        forward: What holds in forward and the loss alone: autocast, which then frees the casts that it kept.
    """

    def __init__(self, recorder: SegmentRecorder, hooks: ModuleHooks, forward: ExitStack) -> None:
        self._recorder = recorder
        self._hooks = hooks
        self._forward = forward

    def predicted(self, prediction: Mapping[str, Any], *, distilled: bool = False) -> Mapping[str, Any]:
        """Begin the loss; a teacher's prediction is memory as its own trace left it."""
        recorder = self._recorder
        for value in prediction.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                recorder.relabel(value, "output")
        recorder.mark("loss", "")
        recorder.phase("loss")
        if not distilled:
            return {}
        target = {name: _like(value) for name, value in prediction.items()}
        for value in target.values():
            if isinstance(value, torch.Tensor):
                recorder.relabel(value, "teacher")
        return target

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward without grad mode, as the engine itself does: what has it is recomputed."""
        self._forward.close()
        self._recorder.phase("temporary")
        self._hooks.in_backward = True
        with torch.no_grad():
            loss.backward()  # type: ignore[no-untyped-call]

    @contextmanager
    def moment(self, phase: RunPhase) -> Iterator[None]:
        """Begin a part of the step."""
        if phase is RunPhase.BACKWARD:
            self._recorder.mark("backward", "")
        yield


def _like(value: Any) -> Any:
    return torch.empty_like(value) if isinstance(value, torch.Tensor) else value


def _predict_teacher(
    model: nn.Module, objective: Objective, batch: dict[str, Any], recorder: SegmentRecorder
) -> None:
    recorder.phase("teacher")
    prediction = predict_frozen(model, objective, batch)
    recorder.mark("end", "")
    recorder.keep(prediction.values(), "teacher")


def _validate(
    model: nn.Module,
    objective: Objective,
    batch: dict[str, Any],
    recorder: SegmentRecorder,
    observer: _Observer,
) -> None:
    """Run a micro-batch of validation; everything dies at the end but the sums."""
    recorder.phase("temporary")
    total = torch.zeros(2, dtype=torch.float64)
    sums: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        add_validation_loss(model, objective, batch, total, sums, observer)
    recorder.mark("end", "")


def _sample(model: nn.Module, objective: Objective, batch: dict[str, Any], recorder: SegmentRecorder) -> None:
    """Run one forward of sampling; everything dies at the end."""
    recorder.phase("temporary")
    with torch.no_grad(), returning_logits(model):
        objective.predict(model, batch)
    recorder.mark("end", "")


def _step(
    model: nn.Module,
    micro_loss: MicroLoss,
    batch: dict[str, Any],
    recorder: SegmentRecorder,
    observer: _Observer,
) -> None:
    recorder.phase("loss")
    divisor = torch.ones((), dtype=torch.float64)
    recorder.phase("activation")
    outcome = run_micro_batch(
        model, micro_loss, batch, scale=1.0, divisor=divisor, moment=observer.moment, observer=observer
    )
    recorder.mark("end", "")
    recorder.release_gradients()
    del outcome


def _watch_gradients(model: nn.Module, recorder: SegmentRecorder) -> None:
    def watch(fqn: str) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                recorder.gradient(fqn, parameter.grad)

        return hook

    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(watch(fqn))  # type: ignore[no-untyped-call]


def _prevailing(model: nn.Module) -> torch.dtype:
    """Return the dtype of most elements: a frozen base's, not that of adapters in fp32."""
    elements: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point():
            elements[parameter.dtype] += parameter.numel()
    return elements.most_common(1)[0][0] if elements else torch.float32
