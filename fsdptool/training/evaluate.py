"""Validation during training, under any reshard setting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdptool.distributed.shard import reshard_all
from fsdptool.families.objectives.context import share
from fsdptool.training.step import per_item, to_device

if TYPE_CHECKING:
    from torch import Tensor

    from fsdptool.distributed.session import Session
    from fsdptool.families.protocol import Objective


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
            for micro_batches in data:
                for batch in micro_batches:
                    moved = share(to_device(batch, session.device))
                    _measure(model, objective, moved, total, sums)
    finally:
        reshard_all(model)
        model.train(was_training)
    message = torch.cat([total, *(value.double().reshape(-1) for value in sums.values())])
    found = session.sum(message).cpu()
    items = max(float(found[1]), 1.0)
    metrics, at = {}, 2
    for name, value in sums.items():
        metrics[name] = per_item(found[at : at + value.numel()].view(value.shape), items)
        at += value.numel()
    loss = float(found[0]) / items if found[1] else math.nan
    return Evaluated(loss, int(found[1]), metrics)


def _measure(
    model: nn.Module,
    objective: Objective,
    batch: Mapping[str, Tensor],
    total: Tensor,
    sums: dict[str, Tensor],
) -> None:
    """Add one micro-batch; its prediction dies here, before the next one's forward."""
    prediction = objective.predict(model, batch)
    total[0] += objective.loss(prediction, batch)
    total[1] += objective.weight(batch)
    for name, value in objective.metrics(prediction, batch).items():
        sums[name] = sums[name] + value if name in sums else value.clone()
