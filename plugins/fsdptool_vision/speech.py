"""Speech: Whisper and wav2vec 2.0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.bases import TransformersFamily
from fsdptool.families.bases.batches import length
from fsdptool.families.objectives import ModuleLoss, Seq2Seq
from fsdptool.families.objectives.common import inputs, require
from fsdptool.families.objectives.features import SquaredDistance
from fsdptool.families.protocol import Objective, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe


class Whisper(TransformersFamily):
    """Thirty seconds of log-mel frames to text."""

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return mel frames (two per encoder position) and labels; text alone for the decoder's class."""
        if (recipe.objective.name or self.objective_for(config)) != Seq2Seq.name:
            return super().batch_spec(config, recipe)
        configuration = self.config_object(config, self.model_class(config))
        batch = recipe.batch.micro_batch
        frames = (batch, configuration.num_mel_bins, 2 * configuration.max_source_positions)
        count = min(length(configuration, recipe), configuration.max_target_positions)
        return (
            TensorSpec("input_features", frames, "float32", "normal", compute=True),
            TensorSpec("labels", (batch, count), "int64", "labels", high=configuration.vocab_size),
        )


SAMPLES = 64_000
"""Audio samples when the recipe names no length: four seconds at 16 kHz."""


class Wav2Vec2(TransformersFamily):
    """Self-supervised pre-training on raw audio."""

    def batch_spec(self, config: Mapping[str, Any], recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return audio, the frames to mask (the first half here) and negatives of the same sample.

        Raises:
            ConfigError: The audio is shorter than one masked frame.
        """
        if "inputs" in recipe.objective.options:
            return super().batch_spec(config, recipe)
        configuration = self.config_object(config, self.model_class(config))
        batch, count = recipe.batch.micro_batch, recipe.batch.sequence_length or SAMPLES
        frames = count
        for kernel, stride in zip(configuration.conv_kernel, configuration.conv_stride, strict=True):
            frames = (frames - kernel) // stride + 1
        if frames < 2:
            raise ConfigError(
                f"batch.sequence_length is {count} audio samples, which is too short for two frames",
                help="one frame is about 400 samples",
            )
        return (
            TensorSpec("input_values", (batch, count), "float32", "normal", compute=True),
            TensorSpec("mask_time_indices", (batch, frames), "bool", "constant", values=(1,) * (frames // 2)),
            TensorSpec(
                "sampled_negative_indices",
                (batch, frames, configuration.num_negatives),
                "int64",
                "tokens",
                high=frames,
            ),
        )

    def objectives(self) -> Mapping[str, Callable[..., Objective]]:
        """Return the contrastive task, and the loss that the class computes."""
        return {SpeechContrastive.name: SpeechContrastive, ModuleLoss.name: ModuleLoss}


class SpeechContrastive(SquaredDistance):
    """wav2vec 2.0's contrastive and diversity loss (Baevski et al. 2020, equations 2 to 4).

    Negatives index frames of the batch's first sample onwards, so ``sampled_negative_indices`` are
    made per sample and offset here. The quantiser samples (Gumbel), so the loss depends on the
    device's random generator, too.
    """

    name = "speech_contrastive"
    unit = "frames"

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of masked frames."""
        return require(batch, "mask_time_indices", self.name).sum()

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the projected states and the model's own summed loss."""
        import torch

        arguments = inputs(batch)
        negatives = arguments["sampled_negative_indices"]
        offsets = torch.arange(negatives.shape[0], device=negatives.device) * negatives.shape[1]
        arguments["sampled_negative_indices"] = negatives + offsets[:, None, None]
        outputs = model(**arguments)
        return {"prediction": outputs.projected_states, "loss": outputs.loss}

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the loss summed over masked frames."""
        return prediction["loss"].float()

    def distance(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        temperature: float,
    ) -> Tensor:
        """Return the squared error of the projected states; the temperature does not apply."""
        frames = batch["mask_time_indices"].shape[1]
        return super().distance(student, teacher, batch, temperature) * frames
