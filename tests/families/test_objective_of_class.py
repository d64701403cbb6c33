"""Which objective a class is trained under, and what its saved configuration says."""

from __future__ import annotations

from typing import Any

import pytest

from fsdptool.families.bases import TransformersFamily
from fsdptool.families.registry import load_registry

AUDIO: dict[str, Any] = {"text_config": {}, "audio_config": {}}


@pytest.mark.parametrize(
    ("model_type", "model_class", "further", "objective"),
    [
        # The head decides, whatever class the family's own flavours have.
        ("albert", "AlbertForMaskedLM", {}, "masked_lm"),
        ("albert", "AlbertModel", {}, "features"),
        ("deberta-v2", "DebertaV2ForMaskedLM", {}, "masked_lm"),
        ("bert", "BertLMHeadModel", {}, "causal_lm"),
        ("bert", "BertForSequenceClassification", {}, "classification"),
        ("umt5", "UMT5ForConditionalGeneration", {}, "seq2seq"),
        ("umt5", "UMT5EncoderModel", {}, "features"),
        # Encoder-decoders without a family of their own.
        ("mt5", "MT5ForConditionalGeneration", {}, "seq2seq"),
        ("xlm", "XLMWithLMHeadModel", {}, "masked_lm"),
        ("voxtral", "VoxtralForConditionalGeneration", AUDIO, "causal_lm"),
        ("sam", "SamModel", {}, "segmentation"),
    ],
)
def test_the_class_decides_the_objective(
    model_type: str, model_class: str, further: dict[str, Any], objective: str
) -> None:
    config = {"model_type": model_type, "architectures": [model_class], **further}
    assert load_registry().match(config).objective_for(config) == objective


def test_a_saved_infinity_is_read() -> None:
    raw = {"time_step_limit": [0.0, {"__float__": "Infinity"}], "num_hidden_layers": 2}
    config = TransformersFamily().config_object(raw, "FalconH1ForCausalLM")
    assert list(config.time_step_limit) == [0.0, float("inf")]
