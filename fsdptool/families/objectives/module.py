"""The loss that a model computes itself, for any class: a module of your own, or one of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ModelError
from fsdptool.families.objectives.common import IGNORED, accumulation_dtype, inputs, unwrapped
from fsdptool.families.objectives.features import SquaredDistance, squared_error

if TYPE_CHECKING:
    from torch import Tensor, nn

Compute = Callable[[], Callable[..., Any] | None]
_LOGITS = ("logits", "prediction", "last_hidden_state", "sample")


def call(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """Call the module with those tensors of the batch that its forward takes, and without a cache."""
    taken = signature(unwrapped(model).forward).parameters
    arguments: dict[str, Any] = {name: tensor for name, tensor in batch.items() if name in taken}
    if any(item.kind is Parameter.VAR_KEYWORD for item in taken.values()):
        arguments = {**inputs(batch), **arguments}
    if "use_cache" in taken:
        arguments["use_cache"] = False
    return model(**arguments)


def first_tensor(outputs: Any) -> Any:
    """Return the tensor that a module means by its outputs, or None."""
    import torch

    if isinstance(outputs, torch.Tensor):
        return outputs
    if isinstance(outputs, tuple | list):
        return next((item for item in outputs if isinstance(item, torch.Tensor)), None)
    for name in _LOGITS:
        value = outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)
        if isinstance(value, torch.Tensor):
            return value
    others = outputs.values() if isinstance(outputs, Mapping) else ()
    return next(
        (item for item in others if isinstance(item, torch.Tensor) and item.is_floating_point()), None
    )


class ModuleLoss(SquaredDistance):
    """The module's own loss, the mean over a micro-batch.

    The first of these that exists: what ``compute_loss(outputs, batch)`` returns, ``loss`` among the
    outputs, an output that is one number, the squared error against ``target``, cross-entropy with
    ``labels``.

    Args:
        inputs: The tensors of a micro-batch (``ImportedFamily.batch_spec`` reads them).
        compute: Returns ``compute_loss``, or None.
    """

    name = "module"
    unit = "samples"

    def __init__(
        self, inputs: Mapping[str, Any] | None = None, *, compute: Compute | None = lambda: None
    ) -> None:
        self.inputs = inputs
        self.compute = compute

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of samples."""
        import torch

        first = next(iter(batch.values()))
        return torch.full((), first.shape[0], device=first.device)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the loss where the module computes it, else its output.

        Raises:
            ModelError: The module returns neither a loss nor a tensor.
        """
        outputs = call(model, self._flattened(batch))
        compute = self.compute() if self.compute is not None else None
        loss = compute(outputs, batch) if compute is not None else _own_loss(outputs)
        if loss is not None:
            return {"prediction": loss}
        tensor = first_tensor(outputs)
        if tensor is None:
            raise ModelError(
                f"{type(unwrapped(model)).__name__} returns neither a loss nor a tensor",
                help="return the loss, or define compute_loss(outputs, batch) beside the class",
            )
        return {"prediction": tensor}

    def _flattened(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the batch with the samples of tensors marked ``flat`` one after another."""
        flat = {name for name, item in (self.inputs or {}).items() if item.get("flat")}
        return {name: tensor.flatten(0, 1) if name in flat else tensor for name, tensor in batch.items()}

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the mean loss times the number of samples.

        Raises:
            ModelError: The batch has nothing to compare the output with.
        """
        from torch.nn import functional

        output = prediction["prediction"]
        output = output.to(accumulation_dtype(output.dtype))
        samples = next(iter(batch.values())).shape[0]
        if output.numel() == 1 and output.dim() <= 1:
            return output.reshape(()) * samples
        if "target" in batch:
            return squared_error(output, batch["target"])
        labels = batch.get("labels")
        if labels is None or labels.shape != output.shape[:-1]:
            raise ModelError(
                f"the module returns a tensor of shape {list(output.shape)} and no loss",
                help="return the loss, give labels or a target, or define compute_loss(outputs, batch)",
            )
        mean = functional.cross_entropy(output.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
        return mean * samples


def _own_loss(outputs: Any) -> Tensor | None:
    """Return the loss that a module computed itself, or None."""
    import torch

    named = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    found = named if named is not None else first_tensor(outputs)
    alone = isinstance(found, torch.Tensor) and found.dim() == 0
    return found if alone else None
