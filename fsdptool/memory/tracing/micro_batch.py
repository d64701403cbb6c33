"""Runs the real forward, loss and backward on fake tensors and writes down what happens.

The order of operations is the trainer's own: ``training/step.py`` (one micro-batch) and
``modeling/methods/losses.py`` (the method's loss).
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdptool.families.objectives.context import Context, share, using
from fsdptool.memory.tracing.fake_tensors import Conditions, fake_batch, materialise
from fsdptool.memory.tracing.known_values import KnownValues
from fsdptool.memory.tracing.module_hooks import Borders
from fsdptool.memory.tracing.recorder import Recorder
from fsdptool.records.trace import Trace

if TYPE_CHECKING:
    from fsdptool.families.protocol import Objective, TensorSpec


def run_trace(
    model: nn.Module,
    objective: Objective,
    specs: Sequence[TensorSpec],
    conditions: Conditions,
    *,
    fine: bool = True,
    values: bool = False,
) -> Trace:
    """Trace one micro-batch of a model that was built on meta; the model is consumed.

    Args:
        model: On meta, as it will be trained (adapters injected, blocks checkpointed).
        objective: What ``train`` runs.
        specs: The micro-batch.
        conditions: Precision, kernels, method.
        fine: Whether to mark borders inside blocks, too.
        values: Whether to follow the values that the specs fix, for models that decide shapes by them.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fsdptool.memory.tracing.kernels import kernels_of, offloading

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    materialise(model, mode, conditions)
    # Samples are generated from whole sequences.
    split = conditions.sharing > 1 and conditions.beside != "sampling"
    context = (
        Context(conditions.sharing, 0, staged=conditions.staged, ring=conditions.ring) if split else None
    )
    with mode, using(context):
        batch: dict[str, Any] = dict(share(fake_batch(specs, mode)))
    recorder = Recorder([*model.parameters(), *model.buffers(), *batch.values()])
    borders = Borders(recorder, conditions)
    borders.attach(model, fine=fine)
    _watch_gradients(model, recorder)
    # A collection in the middle would free cycles at a point no real run shares.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with ExitStack() as stack:
            stack.enter_context(kernels_of(conditions.profile))
            if conditions.profile == "cuda":
                stack.enter_context(offloading(recorder))
            stack.enter_context(using(context))
            stack.enter_context(mode)
            if values:
                stack.enter_context(KnownValues(batch, specs))
            stack.enter_context(recorder)
            if conditions.teacher:
                _forward(model, objective, batch, recorder)
            elif conditions.beside is not None:
                _beside(model, objective, batch, recorder, loss=conditions.beside == "evaluation")
            else:
                _step(model, objective, batch, recorder, borders, conditions)
    finally:
        if collecting:
            gc.enable()
    made = recorder.trace(
        profile=conditions.profile,
        compute_dtype=str(conditions.compute or _widest(model)).removeprefix("torch."),
        input_bytes=tuple(tensor.untyped_storage().nbytes() for tensor in batch.values()),
        torch=torch.__version__.split("+")[0],
    )
    recorder.detach()
    return made


def _forward(model: nn.Module, objective: Objective, batch: dict[str, Any], recorder: Recorder) -> None:
    recorder.phase("teacher")
    with torch.no_grad():
        wanted = {name: value.detach() for name, value in objective.predict(model, batch).items()}
    recorder.mark("end", "")
    recorder.keep(wanted.values(), "teacher")


def _beside(
    model: nn.Module, objective: Objective, batch: dict[str, Any], recorder: Recorder, *, loss: bool
) -> None:
    """Predict, and measure the loss as ``training/evaluate.py`` does; everything dies at the end."""
    recorder.phase("temporary")
    with torch.no_grad():
        prediction = objective.predict(model, batch)
        _name_outputs(recorder, prediction)
        if loss:
            recorder.mark("loss", "")
            recorder.phase("loss")
            found = objective.loss(prediction, batch), objective.metrics(prediction, batch)
            del found
        del prediction
    recorder.mark("end", "")


def _step(
    model: nn.Module,
    objective: Objective,
    batch: dict[str, Any],
    recorder: Recorder,
    borders: Borders,
    conditions: Conditions,
) -> None:
    recorder.phase("activation")
    loss = _loss(model, objective, batch, recorder, conditions)
    recorder.mark("backward", "")
    weight = torch.ones((), dtype=torch.float64)
    scaled = loss * (1.0 / weight)
    recorder.phase("temporary")
    borders.in_backward = True
    # Without grad mode, as the engine itself runs: what has it is recomputed.
    with torch.no_grad():
        scaled.backward()  # type: ignore[no-untyped-call]
    del scaled
    recorder.mark("end", "")
    recorder.release_gradients()


def _loss(
    model: nn.Module,
    objective: Objective,
    batch: dict[str, Any],
    recorder: Recorder,
    conditions: Conditions,
) -> torch.Tensor:
    """Return the micro-batch's loss; the prediction dies with this frame, as in ``Task`` and ``Student``."""
    prediction = objective.predict(model, batch)
    _name_outputs(recorder, prediction)
    recorder.mark("loss", "")
    recorder.phase("loss")
    loss = objective.loss(prediction, batch)
    distillation = conditions.distillation
    if distillation is not None:
        wanted = {
            name: torch.empty_like(value) if isinstance(value, torch.Tensor) else value
            for name, value in prediction.items()
        }
        for value in wanted.values():
            if isinstance(value, torch.Tensor):
                recorder.relabel(value, "teacher")
        distance = objective.distance(prediction, wanted, batch, distillation.temperature)
        metrics = dict(objective.metrics(prediction, batch))
        del wanted, metrics
        return (1.0 - distillation.alpha) * loss + distillation.alpha * distance
    extra = objective.metrics(prediction, batch)
    del extra
    return loss


def _watch_gradients(model: nn.Module, recorder: Recorder) -> None:
    def watch(fqn: str) -> Any:
        def hook(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                recorder.gradient(fqn, parameter.grad)

        return hook

    for fqn, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(watch(fqn))  # type: ignore[no-untyped-call]


def _name_outputs(recorder: Recorder, prediction: Mapping[str, Any]) -> None:
    for value in prediction.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            recorder.relabel(value, "output")


def _widest(model: nn.Module) -> torch.dtype:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(dtypes or {torch.float32}, key=lambda dtype: dtype.itemsize)
