"""The objectives that several families use (docs/reference/objectives.md)."""

from __future__ import annotations

from collections.abc import Mapping

from fsdptool.families.objectives.features import Classification, Contrastive, Features, ModuleLoss
from fsdptool.families.objectives.language import CausalLM, MaskedLM, Seq2Seq, TokenClassification
from fsdptool.families.objectives.preference import ApoZeroUnpaired, Dpo, Orpo, SimPo
from fsdptool.families.protocol import Objective

TRANSFORMERS: Mapping[str, type[Objective]] = {
    objective.name: objective
    for objective in (
        CausalLM,
        Seq2Seq,
        MaskedLM,
        TokenClassification,
        Classification,
        Contrastive,
        Features,
        ModuleLoss,
        Orpo,
        SimPo,
        Dpo,
        ApoZeroUnpaired,
    )
}

__all__ = [
    "TRANSFORMERS",
    "CausalLM",
    "Classification",
    "Contrastive",
    "Features",
    "MaskedLM",
    "ModuleLoss",
    "Seq2Seq",
    "TokenClassification",
]
