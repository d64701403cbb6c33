"""Rows to tokens, once: the result is a table on disk that every rank maps."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.records.recipe import Data
from fsdptool.runs.work import LongWork
from fsdptool.training.data.ragged import Ragged, RaggedWriter, made_once
from fsdptool.training.data.sources import Row, Source, open_source
from fsdptool.training.data.text import TEXT_SAMPLES
from fsdptool.training.data.text.common import framed
from fsdptool.training.data.tokenizer import Encoder

_VERSION = 4
"""Raised when the tables' meaning changes, so that old ones are not used."""


def tokenised(kind: str, data: Data, encoder: Encoder, *, cache: Path) -> Ragged:
    """Return the token table of a recipe's data, made now or found in ``cache``.

    Args:
        kind: What a sample is made of.
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
    options = {name: data.options[name] for name in TEXT_SAMPLES[kind].options if name in data.options}
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


def _make(kind: str, data: Data, encoder: Encoder, source: Source, folder: Path) -> None:
    text = TEXT_SAMPLES[kind]
    facts: dict[str, Any] = {"kind": kind, "tokenizer": encoder.name, "source": source.place}
    source = _with_progress(source)
    tokens = "<u2" if encoder.vocabulary <= 1 << 16 else "<u4"
    with RaggedWriter(folder, text.columns(tokens)) as writer:
        longest = -1
        for values in text.tokenise(data, encoder, source, facts):
            longest = max(longest, len(values["input_ids"]))
            writer.extend(values)
            if not facts.pop("open", False):
                writer.end()
        if longest < 0:
            raise ConfigError(
                f"data {source.place} has no rows", help="check data.path, data.split and the files' content"
            )
        if longest <= len(framed([], encoder)):
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
