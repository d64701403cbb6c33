"""What kinds of samples of text share: the kind itself, reading columns, framing and padding tokens."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import TensorSpec
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Data, Recipe
from fsdptool.training.data.loader import Samples
from fsdptool.training.data.ragged import Ragged
from fsdptool.training.data.sources import Row, Source
from fsdptool.training.data.tokenizer import Encoder

IGNORED = -100
"""Label of a token that is not learned (torch's ``cross_entropy`` default)."""

_GROUP, _GROUP_CHARACTERS = 512, 1 << 21

Wanted = Mapping[str, TensorSpec]
"""What the family says a micro-batch is, by name."""


@dataclass(frozen=True, slots=True)
class Material:
    """What samples are made of: a tokenised table, its rows of one part, and what a batch holds."""

    table: Ragged
    rows: NDArray[np.int64]
    encoder: Encoder
    recipe: Recipe
    data: Data
    wanted: Wanted


class TextSamples(ABC):
    """A kind of samples of text: how a row becomes tokens, once, and how tokens become a sample."""

    options: tuple[str, ...] = ()
    """Names in ``data.options`` on which the tokens depend."""

    @abstractmethod
    def columns(self, tokens: str) -> dict[str, str]:
        """Return the columns of the table of tokens and their numpy types; ``tokens`` is that of a token.

        One of them is ``input_ids``.
        """

    @abstractmethod
    def tokenise(
        self, data: Data, encoder: Encoder, source: Source, facts: dict[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the columns of one row after another.

        Args:
            data: The recipe's data section.
            encoder: The tokenizer.
            source: The rows.
            facts: Kept with the table; ``open`` joins the row that is yielded next to this one.

        Raises:
            ConfigError: A row lacks a column, or its content is not what it should be.
        """

    @abstractmethod
    def samples(self, of: Material) -> Samples:
        """Return the samples of a table.

        Raises:
            ConfigError: The model or the recipe does not suit them.
        """

    def check(self, table: Ragged, wanted: Wanted, spec: ModelSpec) -> None:
        """Refuse a table that the model cannot learn from.

        Raises:
            ConfigError: It cannot.
        """
        return


def digest_of(*parts: Any) -> str:
    """Return the digest of values by their representation."""
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(repr(part).encode())
    return digest.hexdigest()


def padded(row: NDArray[Any], length: int, pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a row cut or filled to ``length``, and where it is real (1) or filled (0)."""
    found = np.full(length, pad, dtype=np.int64)
    if len(row) > length:
        found[: length - 1] = row[: length - 1]
        found[-1] = row[-1]
    else:
        found[: len(row)] = row
    return found, (np.arange(length) < len(row)).astype(np.int64)


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


def text_column(row: Row, name: str, source: Source, setting: str) -> str:
    """Return a row's column of text.

    Raises:
        ConfigError: It is not there, or not text.
    """
    value = column(row, name, source, setting)
    if not isinstance(value, str):
        place = source.where(lambda other: not isinstance(other.get(name), str))
        raise ConfigError(
            f"{place}: column {name!r} holds {type(value).__name__}, expected text",
            help=f"set {setting} to a column of text",
        )
    return value


def groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
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


def start_tokens(encoder: Encoder) -> list[int]:
    """Return what the tokenizer itself puts before a text (Llama's begin-of-text; nothing for most)."""
    return encoder.frame[0]


def stop_tokens(encoder: Encoder) -> list[int]:
    """Return what the tokenizer itself puts behind a text, else its end-of-text token if it has one."""
    if encoder.frame[1]:
        return encoder.frame[1]
    return [encoder.eos] if encoder.eos is not None else []


def framed(tokens: Any, encoder: Encoder) -> Any:
    """Return tokens with what belongs before and behind them, [length] int64."""
    return np.concatenate([start_tokens(encoder), tokens, stop_tokens(encoder)]).astype(np.int64)
