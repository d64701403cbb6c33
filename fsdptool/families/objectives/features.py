"""Objectives over whole samples, and the loss that a model computes itself, for any class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError, ModelError
from fsdptool.families.bases import batches
from fsdptool.families.objectives.common import IGNORED, accumulation_dtype, inputs, require, unwrapped
from fsdptool.families.protocol import Objective, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe


class Classification(Objective):
    """One label per sample, for text, images and sound. Batch: the model's inputs, ``labels`` [B].

    A head with a single output regresses the label instead (mean squared error).
    """

    name = "classification"
    unit = "samples"
    samples = "labelled"

    @classmethod
    def batch(cls, config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return a text or an image, and its class."""
        return batches.classes(config, recipe)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of samples."""
        import torch

        labels = require(batch, "labels", self.name)
        return torch.full((), labels.shape[0], device=labels.device)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the logits, [B, classes]."""
        return {"prediction": model(**inputs(batch)).logits}

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy (or squared error) summed over samples."""
        from torch.nn import functional

        logits = prediction["prediction"]
        logits = logits.to(accumulation_dtype(logits.dtype))
        labels = require(batch, "labels", self.name)
        if logits.shape[-1] == 1:
            return functional.mse_loss(logits.squeeze(-1), labels.to(logits.dtype), reduction="sum")
        return functional.cross_entropy(logits, labels, reduction="sum")

    def distance(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        temperature: float,
    ) -> Tensor:
        """Return KL(teacher || student) summed over samples, times temperature squared."""
        import torch

        from fsdptool.families.objectives.entropy import divergence

        ours = student["prediction"]
        valid = torch.ones(ours.shape[:-1], dtype=torch.bool, device=ours.device)
        return divergence(ours, teacher["prediction"], valid, temperature, 0)


_OUTPUTS = ("text_embeds", "image_embeds", "last_hidden_state", "pooler_output", "logits")


def squared_error(prediction: Tensor, target: Tensor) -> Tensor:
    """Return the squared error averaged over all but the first dimension, summed over that one."""
    wide = accumulation_dtype(prediction.dtype)
    return (prediction.to(wide) - target.to(wide)).square().flatten(1).mean(1).sum()


class SquaredDistance(Objective):
    """An objective whose predictions are distilled by squared error."""

    def distance(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        temperature: float,
    ) -> Tensor:
        """Return the squared error against the teacher's prediction; the temperature does not apply."""
        return squared_error(student["prediction"], teacher["prediction"].detach())


class Features(SquaredDistance):
    """Regression of a model's features, for encoders that have no head of their own.

    Batch: the model's inputs, ``target`` of the shape the model returns. This is feature
    distillation from stored targets; with the teacher at hand use method ``distillation``.
    """

    name = "features"
    unit = "samples"

    @classmethod
    def batch(cls, config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return the inputs, and a target of the last hidden state's shape."""
        return batches.features(config, recipe)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of samples."""
        import torch

        target = require(batch, "target", self.name)
        return torch.full((), target.shape[0], device=target.device)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the first of embeddings, last hidden state, pooled output and logits there is."""
        outputs: Any = model(**inputs(batch))
        for name in _OUTPUTS:
            output = getattr(outputs, name, None)
            if output is not None:
                return {"prediction": output}
        raise ModelError(
            f"{type(model).__name__} returns none of {', '.join(_OUTPUTS)}", help="name another objective"
        )

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the squared error, averaged within a sample and summed over samples."""
        return squared_error(prediction["prediction"], require(batch, "target", self.name))


class Reconstruction(Features):
    """Reconstruction of images by an autoencoder. Batch: ``sample`` [B, C, H, W].

    Squared error through the posterior's mode; the KL term of a VAE is not part of it.
    """

    name = "reconstruction"

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of images."""
        import torch

        sample = require(batch, "sample", self.name)
        return torch.full((), sample.shape[0], device=sample.device)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the reconstructed images."""
        return {"prediction": model(sample=require(batch, "sample", self.name), return_dict=False)[0]}

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the squared error, averaged within an image and summed over images."""
        return squared_error(prediction["prediction"], batch["sample"])


class Contrastive(Objective):
    """Images against texts within a micro-batch. Batch: ``pixel_values``, ``input_ids`` and masks.

    Negatives are those of the rank's own micro-batch: unlike every other objective, the result
    depends on how samples are divided among ranks.

    Args:
        kind: ``softmax`` (CLIP, Radford et al. 2021) or ``sigmoid`` (SigLIP, Zhai et al. 2023).
    """

    name = "contrastive"
    unit = "samples"

    def __init__(self, kind: str = "softmax") -> None:
        if kind not in ("softmax", "sigmoid"):
            raise ConfigError(f"objective contrastive: kind must be softmax or sigmoid, got {kind!r}")
        self.kind = kind

    @classmethod
    def batch(cls, config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return images with their texts."""
        return batches.pairs(config, recipe)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of image-text pairs."""
        import torch

        first = next(iter(batch.values()))
        return torch.full((), first.shape[0], device=first.device)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the scaled similarities of texts (rows) and images (columns), [B, B]."""
        return {"prediction": model(**inputs(batch)).logits_per_text}

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss summed over pairs."""
        import torch
        from torch.nn import functional

        scores = prediction["prediction"]
        scores = scores.to(accumulation_dtype(scores.dtype))
        if self.kind == "sigmoid":
            signs = 2 * torch.eye(scores.shape[0], dtype=scores.dtype, device=scores.device) - 1
            return -functional.logsigmoid(signs * scores).sum()
        pairs = torch.arange(scores.shape[0], device=scores.device)
        texts = functional.cross_entropy(scores, pairs, reduction="sum")
        return (texts + functional.cross_entropy(scores.t(), pairs, reduction="sum")) / 2

    def distance(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        temperature: float,
    ) -> Tensor:
        """Return KL(teacher || student) of each text's distribution over images, summed over texts."""
        import torch

        from fsdptool.families.objectives.entropy import divergence

        ours = student["prediction"]
        valid = torch.ones(ours.shape[0], dtype=torch.bool, device=ours.device)
        return divergence(ours, teacher["prediction"], valid, temperature, 0)


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
