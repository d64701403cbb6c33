"""Segment Anything: masks from an image and a point."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.families.bases import TransformersFamily
from fsdptool.families.bases.batches import pixels
from fsdptool.families.objectives import ModuleLoss
from fsdptool.families.objectives.common import accumulation_dtype, inputs, require
from fsdptool.families.objectives.features import SquaredDistance
from fsdptool.families.protocol import Objective, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe


class Sam(TransformersFamily):
    """One point prompt and one mask per image."""

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return images, a point each, and masks at a quarter of the image's size."""
        if "inputs" in recipe.objective.options:
            return super().batch_spec(config, recipe)
        configuration = self.config_object(config, self.model_class(config))
        batch = recipe.batch.micro_batch
        # The decoder upsamples the encoder's grid by 4.
        side = 4 * configuration.vision_config.image_size // configuration.vision_config.patch_size
        return (
            pixels(configuration.vision_config, batch),
            TensorSpec("input_points", (batch, 1, 1, 2), "float32", "uniform", compute=True),
            TensorSpec("target", (batch, 1, side, side), "float32", "uniform"),
        )

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return segmentation, and the loss that the class computes."""
        return {Segmentation.name: Segmentation, ModuleLoss.name: ModuleLoss}


class Segmentation(SquaredDistance):
    """Binary cross-entropy plus dice loss of one mask per prompt (Kirillov et al. 2023, with
    cross-entropy in place of focal loss). Batch: the model's inputs, ``target`` [B, prompts, H, W]."""

    name = "segmentation"
    unit = "samples"

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of images."""
        import torch

        target = require(batch, "target", self.name)
        return torch.full((), target.shape[0], device=target.device)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the mask's logits, [B, prompts, H, W]."""
        outputs = model(**inputs(batch), multimask_output=False)
        return {"prediction": outputs.pred_masks.squeeze(2)}

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return both losses, averaged within an image and summed over images."""
        from torch.nn import functional

        logits = prediction["prediction"]
        logits = logits.to(accumulation_dtype(logits.dtype)).flatten(1)
        target = require(batch, "target", self.name).to(logits.dtype).flatten(1)
        entropy = functional.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)
        shares = logits.sigmoid()
        dice = 1 - (2 * (shares * target).sum(1) + 1) / (shares.sum(1) + target.sum(1) + 1)
        return (entropy + dice).sum()
