"""Prompts with two answers: both behind their prompt, the loss on the answers alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_of
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Recipe
from fsdptool.training.data import build_batches
from fsdptool.training.data.tokenizer import byte_tokenizer

pytestmark = pytest.mark.slow


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TEXTS = {"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5, or so"}
CHATS: dict[str, Any] = {
    "chosen": [turn("user", "2 + 2?"), turn("assistant", "4")],
    "rejected": [turn("user", "2 + 2?"), turn("assistant", "44")],
}
APART = {"prompt": CHATS["chosen"][:1], "chosen": CHATS["chosen"][1:], "rejected": CHATS["rejected"][1:]}


@pytest.mark.parametrize(
    ("row", "length", "answers"),
    [
        (TEXTS, 32, ["4", "5, or so"]),
        (TEXTS, 10, ["4", "5, or so"]),  # the beginning of the prompt gives way
        ({"chosen": "yes", "rejected": "no"}, 32, ["yes", "no"]),
        (CHATS, 64, ["4", "44"]),
        (APART, 64, ["4", "44"]),
    ],
    ids=["texts", "long", "without-prompt", "conversations", "prompt-apart"],
)
def test_labels_are_the_answers(
    row: dict[str, Any],
    length: int,
    answers: list[str],
    spec_of: Callable[[str], ModelSpec],
    recipe_for: Callable[..., Recipe],
    write_rows: Callable[..., str],
    tmp_path: Path,
) -> None:
    spec = spec_of("causal_lm")
    recipe = recipe_for(
        "orpo",
        source="jsonl",
        path=write_rows([row, row]),
        batch={"sequence_length": length},
    )
    (batch,) = next(build_batches(recipe, spec, cache=tmp_path / "c"))
    wanted = {item.name: item.shape for item in family_of(spec).batch_spec(spec.config, recipe)}
    assert {name: tuple(tensor.shape) for name, tensor in batch.items()} == wanted
    tokenizer = byte_tokenizer()
    for tokens, labels, answer in zip(batch["input_ids"][0], batch["labels"][0], answers, strict=True):
        learned = labels != -100
        assert torch.equal(tokens[learned], labels[learned])
        text = tokenizer.decode(labels[learned], skip_special_tokens=True)
        assert text.strip() == answer
        first = int(learned.int().argmax())
        assert first > 0 or "prompt" not in row, "the first token of an answer is predicted from its prompt"


def test_a_missing_answer_is_named(
    spec_of: Callable[[str], ModelSpec],
    recipe_for: Callable[..., Recipe],
    write_rows: Callable[..., str],
    tmp_path: Path,
) -> None:
    recipe = recipe_for("orpo", source="jsonl", path=write_rows([{"chosen": "yes", "worse": "no"}]))
    with pytest.raises(ConfigError, match="no column 'rejected'") as error:
        build_batches(recipe, spec_of("causal_lm"), cache=tmp_path / "c")
    assert error.value.help == "set data.options.rejected_column to one of them"
