"""``trace``: run the real forward, loss and backward on fake tensors and write down what happens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdptool.memory.borders import Borders
from fsdptool.memory.fakes import fake_batch, materialise, tensors_of
from fsdptool.memory.recorder import Recorder
from fsdptool.records.trace import Profile, Trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fsdptool.families.protocol import Objective, TensorSpec


def run_trace(
    model: nn.Module,
    objective: Objective,
    specs: Sequence[TensorSpec],
    *,
    compute_dtype: torch.dtype | None,
    output_dtype: torch.dtype | None = None,
    profile: Profile = "cuda",
    fine: bool = True,
) -> Trace:
    """Trace one micro-batch of a model that was built on meta; the model is consumed.

    Args:
        model: On meta, as it will be trained (adapters injected, blocks checkpointed).
        objective: What ``train`` runs.
        specs: The micro-batch.
        compute_dtype: ``param_dtype`` of the sharding, or None for the tensors' own.
        output_dtype: ``output_dtype`` of the sharding.
        profile: Whose kernels to assume.
        fine: Whether to mark borders inside blocks, too.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fsdptool.memory.kernels import kernels_of

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    materialise(model, mode, compute_dtype)
    batch: dict[str, Any] = dict(fake_batch(specs, mode, compute_dtype))
    names = {id(p): fqn for fqn, p in model.named_parameters()}
    recorder = Recorder([*model.parameters(), *model.buffers()])
    borders = Borders(recorder, cast=compute_dtype, output=output_dtype)
    borders.attach(model, fine=fine)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(
                lambda p: recorder.gradient(names[id(p)], p.grad) if p.grad is not None else None
            )
    with ExitStack() as stack:
        stack.enter_context(kernels_of(profile, compute_dtype))
        stack.enter_context(mode)
        stack.enter_context(recorder)
        recorder.adopt(tensors_of(batch), "input", "batch")
        recorder.phase("activation")
        prediction = objective.predict(model, batch)
        _name_outputs(recorder, prediction)
        recorder.mark("loss", "")
        recorder.phase("loss")
        loss = objective.loss(prediction, batch) * 1.0
        del prediction
        recorder.mark("backward", "")
        recorder.phase("temporary")
        borders.in_backward = True
        loss.backward()
        del loss
        recorder.mark("end", "")
        recorder.release_gradients()
        batch.clear()
    trace = recorder.trace(
        profile=profile,
        compute_dtype=str(compute_dtype or _widest(model)).removeprefix("torch."),
        samples=specs[0].shape[0] if specs else 1,
        torch=torch.__version__.split("+")[0],
        model=type(model).__name__,
    )
    recorder.detach()
    return trace


def _name_outputs(recorder: Recorder, prediction: Mapping[str, Any]) -> None:
    for value in prediction.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            recorder.relabel(value, "output")


def _widest(model: nn.Module) -> torch.dtype:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return max(dtypes or {torch.float32}, key=lambda dtype: dtype.itemsize)
