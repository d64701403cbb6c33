"""Rows to tokens, once: the result is a table on disk that every rank maps."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fsdptool.errors import ConfigError
from fsdptool.records.recipe import Data
from fsdptool.runs.work import LongWork
from fsdptool.training.data.chats import ChatTemplate, problem_with
from fsdptool.training.data.ragged import Ragged, RaggedWriter, made_once
from fsdptool.training.data.sources import Row, Source, open_source
from fsdptool.training.data.tokenizer import Encoder

_GROUP, _GROUP_CHARACTERS = 512, 1 << 21
_VERSION = 3
"""Raised when the tables' meaning changes, so that old ones are not used."""


def tokenised(kind: str, data: Data, encoder: Encoder, *, cache: Path) -> Ragged:
    """Return the token table of a recipe's data, made now or found in ``cache``.

    Args:
        kind: ``causal_lm``, ``masked_lm``, ``seq2seq`` or ``classification``.
        data: The recipe's data section.
        encoder: The tokenizer.
        cache: Folder under which tables are kept, by digest.

    Raises:
        ConfigError: The data is missing, empty or lacks a column.
        StorageError: The cache cannot be written.
    """
    source = open_source(data)
    key = _key(kind, data, encoder, source)
    folder = cache / "tokens" / key
    made_once(folder, lambda aside: _make(kind, data, encoder, source, aside), finished="table.json")
    return Ragged(folder)


def _key(kind: str, data: Data, encoder: Encoder, source: Source) -> str:
    options = {name: data.options[name] for name in _USED[kind] if name in data.options}
    parts = [
        _VERSION,
        kind,
        source.identity,
        encoder.digest,
        data.text_column,
        data.assistant_only_loss,
        options,
    ]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


_USED: dict[str, tuple[str, ...]] = {
    "causal_lm": ("messages_column", "assistant_turns", "prompt_column"),
    "masked_lm": (),
    "seq2seq": ("source_column", "target_column", "prefix"),
    "classification": ("label_column", "labels"),
}


def _make(kind: str, data: Data, encoder: Encoder, source: Source, folder: Path) -> None:
    maker = {
        "causal_lm": _causal,
        "masked_lm": _masked,
        "seq2seq": _pairs,
        "classification": _labelled,
    }[kind]
    facts: dict[str, Any] = {"kind": kind, "tokenizer": encoder.name, "source": source.place}
    source = _with_progress(source)
    with RaggedWriter(folder, _columns(kind, encoder)) as writer:
        longest = -1
        for values in maker(data, encoder, source, facts):
            longest = max(longest, len(values["input_ids"]))
            writer.extend(values)
            if not facts.pop("open", False):
                writer.end()
        if longest < 0:
            raise ConfigError(
                f"data {source.place} has no rows", help="check data.path, data.split and the files' content"
            )
        if longest <= len(_framed([], encoder)):
            raise ConfigError(
                f"data {source.place} has no text: every row is empty",
                help="check the files' content and data.text_column",
            )
        writer.close(facts)


def _with_progress(source: Source) -> Source:
    """Return the same rows; reading them tells how far the work is."""

    what = f"tokenising {source.place}"

    def counted() -> Iterator[tuple[str, Row]]:
        total: int | None = None
        with contextlib.suppress(Exception):  # an estimate: what is unreadable is reported where it is read
            total = source.count()
        work = LongWork(what, total, "rows", about=True)
        for number, row in enumerate(source.located(), 1):
            yield row
            work.advance(number)

    def measured() -> Iterator[tuple[str, Row]]:
        work, done = LongWork(what, source.size, None), 0
        for place, row in source.located():
            yield place, row
            done += sum(len(text.encode()) for text in row.values() if isinstance(text, str))
            work.advance(done)

    return replace(source, located=counted if source.size is None else measured)


def _columns(kind: str, encoder: Encoder) -> dict[str, str]:
    tokens = "<u2" if encoder.vocabulary <= 1 << 16 else "<u4"
    return {
        "causal_lm": {"input_ids": tokens, "learned": "|u1"},
        "masked_lm": {"input_ids": tokens},
        "seq2seq": {"input_ids": tokens, "labels": tokens},
        "classification": {"input_ids": tokens, "label": "<i8"},
    }[kind]


