"""Objectives over whole samples: classification, contrastive pairs, regression of features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError, ModelError
from fsdptool.families.bases import batches
from fsdptool.families.objectives.common import accumulation_dtype, inputs, require
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
