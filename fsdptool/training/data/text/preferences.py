"""Prompts with two answers each, of which one is preferred."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.records.recipe import Data
from fsdptool.training.data.loader import Samples
from fsdptool.training.data.ragged import Ragged
from fsdptool.training.data.sources import Row, SampleSource
from fsdptool.training.data.text.common import (
    IGNORED,
    ChatTemplate,
    Material,
    TextSamples,
    column,
    digest_of,
    padded,
    problem_with,
    start_tokens,
    stop_tokens,
    text_column,
)
from fsdptool.training.data.tokenizer import Encoder


class Preferences(TextSamples):
    """Columns ``prompt``, ``chosen`` and ``rejected``: texts, or conversations.

    Texts may lack a prompt. Conversations may lack one, too: it is then what both have in common.
    """

    options = ("prompt_column", "chosen_column", "rejected_column")

    def columns(self, tokens: str) -> dict[str, str]:
        """Return the tokens of both answers, each behind its prompt, and which of them are learned."""
        return {"input_ids": tokens, "learned": "|u1", "rejected_ids": tokens, "rejected_learned": "|u1"}

    def tokenise(
        self, data: Data, encoder: Encoder, source: SampleSource, facts: dict[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the tokens of one pair after another."""
        names = [
            data.options.get("chosen_column", "chosen"),
            data.options.get("rejected_column", "rejected"),
        ]
        template: ChatTemplate | None = None
        for row in source.rows():
            values = [
                column(row, name, source, f"data.options.{answer}_column")
                for answer, name in zip(("chosen", "rejected"), names, strict=True)
            ]
            if all(isinstance(value, str) for value in values):
                answers = _texts(values, data, encoder, source, row)
            else:
                template = template or ChatTemplate(encoder.tokenizer, encoder.name, None)
                answers = _conversations(values, names, data, template, source, row)
            (ids, learned), (rejected_ids, rejected_learned) = answers
            yield {
                "input_ids": ids,
                "learned": learned,
                "rejected_ids": rejected_ids,
                "rejected_learned": rejected_learned,
            }

    def samples(self, of: Material) -> Samples:
        """Return pairs padded to the length of the family's batch."""
        return Preferred(of.table, of.rows, length=of.wanted["input_ids"].shape[-1], pad=of.encoder.pad)


class Preferred:
    """Two answers to a prompt, each behind it: the chosen one first.

    Args:
        table: Columns of :class:`Preferences`.
        rows: The rows used.
        length: Tokens of a prompt with an answer. Of longer ones the beginning of the prompt is cut.
        pad: Token that fills up.
    """

    def __init__(self, table: Ragged, rows: NDArray[np.int64], *, length: int, pad: int) -> None:
        self._table = table
        self._rows = rows
        self._length = length
        self._pad = pad
        self.digest = digest_of(table.digest, length, rows.tobytes())

    def __len__(self) -> int:
        return len(self._rows)

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        """Return ``input_ids`` and ``labels`` [2, length]; ``epoch`` changes nothing."""
        row = int(self._rows[index])
        answers = [self._answer(row, prefix) for prefix in ("", "rejected_")]
        tokens, labels = zip(*answers, strict=True)
        return {"input_ids": np.stack(tokens), "labels": np.stack(labels)}

    def _answer(self, row: int, prefix: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids = self._table.row(f"{prefix}ids" if prefix else "input_ids", row).astype(np.int64)
        learned = self._table.row(f"{prefix}learned", row).astype(bool)
        # The prompt gives way first: the answer is what is compared.
        prompt = int(learned.argmax()) if learned.any() else len(ids)
        begin = min(max(len(ids) - self._length, 0), max(prompt - 1, 0))
        labels = np.where(learned, ids, IGNORED)[begin : begin + self._length]
        tokens, _ = padded(ids[begin : begin + self._length], self._length, self._pad)
        return tokens, padded(labels, self._length, IGNORED)[0]


Answer = tuple[NDArray[np.int64], NDArray[np.uint8]]
"""Tokens of a prompt and an answer, and 1 for those of the answer."""


def _texts(values: list[str], data: Data, encoder: Encoder, source: SampleSource, row: Row) -> list[Answer]:
    name = data.options.get("prompt_column", "prompt")
    wanted = name in row or "prompt_column" in data.options
    prompt = text_column(row, name, source, "data.options.prompt_column") if wanted else ""
    first, *answers = encoder.encode([prompt, *values], special=False)
    head = np.concatenate([start_tokens(encoder), first]).astype(np.int64)
    return [
        _marked(np.concatenate([head, ids, stop_tokens(encoder)]).astype(np.int64), len(head))
        for ids in answers
    ]


def _conversations(
    values: list[Any], names: list[str], data: Data, template: ChatTemplate, source: SampleSource, row: Row
) -> list[Answer]:
    from jinja2 import TemplateError

    for name, messages in zip(names, values, strict=True):
        _check(name, messages, source)
    prompt = row.get(data.options.get("prompt_column", "prompt"))
    before = list(prompt) if isinstance(prompt, list) else []
    chosen, rejected = ([*before, *messages] for messages in values)
    pairs = enumerate(zip(chosen, rejected, strict=False))
    common = next((number for number, (one, other) in pairs if one != other), len(before))
    tools = row.get("tools")
    try:
        asked = template.encode_prompt(chosen[:common], tools) if common else np.empty(0, np.int64)
        whole = [template.encode(messages, tools) for messages in (chosen, rejected)]
    except TemplateError as error:
        place = source.where(lambda other: other.get(names[0]) == values[0])
        raise ConfigError(
            f"{place}: the chat template refuses the conversation: {error}",
            help="check the roles and their order",
        ) from error
    return [_marked(tokens, _shared(asked, tokens)) for tokens in whole]


def _check(name: str, messages: Any, source: SampleSource) -> None:
    problem = problem_with(messages, None)
    if problem is not None:
        place = source.where(lambda other: problem_with(other.get(name), None) is not None)
        raise ConfigError(
            f"{place}: column {name!r}: {problem}",
            help="give texts, or lists of messages, in both columns",
        )


def _shared(one: NDArray[np.int64], two: NDArray[np.int64]) -> int:
    """Return how many tokens two sequences begin with alike: some templates end a prompt in another way."""
    size = min(len(one), len(two))
    different = np.flatnonzero(one[:size] != two[:size])
    return int(different[0]) if len(different) else size


def _marked(tokens: NDArray[np.int64], prompt: int) -> Answer:
    return tokens, (np.arange(len(tokens)) >= prompt).astype(np.uint8)
