"""Models, recipes and files the data tests share. Nothing is downloaded."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fsdptool.records.anatomy import ModelSpec, Reference
from fsdptool.records.recipe import Batch, Data, Evaluation, ModelChoice, Objective, Recipe

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "causal_lm": (
        "LlamaForCausalLM",
        {
            "model_type": "llama",
            "vocab_size": 512,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 64,
        },
    ),
    "masked_lm": (
        "BertForMaskedLM",
        {"model_type": "bert", "vocab_size": 512, "hidden_size": 32, "num_attention_heads": 2},
    ),
    "classification": (
        "BertForSequenceClassification",
        {
            "model_type": "bert",
            "vocab_size": 512,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_labels": 3,
        },
    ),
    "seq2seq": (
        "T5ForConditionalGeneration",
        {"model_type": "t5", "vocab_size": 512, "d_model": 32, "num_heads": 2},
    ),
}


@pytest.fixture
def spec_of() -> Callable[[str], ModelSpec]:
    """A tiny model's spec by objective."""

    def make(objective: str) -> ModelSpec:
        name, config = CONFIGS[objective]
        raw = {**config, "architectures": [name]}
        return ModelSpec(
            Reference("config", f"tiny-{objective}"), "generic", None, "transformers", name, raw, objective
        )

    return make


@pytest.fixture
def recipe_for() -> Callable[..., Recipe]:
    """A recipe by objective; keyword arguments are fields of Data, ``batch`` and ``evaluation`` their own."""

    def make(
        objective: str,
        *,
        batch: Mapping[str, Any] | None = None,
        evaluation: Mapping[str, Any] | None = None,
        seed: int = 0,
        **data: Any,
    ) -> Recipe:
        sizes = {"micro_batch": 2, "sequence_length": 64, **(batch or {})}
        return Recipe(
            ModelChoice("tiny"),
            objective=Objective(objective),
            data=Data(**{"tokenizer": "bytes", **data}),
            batch=Batch(**sizes),
            evaluation=Evaluation(**(evaluation or {})),
            seed=seed,
        )

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., str]:
    """Write rows to a JSONL file and return its path."""

    def write(rows: list[Mapping[str, Any]], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def with_data() -> Callable[..., Recipe]:
    """Return a recipe with some fields of its data changed."""

    def change(recipe: Recipe, **fields: Any) -> Recipe:
        return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **fields))

    return change


class Pipelines(Mapping[str, Path]):
    """Tiny pipelines by name, written when they are first asked for."""

    def __init__(self, root: Path) -> None:
        from tiny_pipelines import PIPELINES

        self._root, self._known = root, PIPELINES

    def __getitem__(self, name: str) -> Path:
        from tiny_pipelines import write

        folder = self._root / name
        return folder if folder.exists() else write(name, folder)

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Pipelines:
    """Real pipelines with tiny random components."""
    return Pipelines(tmp_path_factory.mktemp("pipelines"))
