"""Rows of models that nobody tuned the memory model on: odd sizes, odd numbers of ranks.

The matrix (``matrix.py``) was measured while the model was written. These architectures were cut small and
measured afterwards, with widths, vocabularies, experts and sequences that the ranks do not divide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from settings import Setting

MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, int]]] = {
    "mixtral": (
        "MoE, top 2",
        "mixtral:8x7b",
        {
            "num_hidden_layers": 5,
            "hidden_size": 256,
            "intermediate_size": 448,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_local_experts": 6,
            "vocab_size": 3001,
        },
        {"sequence_length": 250, "micro_batch": 2},
    ),
    "mixtral-even": (
        "MoE, top 2",
        "mixtral:8x7b",
        {
            "num_hidden_layers": 5,
            "hidden_size": 256,
            "intermediate_size": 448,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_local_experts": 16,
            "vocab_size": 3200,
        },
        {"sequence_length": 256, "micro_batch": 2},
    ),
    "cohere": (
        "parallel attention, scaled logits",
        "cohere:aya-23-8b",
        {
            "num_hidden_layers": 4,
            "hidden_size": 512,
            "intermediate_size": 1000,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 20000,
        },
        {"sequence_length": 130, "micro_batch": 3},
    ),
}
"""Name to (kind in the tables, reference, overrides, micro-batch)."""

_CHANGES: dict[str, tuple[dict[str, Any], ...]] = {
    "mixtral": (
        {"ranks": 16, "checkpointing": "full", "reshard": False},
        {"ranks": 4},
    ),
    "mixtral-even": ({"ranks": 16},),
    "cohere": ({"ranks": 3},),
}


def rows() -> Iterator[Setting]:
    """Yield every row; the name says all that differs."""
    for name, changes in _CHANGES.items():
        _, reference, overrides, batch = MODELS[name]
        for change in changes:
            row = replace(Setting(name, name, reference, overrides, batch=batch, kept_aside=True), **change)
            yield row
