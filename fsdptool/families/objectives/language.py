"""Objectives of text models: causal, masked and sequence-to-sequence language modelling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.objectives.common import IGNORED, inputs, require, unwrapped
from fsdptool.families.protocol import Objective

if TYPE_CHECKING:
    from torch import Tensor, nn


class _Tokens(Objective):
    """Cross-entropy over tokens.

    Args:
        chunk: Tokens whose fp32 logits exist at a time; 0 computes on the whole.
    """

    unit = "tokens"

    def __init__(self, chunk: int = 1024) -> None:
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 0:
            raise ConfigError(f"objective {self.name}: chunk must be a number of tokens, got {chunk!r}")
        self.chunk = chunk

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the label each position must predict, ``-100`` where there is none."""
        return require(batch, "labels", self.name)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of positions with a target."""
        return (self.targets(batch) != IGNORED).sum()

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the logits, [batch, positions, vocabulary]."""
        return {"prediction": model(**inputs(batch)).logits}

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy summed over targets."""
        from fsdptool.families.objectives.entropy import cross_entropy

        return cross_entropy(prediction["prediction"], self.targets(batch), self.chunk)

    def distance(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Mapping[str, Tensor],
        temperature: float,
    ) -> Tensor:
        """Return KL(teacher || student) summed over positions with a target."""
        from fsdptool.families.objectives.entropy import divergence

        ours, theirs = student["prediction"], teacher["prediction"]
        if ours.shape[-1] != theirs.shape[-1]:
            raise ConfigError(
                f"student and teacher predict {ours.shape[-1]} and {theirs.shape[-1]} tokens",
                help="distillation of logits needs one vocabulary",
            )
        return divergence(ours, theirs, self.targets(batch) != IGNORED, temperature, self.chunk)


class CausalLM(_Tokens):
    """Next-token prediction of decoders, packed or padded on the right.

    Batch: ``input_ids`` [B, S]; ``labels`` [B, S] aligned with the inputs as in transformers (the
    shift happens here), or ``shift_labels`` [B, S] already shifted; optionally ``position_ids``
    [B, S] that restart at 0 with every packed document.

    Args:
        chunk: Tokens whose fp32 logits exist at a time; 0 computes on the whole.
        document_mask: Whether documents that ``position_ids`` tell apart may not see each other.
        auxiliary: Weight of the MoE load-balancing loss; None takes the model's own
            ``router_aux_loss_coef``, 0 leaves it out.
        arguments: The family's way from a batch to the model's arguments.
    """

    name = "causal_lm"

    def __init__(
        self,
        chunk: int = 1024,
        document_mask: bool = True,
        auxiliary: float | None = None,
        *,
        arguments: Callable[[Mapping[str, Tensor]], dict[str, Any]] = inputs,
    ) -> None:
        super().__init__(chunk)
        self.arguments = arguments
        self.document_mask = document_mask
        self.auxiliary = auxiliary

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the next token of each position."""
        if "shift_labels" in batch:
            return batch["shift_labels"]
        labels = require(batch, "labels", self.name)
        import torch

        return torch.cat((labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED)), dim=1)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the logits, and the routers' logits of models that balance their experts' load."""
        from fsdptool.families.objectives import routing
        from fsdptool.families.objectives.context import documents
        from fsdptool.families.objectives.context_attention import complete
        from fsdptool.families.objectives.masking import masks

        arguments: dict[str, Any] = {**self.arguments(batch), "use_cache": False}
        coefficient = routing.coefficient(unwrapped(model), self.auxiliary)
        if coefficient:
            arguments["output_router_logits"] = True
        base = unwrapped(model)
        with complete(base), masks(base, documents(batch) if self.document_mask else None):
            outputs = model(**arguments)
        result = {"prediction": outputs.logits}
        if coefficient:
            result |= routing.balance(unwrapped(model), outputs.router_logits, coefficient)
        return result

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy summed over targets, and the load-balancing loss as often.

        Load balance is not additive: it is averaged over micro-batches by their targets.
        """
        result = super().loss(prediction, batch)
        if "auxiliary" in prediction:
            result = result + prediction["auxiliary"].to(result.dtype) * self.weight(batch)
        return result

    def metrics(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tokens sent to each expert and the weighted load-balancing loss, summed."""
        if "auxiliary" not in prediction:
            return {}
        return {
            "expert_load": prediction["expert_load"].detach(),
            "auxiliary_loss": prediction["auxiliary"].detach() * self.weight(batch),
        }


class MaskedLM(_Tokens):
    """Prediction of masked tokens. Batch: ``input_ids``, ``attention_mask``, ``labels`` [B, S]."""

    name = "masked_lm"


class TokenClassification(_Tokens):
    """One class per token. Batch: ``input_ids``, ``attention_mask``, ``labels`` [B, S]."""

    name = "token_classification"


class Seq2Seq(_Tokens):
    """Sequence to sequence, text or speech.

    Batch: the encoder's inputs (``input_ids`` and ``attention_mask``, or ``input_features``) and
    ``labels`` [B, T]; the decoder's inputs are the labels shifted right unless given.
    """

    name = "seq2seq"

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the decoder's logits, [B, T, vocabulary]."""
        arguments: dict[str, Any] = {**inputs(batch), "use_cache": False}
        if "decoder_input_ids" not in batch:
            arguments["decoder_input_ids"] = shifted_right(
                require(batch, "labels", self.name), unwrapped(model).config
            )
        return {"prediction": model(**arguments).logits}


def shifted_right(labels: Tensor, config: Any) -> Tensor:
    """Return the decoder's inputs: the start token, then the labels without their last."""
    pad = getattr(config, "pad_token_id", None) or 0
    # T5's configuration has no start token of its own (transformers 5.23): its checkpoints use pad.
    start = getattr(config, "decoder_start_token_id", None)
    import torch

    first = labels.new_full((labels.shape[0], 1), pad if start is None else start)
    return torch.cat((first, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, pad)), dim=1)
