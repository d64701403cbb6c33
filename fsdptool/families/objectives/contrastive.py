"""Contrastive objective of models that embed images and texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fsdptool.errors import ConfigError
from fsdptool.families.objectives.common import accumulation_dtype, inputs
from fsdptool.families.protocol import Objective

if TYPE_CHECKING:
    from torch import Tensor, nn


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

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of image-text pairs."""
        import torch

        first = next(iter(batch.values()))
        return torch.tensor(first.shape[0], device=first.device)

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