def column(row: Row, name: str, source: Source, setting: str) -> Any:
    """Return a row's column.

    Raises:
        ConfigError: It is not there, or empty; the message names the row, and the columns it has.
    """
    try:
        value = row[name]
    except KeyError:
        place = source.where(lambda other: name not in other)
        raise ConfigError(
            f"{place}: no column {name!r}; there is {', '.join(map(str, sorted(row)))}",
            help=f"set {setting} to one of them",
        ) from None
    if value is None:
        raise ConfigError(
            f"{source.where(lambda other: other.get(name) is None)}: column {name!r} is empty",
            help="take the rows without a value out of the file",
        )
    return value


def _text(row: Row, name: str, source: Source, setting: str) -> str:
    value = column(row, name, source, setting)
    if not isinstance(value, str):
        place = source.where(lambda other: not isinstance(other.get(name), str))
        raise ConfigError(
            f"{place}: column {name!r} holds {type(value).__name__}, expected text",
            help=f"set {setting} to a column of text",
        )
    return value


def _groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield rows that are tokenised together: enough for all cores, few enough for progress and Ctrl-C."""
    group: list[Row] = []
    characters = 0
    for row in rows:
        group.append(row)
        characters += sum(len(text) for text in row.values() if isinstance(text, str))
        if len(group) >= _GROUP or characters >= _GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _causal(
    data: Data, encoder: Encoder, source: Source, facts: dict[str, Any]
) -> Iterator[Mapping[str, Any]]:
    rows = source.rows()
    first = next(rows, None)
    if first is None:
        return
    rows = itertools.chain([first], rows)
    messages = str(data.options.get("messages_column", "messages"))
    prompt = data.options.get("prompt_column")
    if messages in first and data.text_column not in first:
        yield from _chats(messages, data, encoder, source, rows)
        return
    if data.assistant_only_loss:
        raise ConfigError(
            f"data.assistant_only_loss needs a column of messages; {source.place} has "
            f"{', '.join(map(str, sorted(first)))}",
            help="set data.options.messages_column, or leave assistant_only_loss off",
        )
    if prompt is not None:
        yield from _completions(str(prompt), data, encoder, source, rows)
        return
    continued = False
    for group in _groups(rows):
        texts = [_text(row, data.text_column, source, "data.text_column") for row in group]
        for row, tokens in zip(group, encoder.encode(texts, special=False), strict=True):
            start = _start(encoder) if not continued else []
            continued = bool(row.get("continues", False))
            facts["open"] = continued
            ids = np.concatenate([start, tokens, [] if continued else _stop(encoder)]).astype(np.int64)
            yield {"input_ids": ids, "learned": np.ones(len(ids), dtype=np.uint8)}


def _start(encoder: Encoder) -> list[int]:
    """What the tokenizer itself puts before a text (Llama's begin-of-text; nothing for most)."""
    return encoder.frame[0]


def _stop(encoder: Encoder) -> list[int]:
    if encoder.frame[1]:
        return encoder.frame[1]
    return [encoder.eos] if encoder.eos is not None else []


def _chats(
    name: str, data: Data, encoder: Encoder, source: Source, rows: Iterator[Row]
) -> Iterator[Mapping[str, Any]]:
    from jinja2 import TemplateError

    turns = _turns(data)
    template = ChatTemplate(encoder.tokenizer, encoder.name, turns)
    learned_any = False
    for row in rows:
        messages = column(row, name, source, "data.options.messages_column")
        problem = problem_with(messages, turns)
        if problem is not None:
            place = source.where(lambda other: problem_with(other.get(name), turns) is not None)
            raise ConfigError(
                f"{place}: column {name!r}: {problem}", help='each message is {"role": ..., "content": ...}'
            )
        try:
            if data.assistant_only_loss:
                tokens, learned = template.encode_learned(messages, row.get("tools"))
            else:
                tokens = template.encode(messages, row.get("tools"))
                learned = np.ones(len(tokens), dtype=np.uint8)
        except TemplateError as error:
            raise ConfigError(
                f"{source.where(_equals(name, messages))}: the chat template of tokenizer {encoder.name} "
                f"refuses the conversation: {error}",
                help="check the roles and their order",
            ) from error
        learned_any = learned_any or bool(learned.any())
        yield {"input_ids": tokens, "learned": learned}
    if not learned_any:
        raise ConfigError(
            f"data {source.place}: no conversation contains a message of the assistant to learn from",
            help="check the roles, or leave data.assistant_only_loss off",
        )


def _equals(name: str, value: Any) -> Callable[[Row], bool]:
    return lambda row: row.get(name) == value


def _turns(data: Data) -> tuple[str, str] | None:
    """Return the texts around a turn of the assistant that the recipe gives."""
    given = data.options.get("assistant_turns")
    if given is None:
        return None
    if not isinstance(given, Sequence) or [type(part) for part in given] != [str, str] or not all(given):
        raise ConfigError(
            "data.options.assistant_turns is not a list of two texts",
            help='give what begins and what ends a turn: ["<|im_start|>assistant\\n", "<|im_end|>"]',
        )
    return str(given[0]), str(given[1])


def _completions(
    prompt: str, data: Data, encoder: Encoder, source: Source, rows: Iterator[Row]
) -> Iterator[Mapping[str, Any]]:
    for group in _groups(rows):
        prompts = [_text(row, prompt, source, "data.options.prompt_column") for row in group]
        answers = [_text(row, data.text_column, source, "data.text_column") for row in group]
        pairs = zip(
            encoder.encode(prompts, special=False), encoder.encode(answers, special=False), strict=True
        )
        for prompt_ids, answered in pairs:
            head = np.concatenate([_start(encoder), prompt_ids]).astype(np.int64)
            tail = np.concatenate([answered, _stop(encoder)]).astype(np.int64)
            learned = np.concatenate([np.zeros(len(head), np.uint8), np.ones(len(tail), np.uint8)])
            yield {"input_ids": np.concatenate([head, tail]), "learned": learned}


def _masked(
    data: Data, encoder: Encoder, source: Source, facts: dict[str, Any]
) -> Iterator[Mapping[str, Any]]:
    if encoder.mask is None:
        raise ConfigError(
            f"tokenizer {encoder.name} has no mask token, which masked_lm needs",
            help="choose an encoder's tokenizer, or data.tokenizer: bytes",
        )
    for row in _causal(data, encoder, source, facts):
        yield {"input_ids": row["input_ids"]}


def _pairs(data: Data, encoder: Encoder, source: Source, _: dict[str, Any]) -> Iterator[Mapping[str, Any]]:
    names = [
        str(data.options.get("source_column", "source")),
        str(data.options.get("target_column", "target")),
    ]
    prefix = str(data.options.get("prefix", ""))
    for group in _groups(source.rows()):
        sources = [prefix + _text(row, names[0], source, "data.options.source_column") for row in group]
        answers = [_text(row, names[1], source, "data.options.target_column") for row in group]
        encoded = zip(
            encoder.encode(sources, special=False), encoder.encode(answers, special=False), strict=True
        )
        for ids, labels in encoded:
            yield {"input_ids": _framed(ids, encoder), "labels": _framed(labels, encoder)}


def _framed(tokens: Any, encoder: Encoder) -> Any:
    return np.concatenate([_start(encoder), tokens, _stop(encoder)]).astype(np.int64)


def _labelled(
    data: Data, encoder: Encoder, source: Source, facts: dict[str, Any]
) -> Iterator[Mapping[str, Any]]:
    name = str(data.options.get("label_column", "label"))
    labels = _label_names(name, data, source)
    facts["labels"] = list(labels)
    numbers = {label: number for number, label in enumerate(labels)}
    for group in _groups(source.rows()):
        texts = [_text(row, data.text_column, source, "data.text_column") for row in group]
        for row, tokens in zip(group, encoder.encode(texts, special=False), strict=True):
            label = str(column(row, name, source, "data.options.label_column"))
            if label not in numbers:
                raise ConfigError(
                    f"data {source.place}: label {label!r} is not among {', '.join(labels)}",
                    help="name every label in data.options.labels",
                )
            yield {"input_ids": _framed(tokens, encoder), "label": [numbers[label]]}


def _label_names(name: str, data: Data, source: Source) -> list[str]:
    """The recipe's list, or every label that occurs: numbers in their order, names sorted."""
    listed = data.options.get("labels")
    if isinstance(listed, Sequence) and not isinstance(listed, str):
        return [str(label) for label in listed]
    seen = {str(column(row, name, source, "data.options.label_column")) for row in source.rows()}
    try:
        return sorted(seen, key=int)
    except ValueError:
        return sorted(seen)
