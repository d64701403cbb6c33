"""The layers that peft adapts where none are named."""

from __future__ import annotations

import pytest

from fsdptool.source.peft_targets import PEFT_TARGETS, USUAL, type_of


def test_the_layers_are_those_of_peft() -> None:
    constants = pytest.importorskip("peft.utils.constants")
    theirs = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    ours = {kind: list(names) if isinstance(names, tuple) else names for kind, names in PEFT_TARGETS.items()}
    assert ours == {kind: theirs[kind] for kind in ours}
    others = {kind for kind, names in theirs.items() if list(USUAL) == names}
    assert others == {kind for kind, names in PEFT_TARGETS.items() if names == USUAL}


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("openai-community/gpt2-large", "gpt2"),
        ("./my-gpt2-of-unknown-size", "gpt2"),
        ("org/GPT-2-tuned", "gpt2"),
        ("google/mt5-small", "mt5"),
        ("org/roberta-mine", "roberta"),
        ("Qwen/Qwen3-30B-A3B", "qwen3_moe"),
        ("org/mpt7b-tuned", "mpt"),
        ("org/biobert-mine", "bert"),
        ("distilgpt2-mine", "gpt2"),
        ("org/unheard-of", None),
        ("org/my-prompt-model", None),
        ("distilbert-mine", "distilbert"),
        ("falcon-h1-mine", "falcon_h1"),
        ("org/starcoder2-mine", "starcoder2"),
        ("org/t5gemma-mine", "t5gemma"),
    ],
)
def test_the_type_of_a_model_is_found_by_its_name(model: str, kind: str | None) -> None:
    assert type_of(model) == kind
