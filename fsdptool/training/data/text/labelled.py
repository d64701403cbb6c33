"""Texts with a class each, and texts with a target text each, for encoder-decoders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Data
from fsdptool.training.data.loader import Samples
from fsdptool.training.data.ragged import Ragged
from fsdptool.training.data.sources import SampleSource
from fsdptool.training.data.text.common import (
    IGNORED,
    Material,
    TextSamples,
    Wanted,
    column,
    digest_of,
    framed,
    groups,
    padded,
    text_column,
)
from fsdptool.training.data.tokenizer import Encoder


class LabelledTexts(TextSamples):
    """A column of texts and one of labels."""

    options = ("label_column", "labels")

    def columns(self, tokens: str) -> dict[str, str]:
        """Return the tokens and the number of the label."""
        return {"input_ids": tokens, "label": "<i8"}

    def tokenise(
        self, data: Data, encoder: Encoder, source: SampleSource, facts: dict[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the tokens and the label of one text after another."""
        name = data.options.get("label_column", "label")
        labels = _label_names(name, data, source)
        facts["labels"] = list(labels)
        numbers = {label: number for number, label in enumerate(labels)}
        for group in groups(source.rows()):
            texts = [text_column(row, data.text_column, source, "data.text_column") for row in group]
            for row, tokens in zip(group, encoder.encode(texts, special=False), strict=True):
                label = str(column(row, name, source, "data.options.label_column"))
                if label not in numbers:
                    raise ConfigError(
                        f"data {source.place}: label {label!r} is not among {', '.join(labels)}",
                        help="name every label in data.options.labels",
                    )
                yield {"input_ids": framed(tokens, encoder), "label": [numbers[label]]}

    def samples(self, of: Material) -> Samples:
        """Return texts padded to the length of the family's batch."""
        return Labelled(of.table, of.rows, length=of.wanted["input_ids"].shape[-1], pad=of.encoder.pad)

    def check(self, table: Ragged, wanted: Wanted, spec: ModelSpec) -> None:
        """Refuse more labels than the model predicts.

        Raises:
            ConfigError: There are more.
        """
        known, names = wanted["labels"].high, table.facts["labels"]
        if known is not None and known > 1 and len(names) > known:
            raise ConfigError(
                f"data {table.facts['source']} has {len(names)} labels, {spec.reference.id} predicts {known}",
                help=f"set model.overrides.num_labels: {len(names)}",
            )


class Labelled:
    """Texts with a class each.

    Args:
        table: Columns ``input_ids`` and ``label``.
        rows: The rows used.
        length: Tokens of a text; longer ones are cut, their last token kept.
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
        """Return one text and its class; ``epoch`` changes nothing."""
        row = int(self._rows[index])
        tokens, mask = padded(self._table.row("input_ids", row), self._length, self._pad)
        return {"input_ids": tokens, "attention_mask": mask, "labels": self._table.row("label", row)[0]}


def _label_names(name: str, data: Data, source: SampleSource) -> list[str]:
    """The recipe's list, or every label that occurs: numbers in their order, names sorted."""
    listed = data.options.get("labels")
    if listed is not None:
        return [str(label) for label in listed]
    seen = {str(column(row, name, source, "data.options.label_column")) for row in source.rows()}
    try:
        return sorted(seen, key=int)
    except ValueError:
        return sorted(seen)


class SourcesAndTargets(TextSamples):
    """A column of sources and one of targets."""

    options = ("source_column", "target_column", "prefix")

    def columns(self, tokens: str) -> dict[str, str]:
        """Return the tokens of source and target."""
        return {"input_ids": tokens, "labels": tokens}

    def tokenise(
        self, data: Data, encoder: Encoder, source: SampleSource, facts: dict[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the tokens of one pair after another."""
        names = [
            data.options.get("source_column", "source"),
            data.options.get("target_column", "target"),
        ]
        prefix = data.options.get("prefix", "")
        for group in groups(source.rows()):
            sources = [
                prefix + text_column(row, names[0], source, "data.options.source_column") for row in group
            ]
            answers = [text_column(row, names[1], source, "data.options.target_column") for row in group]
            encoded = zip(
                encoder.encode(sources, special=False), encoder.encode(answers, special=False), strict=True
            )
            for ids, labels in encoded:
                yield {"input_ids": framed(ids, encoder), "labels": framed(labels, encoder)}

    def samples(self, of: Material) -> Samples:
        """Return pairs padded to the lengths of the family's batch."""
        length, target_length = of.wanted["input_ids"].shape[-1], of.wanted["labels"].shape[-1]
        return Pairs(of.table, of.rows, length=length, target_length=target_length, pad=of.encoder.pad)


class Pairs:
    """Source and target sequences for encoder-decoders, padded to fixed lengths.

    Args:
        table: Columns ``input_ids`` and ``labels``.
        rows: The rows used.
        length, target_length: Tokens of source and target; longer ones are cut, their last token kept.
        pad: Token that fills the source; the target is filled with -100.
    """

    def __init__(
        self, table: Ragged, rows: NDArray[np.int64], *, length: int, target_length: int, pad: int
    ) -> None:
        self._table = table
        self._rows = rows
        self._length = length
        self._target_length = target_length
        self._pad = pad
        self.digest = digest_of(table.digest, length, target_length, rows.tobytes())

    def __len__(self) -> int:
        return len(self._rows)

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        """Return one pair; ``epoch`` changes nothing."""
        row = int(self._rows[index])
        tokens, mask = padded(self._table.row("input_ids", row), self._length, self._pad)
        labels, _ = padded(self._table.row("labels", row), self._target_length, IGNORED)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}
