"""Objectives of text models: causal, masked and sequence-to-sequence language modelling."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.bases import batches
from fsdptool.families.objectives.common import IGNORED, inputs, require, unwrapped
from fsdptool.families.protocol import Objective, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fsdptool.records.recipe import Recipe


class _Tokens(Objective):
    """Cross-entropy over tokens.

    Args:
        chunk: Tokens whose fp32 logits exist at a time; 0 computes on the whole.
    """

    unit = "tokens"
    divides_vocabulary = True

    def __init__(self, chunk: int = 1024) -> None:
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 0:
            raise ConfigError(f"objective {self.name}: chunk must be a number of tokens, got {chunk!r}")
        self.chunk = chunk

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the label each position must predict, ``-100`` where there is none."""
        return require(batch, "labels", self.name)

    def head_targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the targets in the shape of the model's arguments, for a head that computes the loss."""
        return self.targets(batch)

    def weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the number of positions with a target."""
        return (self.targets(batch) != IGNORED).sum()

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the logits, [batch, positions, vocabulary]; of a part of it where ranks divide it."""
        return self.run(model, inputs(batch), batch)[1]

    def run(
        self, model: nn.Module, arguments: Mapping[str, Any], batch: Mapping[str, Tensor]
    ) -> tuple[Any, dict[str, Any]]:
        """Return what the model returns, and the prediction: logits, or the loss that its head computed."""
        from fsdptool.families.objectives.fused_head import HEAD, computing_loss
        from fsdptool.families.objectives.vocabulary import divided_vocabulary

        fused = getattr(unwrapped(model), HEAD, None)
        if fused is None:
            outputs = model(**arguments)
            return outputs, {"prediction": outputs.logits, **divided_vocabulary(model)}
        with computing_loss(fused, self.head_targets(batch), self.chunk) as head:
            outputs = model(**arguments)
            return outputs, {HEAD: head.loss}

    def loss(self, prediction: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> Tensor:
        """Return the cross-entropy summed over targets."""
        from fsdptool.families.objectives.fused_head import HEAD

        if HEAD in prediction:
            return prediction[HEAD]
        return self.cross_entropy(prediction["prediction"], self.targets(batch), prediction)

    def cross_entropy(self, logits: Tensor, targets: Tensor, prediction: Mapping[str, Any]) -> Tensor:
        """Return the cross-entropy of some of a prediction's logits, summed over targets.

        Args:
            logits: [..., vocabulary], or a part of it where ranks divide it.
            targets: [...], ``-100`` where there is none.
            prediction: Says which part.
        """
        from fsdptool.families.objectives.entropy import cross_entropy
        from fsdptool.families.objectives.vocabulary import PART, divided_cross_entropy

        if PART in prediction:
            return divided_cross_entropy(logits, targets, self.chunk, prediction[PART])
        return cross_entropy(logits, targets, self.chunk)

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
    samples: str | None = "documents"
    generates = "continuation"
    splits_sequences = True
    fuses_head = True

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

    @classmethod
    def batch(cls, config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return tokens, labels aligned with them, and positions where documents are packed."""
        return batches.causal(config, recipe)

    def targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the next token of each position."""
        if "shift_labels" in batch:
            return batch["shift_labels"]
        labels = require(batch, "labels", self.name)
        import torch

        return torch.cat((labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED)), dim=1)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the logits or the loss, and the routers' logits where a model balances its experts' load."""
        from fsdptool.families.objectives.context import current, documents
        from fsdptool.families.objectives.context_attention import complete
        from fsdptool.families.objectives.packed_attention import attending, packed

        arguments: dict[str, Any] = {**self.arguments(batch), "use_cache": False}
        coefficient = router_loss_coefficient(unwrapped(model), self.auxiliary)
        if coefficient:
            arguments["output_router_logits"] = True
        base = unwrapped(model)
        positions = documents(batch) if self.document_mask else None
        apart = packed(base, batch) if self.document_mask and current() is None else None
        if positions is not None:
            _check_flash(base, positions)
        with complete(base), masks(base, positions, apart is not None), attending(base, apart):
            outputs, result = self.run(model, arguments, batch)
        # Some classes have the setting without having experts (Doge with ``is_moe`` off, transformers 5.23).
        if coefficient and outputs.router_logits:
            result |= router_loss(unwrapped(model), outputs.router_logits, coefficient)
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
    samples = "masked"

    @classmethod
    def batch(cls, config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return tokens, their mask and a label per token."""
        return batches.masked(config, recipe)


class TokenClassification(_Tokens):
    """One class per token. Batch: ``input_ids``, ``attention_mask``, ``labels`` [B, S]."""

    name = "token_classification"

    @classmethod
    def batch(cls, config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return tokens, their mask and a class per token."""
        return batches.token_classes(config, recipe)


class Seq2Seq(_Tokens):
    """Sequence to sequence, text or speech.

    Batch: the encoder's inputs (``input_ids`` and ``attention_mask``, or ``input_features``) and
    ``labels`` [B, T]; the decoder's inputs are the labels shifted right unless given.
    """

    name = "seq2seq"
    samples = "pairs"
    generates = "translation"
    single_length = False
    fuses_head = True

    @classmethod
    def batch(cls, config: Any, recipe: Recipe) -> tuple[TensorSpec, ...]:
        """Return both sides, each as long as the recipe says."""
        return batches.sequence_to_sequence(config, recipe)

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the decoder's logits, [B, T, vocabulary], those of a part of the vocabulary, or the loss."""
        arguments: dict[str, Any] = {**inputs(batch), "use_cache": False}
        if "decoder_input_ids" not in batch:
            arguments["decoder_input_ids"] = shifted_right(
                require(batch, "labels", self.name), unwrapped(model).config
            )
        return self.run(model, arguments, batch)[1]


def shifted_right(labels: Tensor, config: Any) -> Tensor:
    """Return the decoder's inputs: the start token, then the labels without their last."""
    pad = getattr(config, "pad_token_id", None) or 0
    # T5's configuration has no start token of its own (transformers 5.23): its checkpoints use pad.
    start = getattr(config, "decoder_start_token_id", None)
    import torch

    first = labels.new_full((labels.shape[0], 1), pad if start is None else start)
    return torch.cat((first, labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, pad)), dim=1)


def _text(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


def router_loss_coefficient(model: nn.Module, wanted: float | None) -> float:
    """Return the weight of the auxiliary loss; 0 where the model has no router that reports.

    DeepSeek-V3 and its relatives balance by a bias instead and have no such setting.
    """
    config = _text(getattr(model, "config", None))
    if not hasattr(config, "output_router_logits") or not hasattr(config, "router_aux_loss_coef"):
        return 0.0
    return float(config.router_aux_loss_coef if wanted is None else wanted)


def router_loss(model: nn.Module, logits: Sequence[Tensor], weight: float) -> dict[str, Tensor]:
    """Return the weighted auxiliary loss and the tokens each expert received.

    The loss is that of Fedus et al. 2021 (Switch Transformer, equations 4 to 6) with the top-k
    counts of Mixtral: experts x sum over experts of (share of tokens) x (mean router probability),
    both over all layers and tokens.

    Args:
        logits: One [tokens, experts] tensor per sparse layer.
        weight: Its coefficient.
    """
    import torch

    from fsdptool.families.objectives.context_attention import everywhere

    config = _text(model.config)
    top = int(getattr(config, "num_experts_per_tok", 0) or getattr(config, "top_k", 0) or 1)
    own = torch.cat([layer for layer in logits if layer is not None and layer.dim() == 2], dim=0)
    # Of the whole sequence where its ranks hold parts of it; each rank then reports its share of the load.
    layers = everywhere(own)
    probabilities = torch.softmax(layers.float(), dim=-1)
    experts = probabilities.shape[-1]
    chosen = torch.topk(probabilities, min(top, experts), dim=-1).indices
    load = torch.zeros(experts, dtype=torch.float32, device=layers.device)
    load = load.scatter_add(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.float32))
    share = load / layers.shape[0]
    loss = experts * (share * probabilities.mean(dim=0)).sum() * weight
    return {
        "auxiliary": loss,
        "expert_load": load if layers is own else load * (own.shape[0] / layers.shape[0]),
    }


def _check_flash(model: nn.Module, positions: Tensor) -> None:
    """Refuse transformers' flash attention where it would not see that documents are packed.

    It reads them from the positions of a batch of one sequence alone (5.23,
    ``modeling_flash_attention_utils.py``, ``_is_packed_sequence``).
    """
    attention = str(getattr(getattr(model, "config", None), "_attn_implementation", None))
    if positions.shape[0] > 1 and attention.startswith("flash_attention"):
        raise ConfigError(
            f"{attention} does not keep the packed documents of several sequences apart",
            help="set model.attention: sdpa, whose kernel on GPUs keeps them apart without a mask, or"
            " batch.micro_batch: 1",
        )


_MAKERS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")


# transformers 5.23 looks at ``position_ids`` to find packed documents. It tests the values on real tensors
# (one device synchronisation, and a mask only if there are several documents) but assumes documents on fake
# ones, so a trace would hold S x S masks that training never makes. Here the caller says whether documents
# are packed, and both do the same.
@contextmanager
def masks(model: nn.Module, positions: Tensor | None, kernel: bool = False) -> Iterator[None]:
    """Let transformers build document masks from ``positions``, or plain ones without looking.

    Without documents SDPA runs with ``is_causal`` and no mask. With them SDPA and eager attention
    take one boolean mask per kind of layer, shared by all layers, unless a kernel keeps documents
    apart. OPT, Falcon and others take positions but do not hand them to the mask (5.23): they get
    them here.

    Args:
        model: What is about to run, below any PEFT wrapper.
        positions: [batch, positions], 0 where a document begins, of the whole sequence; None: no documents.
        kernel: Whether attention keeps documents apart without a mask (``packed_attention``).
    """
    from transformers import masking_utils

    changed: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:
        changed.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    finder = _no_documents if positions is None else _documents
    change(masking_utils, "find_packed_sequence_indices", finder)
    traced = any(is_fake(parameter) for parameter in itertools.islice(model.parameters(), 1))
    for module in _modules(model):
        for name in _MAKERS if positions is not None else ():
            if hasattr(module, name):
                make = _with_positions(getattr(module, name), positions)
                change(module, name, _without_mask(make, name) if kernel else make)
        # "As many image tokens as image features": true by the batch's making, unanswerable on fakes.
        if traced and hasattr(module, "torch_compilable_check"):
            change(module, "torch_compilable_check", _unchecked)
    try:
        yield
    finally:
        for owner, name, value in reversed(changed):
            setattr(owner, name, value)


def _modules(model: nn.Module) -> list[Any]:
    names = {cls.__module__ for cls in type(model).__mro__}
    return [sys.modules[name] for name in sorted(names) if name.startswith("transformers.models.")]


def is_fake(tensor: Tensor) -> bool:
    """Say whether a tensor has no contents."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def _unchecked(*arguments: Any, **named: Any) -> None:
    return None


def _no_documents(position_ids: Tensor) -> None:
    return None


def _documents(position_ids: Tensor) -> Tensor:
    import torch

    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def _with_positions(original: Callable[..., Any], positions: Tensor | None) -> Callable[..., Any]:
    def make(*arguments: Any, **named: Any) -> Any:
        # transformers calls its mask makers by keyword throughout (5.23).
        if not arguments and _missing(named.get("position_ids"), positions):
            named["position_ids"] = positions
        return original(*arguments, **named)

    return make


_CAUSAL, _SLIDING = _MAKERS[:2]
_MORE = ("attention_mask", "past_key_values", "or_mask_function", "and_mask_function", "block_sequence_ids")
"""Arguments of a mask maker that describe more than causal attention."""


def _without_mask(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a maker of masks that makes none where :func:`packed_attention.attend` knows who sees whom."""
    from fsdptool.families.objectives.packed_attention import window_mask

    def make(*arguments: Any, **named: Any) -> Any:
        plain = not arguments and all(named.get(key) is None for key in _MORE)
        window = getattr(named.get("config"), "sliding_window", None)
        if plain and named.get("allow_is_causal_skip", True):
            if name == _CAUSAL:
                return None
            if name == _SLIDING and window is not None:
                return window_mask(named["inputs_embeds"], window)
        return original(*arguments, **named)

    return make


def _missing(given: Tensor | None, positions: Tensor | None) -> bool:
    """Say whether the mask would lack positions: the model's own, or those of the whole sequence."""
    return given is None or (positions is not None and given.shape[-1] != positions.shape[-1])
