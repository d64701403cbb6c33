"""The conditions a micro-batch is traced under."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from fsdptool.records.trace import Profile

if TYPE_CHECKING:
    from fsdptool.records.recipe import Distillation


@dataclass(frozen=True, slots=True)
class Conditions:
    """How a micro-batch is computed.

    Attributes:
        profile: Whose kernels to assume.
        compute: ``param_dtype`` of the sharding, or None for the tensors' own.
        output: ``output_dtype`` of the sharding.
        inputs: What the model's floating inputs are cast to, or None.
        exact: Arguments of forward left out of that cast.
        teacher: Forward without gradients only.
        beside: Forward without gradients as in validation or sampling, on the model that is trained.
        sharing: Ranks that share a sequence; rank 0 of them is traced, which sees it to its end.
        staged: Whether collectives inside the model are gloo's, which copies what it sends.
        ring: Whether ranks that share a sequence pass keys and values round.
        uncast: Parameters FSDP does not manage: they keep the dtype they are stored in.
        master: dtype trainable parameters are stored in.
        distillation: Its temperature and alpha; the teacher's prediction is an input then.
    """

    profile: Profile
    compute: torch.dtype | None
    output: torch.dtype | None = None
    inputs: torch.dtype | None = None
    exact: tuple[str, ...] = ()
    teacher: bool = False
    uncast: frozenset[str] = frozenset()
    master: torch.dtype | None = None
    distillation: Distillation | None = None
    beside: Literal["evaluation", "sampling"] | None = None
    sharing: int = 1
    staged: bool = False
    ring: bool = False
