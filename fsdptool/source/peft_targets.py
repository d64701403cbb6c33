"""The layers that peft adapts where a program names none: by the type of the model.

Source: peft 0.21 ``utils/constants.py``: TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

from fsdptool.families.registry import load_registry
from fsdptool.source.known_models import family_of_name

USUAL = ("q_proj", "v_proj")
"""Layers of most types, and of models whose type is not known."""
PEFT_TARGETS: Mapping[str, tuple[str, ...] | str] = {
    **dict.fromkeys(
        (
            "bart", "gemma", "gemma2", "gemma3_text", "gpt_neo", "gptj", "llama", "llama4", "mistral",
            "mixtral", "opt", "qwen2", "qwen3", "stablelm",
        ),
        USUAL,
    ),
    **dict.fromkeys(("bert", "electra", "layoutlm", "roberta", "xlm-roberta"), ("query", "value")),
    **dict.fromkeys(("bloom", "chatglm", "falcon", "gpt_neox"), ("query_key_value",)),
    "blip-2": ("q", "v", "q_proj", "v_proj"),
    "codegen": ("qkv_proj",),
    "deberta": ("in_proj",),
    "deberta-v2": ("query_proj", "value_proj"),
    "gemma4": r".*language_model\..*\.(q_proj|v_proj)",
    "gpt2": ("c_attn",),
    "gpt_bigcode": ("c_attn",),
    "mpt": ("Wqkv",),
    "mt5": ("q", "v"),
    "nemotron_h": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "phi": ("q_proj", "v_proj", "fc1", "fc2"),
    "t5": ("q", "v"),
}  # fmt: skip
_IN_NAMES = {
    "mt5": "mt5", "umt5": "umt5", "t5gemma": "t5gemma", "t5": "t5", "flant5": "t5", "codet5": "t5",
    "gpt2": "gpt2", "distilgpt2": "gpt2", "bloom": "bloom", "bloomz": "bloom", "pythia": "gpt_neox",
    "neox": "gpt_neox", "gptneox": "gpt_neox", "dolly": "gpt_neox", "falcon": "falcon",
    "falconh1": "falcon_h1", "falconmamba": "falcon_mamba", "mpt": "mpt", "roberta": "roberta",
    "distilroberta": "roberta", "camembert": "camembert", "xlmroberta": "xlm-roberta",
    "deberta": "deberta-v2", "bert": "bert", "biobert": "bert", "distilbert": "distilbert",
    "albert": "albert", "modernbert": "modernbert", "nomicbert": "nomic_bert", "codegen": "codegen",
    "starcoder": "gpt_bigcode", "starcoderbase": "gpt_bigcode", "starcoder2": "starcoder2",
    "santacoder": "gpt_bigcode", "chatglm": "chatglm",
}  # fmt: skip
"""Words in the names of models whose size is not known, hyphens left out, and the type that they stand for.
Some types are not peft's: it refuses them without named layers."""


def type_of(model: str) -> str | None:
    """Return the ``model_type`` that a model's name stands for, or None."""
    family, _, size = (family_of_name(model)[0] or "").partition(":")
    if family:
        named = load_registry().get(family).flavours()[size].config.get("model_type")
        return str(named) if named is not None else None
    words = re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z])\d+[bm](?![a-z0-9])", "", model.lower()))
    # Two words first: GPT-2, Falcon-H1. Parts of words are others: "mpt" of "prompt".
    named = [*(first + second for first, second in pairwise(words)), *words]
    return next((_IN_NAMES[word] for word in named if word in _IN_NAMES), None)
