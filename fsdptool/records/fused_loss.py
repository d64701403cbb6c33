"""Whether the head of a run computes the loss itself, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from fsdptool.records.annotations import Positive

PRODUCT_CHUNKS = 4
"""Chunks whose logits one matrix product computes: the more, the less often the weight's gradient is read."""


class FusedLossReason(StrEnum):
    """Why the head computes the loss, or returns logits."""

    REQUESTED = "requested"
    DECLINED = "declined"
    AUTOMATIC = "automatic"
    CPU = "cpu"
    OTHER_PROGRAM = "other_program"
    OBJECTIVE = "objective"
    UNKNOWN_HEAD = "unknown_head"
    ADAPTED_HEAD = "adapted_head"
    TENSOR_PARALLEL = "tensor_parallel"
    WHOLE_LOGITS = "whole_logits"
    NOTHING_SAVED = "nothing_saved"
    UNTESTED = "untested"

    @property
    def text(self) -> str:
        """The reason as a clause that follows a colon."""
        return _TEXTS[self]


_TEXTS = {
    FusedLossReason.REQUESTED: "objective.fused is true",
    FusedLossReason.DECLINED: "objective.fused is false",
    FusedLossReason.AUTOMATIC: "on GPUs, and with this batch, that takes less memory",
    FusedLossReason.CPU: "the default on CPUs",
    FusedLossReason.OTHER_PROGRAM: "the training loop is another program's",
    FusedLossReason.OBJECTIVE: "the objective or the method needs more of the logits than one sum",
    FusedLossReason.UNKNOWN_HEAD: "the model does more than scale or cap the logits of one linear layer",
    FusedLossReason.ADAPTED_HEAD: "an adapter changes the head",
    FusedLossReason.TENSOR_PARALLEL: "tensor-parallel ranks divide it",
    FusedLossReason.WHOLE_LOGITS: "objective.options.chunk is 0",
    FusedLossReason.NOTHING_SAVED: "with this batch, logits take less memory than gradients in fp32",
    FusedLossReason.UNTESTED: "this kind of model was not tested with a fused loss",
}

IMPOSSIBLE = frozenset(
    {FusedLossReason.OBJECTIVE, FusedLossReason.UNKNOWN_HEAD, FusedLossReason.ADAPTED_HEAD}
)
"""Reasons of the model and its method: a request is refused, not ignored."""


NamedLoss = Literal["compiled", "liger", "cce", "torchtitan"]
"""Losses of other programs that are planned by name (``memory/tracing/named_losses.py``).

``compiled``: whole logits, and no fp32 copy. ``liger``: Liger's fused linear cross-entropy. ``cce``: cut
cross-entropy. ``torchtitan``: its loss in eight chunks of each row, whose backward runs before the blocks'.
"""


@dataclass(frozen=True, slots=True)
class LossTiles:
    """The tiles in which a head that computes the loss makes logits.

    Attributes:
        tokens: Tokens of a tile.
        vocabulary: Entries of the vocabulary of a tile.
    """

    tokens: Positive
    vocabulary: Positive


@dataclass(frozen=True, slots=True)
class FusedLoss:
    """Whether the head of a run computes the loss itself, chunk by chunk.

    Attributes:
        fused: Whether it does.
        reason: Why.
    """

    fused: bool
    reason: FusedLossReason

    @property
    def text(self) -> str:
        """The decision and the reason in one line."""
        what = "computes the loss, without whole logits" if self.fused else "returns logits"
        return f"the head {what}: {self.reason.text}"
