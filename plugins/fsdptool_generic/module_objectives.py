"""Losses of modules of your own: the module's, or the library's over the tensor that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ModelError
from fsdptool.families.objectives.common import unwrapped
from fsdptool.families.objectives.features import Classification, Compute, ModuleLoss, call, first_tensor
from fsdptool.families.objectives.language import CausalLM
from fsdptool.families.protocol import Objective

if TYPE_CHECKING:
    from torch import Tensor, nn


class ModuleCausalLM(CausalLM):
    """Next-token prediction by a module that returns logits. Batch: ``input_ids`` and ``labels`` [B, S]."""

    def __init__(
        self,
        chunk: int = 1024,
        inputs: Mapping[str, Any] | None = None,
        *,
        compute: Compute | None = lambda: None,
    ) -> None:
        super().__init__(chunk)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the logits."""
        return {"prediction": _logits(model, batch)}


class ModuleClassification(Classification):
    """One label per sample, by a module that returns logits. Batch: its inputs and ``labels`` [B]."""

    def __init__(
        self, inputs: Mapping[str, Any] | None = None, *, compute: Compute | None = lambda: None
    ) -> None:
        self.inputs = inputs

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the logits."""
        return {"prediction": _logits(model, batch)}


def _logits(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    logits = first_tensor(call(model, {name: batch[name] for name in batch if name != "labels"}))
    if logits is None:
        raise ModelError(f"{type(unwrapped(model)).__name__} returns no tensor of logits")
    return logits  # type: ignore[no-any-return]


OBJECTIVES: Mapping[str, Callable[..., Objective]] = {
    objective.name: objective for objective in (ModuleLoss, ModuleCausalLM, ModuleClassification)
}
