"""The objective: cross-entropy with a penalty on the normaliser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fsdptool.families.protocol import Objective

if TYPE_CHECKING:
    from torch import Tensor, nn


class NextByte(Objective):
    """Next-byte prediction. Batch: ``input_ids`` and ``labels`` [batch, positions].

    Losses are sums over targets: the trainer divides by their number over all ranks.

    Args:
        penalty: Weight of the squared log-normaliser ("z-loss"), which keeps logits small.
    """

    name = "next_byte"
    unit = "tokens"

    def __init__(self, penalty: float = 1e-4) -> None:
        self.penalty = penalty

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of targets: every label but each sequence's first."""
        return (batch["labels"][:, 1:] >= 0).sum()

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the logits."""
        return {"prediction": model(batch["input_ids"])}

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return cross-entropy and penalty, summed over targets, in fp32."""
        import torch

        logits = prediction["prediction"][:, :-1].float()
        labels = batch["labels"][:, 1:]
        valid = labels >= 0
        normaliser = torch.logsumexp(logits, dim=-1)
        chosen = logits.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        return ((normaliser - chosen + self.penalty * normaliser.square()) * valid).sum()

    def distance(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        temperature: float,
    ) -> Tensor:
        """Return KL(teacher || student), summed over targets, times temperature squared."""
        from fsdptool.families.objectives.entropy import divergence

        valid = batch["labels"][:, 1:] >= 0
        ours, theirs = student["prediction"][:, :-1], teacher["prediction"][:, :-1]
        return divergence(ours, theirs, valid, temperature, chunk=1024)
