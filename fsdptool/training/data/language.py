"""Samples of text: rows become tokens once, in a table on disk that every rank maps; each rank collates its
part.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import Objective
from fsdptool.inspection import micro_batch
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Data, Recipe
from fsdptool.runs.work import LongWork
from fsdptool.training.data.loader import Collate, Samples, Stack, TrimmedStack
from fsdptool.training.data.ragged import Ragged, RaggedWriter, made_once
from fsdptool.training.data.sources import Row, SampleSource, open_source
from fsdptool.training.data.text import TEXT_SAMPLES
from fsdptool.training.data.text.common import Material, framed
from fsdptool.training.data.tokenizer import Encoder, load_tokenizer

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


def _key(kind: str, data: Data, encoder: Encoder, source: SampleSource) -> str:
    options = {name: value for name, value in data.options.items() if name in TEXT_SAMPLES[kind].options}
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


def _make(kind: str, data: Data, encoder: Encoder, source: SampleSource, folder: Path) -> None:
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


def _with_progress(source: SampleSource) -> SampleSource:
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


_HASH_RANGE = 1 << 63


def open_language(
    objective: Objective, recipe: Recipe, spec: ModelSpec, data: Data, cache: Path, part: str
) -> tuple[Samples, Collate]:
    """Return the samples of one part (``train``, ``held_out``, ``all``) and how they are collated.

    Raises:
        ConfigError: The data or the tokenizer cannot be used, or does not suit the model.
        StorageError: The cache cannot be written.
    """
    kind = objective.samples
    if kind is None or kind not in TEXT_SAMPLES:
        raise ConfigError(
            f"objective {objective.name} cannot be trained on data.source {data.source}",
            help=f"that source serves {', '.join(text_objectives())}; use synthetic for others",
        )
    batch_spec = {item.name: item for item in micro_batch.batch_spec(spec, recipe)}
    tokens = batch_spec.get("input_ids")
    if tokens is None:
        raise ConfigError(
            f"{spec.model_class} does not take text under objective {objective.name}",
            help="choose another data.source, or synthetic",
        )
    encoder = load_tokenizer(data, spec, vocabulary=tokens.high)
    table = tokenised(kind, data, encoder, cache=cache)
    rows = _part(table, part, recipe.evaluation.holdout, data)
    TEXT_SAMPLES[kind].check(table, batch_spec, spec)
    samples = TEXT_SAMPLES[kind].samples(Material(table, rows, encoder, recipe, data, batch_spec))
    if len(samples) == 0:
        raise ConfigError(
            f"data {table.facts['source']} has no tokens", help="check data.path and the files' content"
        )
    if data.padded == "longest":
        if not objective.single_length:
            raise ConfigError(
                f"data.padding: longest is not supported under objective {objective.name}: the texts of a"
                " sample have lengths of their own",
                help="set data.padding: length",
            )
        return samples, TrimmedStack(only=frozenset(batch_spec))
    return samples, Stack(only=frozenset(batch_spec))


def _part(table: Ragged, part: str, holdout: float, data: Data) -> NDArray[np.int64]:
    """Documents of one part: held out by the hash of their content, so a split survives reordering."""
    every = np.arange(len(table), dtype=np.int64)
    if part == "all" or holdout <= 0.0:
        return every
    if holdout >= 1.0:
        raise ConfigError(f"evaluation.holdout is {holdout}", help="give a share below 1, for example 0.05")
    held_out = table.hashes() < int(holdout * _HASH_RANGE)
    documents = every[held_out] if part == "held_out" else every[~held_out]
    if len(documents) == 0:
        raise ConfigError(
            f"evaluation.holdout {holdout} of {len(table)} documents in {data.path} leaves none to "
            f"{'evaluate on' if part == 'held_out' else 'train on'}",
            help="choose another share, or give evaluation.data",
        )
    return documents


def text_objectives() -> list[str]:
    """Return the objectives of the library that are trained on samples of text."""
    from fsdptool.families.objectives import TRANSFORMERS

    return [name for name, objective in TRANSFORMERS.items() if objective.samples in TEXT_SAMPLES]
