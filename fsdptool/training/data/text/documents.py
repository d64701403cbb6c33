"""Texts to continue: documents packed into sequences, prompts with answers, conversations. Texts with masked
tokens, which an encoder predicts, are packed in the same way.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.records.recipe import Data
from fsdptool.training.data.loader import Samples
from fsdptool.training.data.order import FittedPacking, WrappedPacking, fit, mix, single, wrap
from fsdptool.training.data.ragged import Ragged
from fsdptool.training.data.sources import Row, SampleSource
from fsdptool.training.data.text.common import (
    IGNORED,
    ChatTemplate,
    Material,
    TextSamples,
    column,
    digest_of,
    groups,
    problem_with,
    start_tokens,
    stop_tokens,
    text_column,
)
from fsdptool.training.data.tokenizer import Encoder

Packing = WrappedPacking | FittedPacking


class Documents(TextSamples):
    """Documents, answers to prompts, or conversations, whichever columns the rows have."""

    options = ("messages_column", "assistant_turns", "prompt_column")

    def columns(self, tokens: str) -> dict[str, str]:
        """Return the tokens, and whether each is learned."""
        return {"input_ids": tokens, "learned": "|u1"}

    def tokenise(
        self, data: Data, encoder: Encoder, source: SampleSource, facts: dict[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the tokens of one document, answer or conversation after another."""
        yield from tokenise_documents(data, encoder, source, facts)

    def samples(self, of: Material) -> Samples:
        """Return packed or padded sequences.

        Raises:
            ConfigError: The model cannot separate documents that share a sequence.
        """
        if of.data.packing and of.data.document_mask and "position_ids" not in of.wanted:
            raise ConfigError(
                "data.document_mask is not supported: this model cannot separate documents that share a"
                " sequence (its layers carry a state from token to token, or take no positions)",
                help="set data.document_mask: false (documents attend to one another), or packing: false",
            )
        return sequences(of)


def tokenise_documents(
    data: Data, encoder: Encoder, source: SampleSource, facts: dict[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield the columns of :class:`Documents`."""
    rows = source.rows()
    first = next(rows, None)
    if first is None:
        return
    rows = itertools.chain([first], rows)
    messages = data.options.get("messages_column", "messages")
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
    for group in groups(rows):
        texts = [text_column(row, data.text_column, source, "data.text_column") for row in group]
        for row, tokens in zip(group, encoder.encode(texts, special=False), strict=True):
            head = start_tokens(encoder) if not continued else []
            continued = bool(row.get("continues", False))
            facts["open"] = continued
            ids = np.concatenate([head, tokens, [] if continued else stop_tokens(encoder)]).astype(np.int64)
            yield {"input_ids": ids, "learned": np.ones(len(ids), dtype=np.uint8)}


def _chats(
    name: str, data: Data, encoder: Encoder, source: SampleSource, rows: Iterator[Row]
) -> Iterator[Mapping[str, Any]]:
    from jinja2 import TemplateError

    turns = data.options.get("assistant_turns")
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


def _completions(
    prompt: str, data: Data, encoder: Encoder, source: SampleSource, rows: Iterator[Row]
) -> Iterator[Mapping[str, Any]]:
    for group in groups(rows):
        prompts = [text_column(row, prompt, source, "data.options.prompt_column") for row in group]
        answers = [text_column(row, data.text_column, source, "data.text_column") for row in group]
        pairs = zip(
            encoder.encode(prompts, special=False), encoder.encode(answers, special=False), strict=True
        )
        for prompt_ids, answered in pairs:
            head = np.concatenate([start_tokens(encoder), prompt_ids]).astype(np.int64)
            tail = np.concatenate([answered, stop_tokens(encoder)]).astype(np.int64)
            learned = np.concatenate([np.zeros(len(head), np.uint8), np.ones(len(tail), np.uint8)])
            yield {"input_ids": np.concatenate([head, tail]), "learned": learned}


class Sequences:
    """Packed or padded sequences for causal language models.

    A sample has ``length`` entries of ``input_ids``, ``labels`` (unshifted; -100 where nothing is
    learned), ``attention_mask`` (0 where filled up) and ``position_ids`` that start again with each
    document. With ``document_mask`` the first token of a piece is not a label: it would be predicted
    from another document. The loader hands on what the family's batch asks for.

    Args:
        table: Columns ``input_ids`` and, if labels are wanted, ``learned``.
        packing: Which pieces make a sequence.
        length: Tokens of a sample.
        pad: Token that fills up.
        document_mask: Whether attention stays within a document.
    """

    def __init__(
        self, table: Ragged, packing: Packing, *, length: int, pad: int, document_mask: bool
    ) -> None:
        self._table = table
        self._packing = packing
        self._length = length
        self._pad = pad
        self._document_mask = document_mask
        self.digest = digest_of(table.digest, length, document_mask, _fingerprint(packing))

    def __len__(self) -> int:
        return len(self._packing)

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        """Return one sequence; ``epoch`` changes nothing."""
        tokens = np.full(self._length, self._pad, dtype=np.int64)
        labels = np.full(self._length, IGNORED, dtype=np.int64)
        positions = np.zeros(self._length, dtype=np.int64)
        at = 0
        for document, start, stop in self._packing.pieces(index):
            size = stop - start
            ids = self._table.row("input_ids", document)[start:stop].astype(np.int64)
            tokens[at : at + size] = ids
            if "learned" in self._table.columns:
                learned = self._table.row("learned", document)[start:stop].astype(bool)
                labels[at : at + size] = np.where(learned, ids, IGNORED)
            if self._document_mask or at == 0:
                labels[at] = IGNORED
            positions[at : at + size] = np.arange(size)
            at += size
        positions[at:] = np.arange(self._length - at)
        filled = (np.arange(self._length) < at).astype(np.int64)
        return {"input_ids": tokens, "labels": labels, "attention_mask": filled, "position_ids": positions}


def _fingerprint(packing: Packing) -> str:
    if isinstance(packing, WrappedPacking):
        return hashlib.blake2b(packing.documents.tobytes(), digest_size=8).hexdigest()
    return hashlib.blake2b(repr(packing.bins).encode(), digest_size=8).hexdigest()


def sequences(of: Material) -> Sequences:
    """Return the sequences that the recipe's packing makes of a table."""
    lengths = of.table.lengths("input_ids")
    rows = of.rows[lengths[of.rows] > 0]
    length = of.wanted["input_ids"].shape[-1]
    strategy = of.data.options.get("packing", "fit" if of.data.assistant_only_loss else "wrap")
    packing: Packing
    if not of.data.packing:
        packing = single(lengths, rows, length=length)
    elif strategy == "wrap":
        packing = wrap(lengths, rows, length=length, seed=of.recipe.seed)
    else:
        packing = fit(lengths, rows, length=length)
    # The family knows whether the model can tell documents apart by their positions.
    known = "position_ids" in of.wanted
    return Sequences(of.table, packing, length=length, pad=of.encoder.pad, document_mask=known)


class Masked(TextSamples):
    """Documents of which some tokens are masked, drawn anew in each epoch."""

    def columns(self, tokens: str) -> dict[str, str]:
        """Return the tokens."""
        return {"input_ids": tokens}

    def tokenise(
        self, data: Data, encoder: Encoder, source: SampleSource, facts: dict[str, Any]
    ) -> Iterator[Mapping[str, Any]]:
        """Yield the tokens of one document after another.

        Raises:
            ConfigError: The tokenizer has no mask token.
        """
        if encoder.mask is None:
            raise ConfigError(
                f"tokenizer {encoder.name} has no mask token, which masked_lm needs",
                help="choose an encoder's tokenizer, or data.tokenizer: bytes",
            )
        for row in tokenise_documents(data, encoder, source, facts):
            yield {"input_ids": row["input_ids"]}

    def samples(self, of: Material) -> Samples:
        """Return sequences with ``data.options.mask_share`` of their tokens masked."""
        assert of.encoder.mask is not None  # the table could not have been made without
        known = np.asarray(of.encoder.tokenizer.all_special_ids, dtype=np.int64)
        return MaskedSequences(
            sequences(of),
            specials=np.union1d(known, [of.encoder.pad]),
            mask=of.encoder.mask,
            vocabulary=of.encoder.vocabulary,
            share=of.data.options.get("mask_share", 0.15),
            seed=of.recipe.seed,
        )


class MaskedSequences:
    """Sequences for masked language models (Devlin et al. 2018): 15 % chosen; of those 80 % masked,
    10 % replaced, 10 % kept. What is chosen depends on (seed, epoch, sample) alone.

    Args:
        inner: The unmasked sequences.
        specials: Ids that are never chosen.
        mask: Id of the mask token.
        vocabulary: Ids a replacement is drawn from.
        share: Share of tokens chosen.
        seed: The run's seed.
    """

    def __init__(
        self,
        inner: Sequences,
        *,
        specials: NDArray[np.int64],
        mask: int,
        vocabulary: int,
        share: float,
        seed: int,
    ) -> None:
        self._inner = inner
        self._specials = specials
        self._mask = mask
        self._vocabulary = vocabulary
        self._share = share
        self._seed = seed
        self.digest = digest_of(inner.digest, share, seed)

    def __len__(self) -> int:
        return len(self._inner)

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        """Return one sequence, masked as (seed, epoch, index) says."""
        sample = dict(self._inner.sample(index, epoch))
        tokens = sample["input_ids"]
        length = len(tokens)
        draw = np.random.Generator(np.random.Philox(key=mix(self._seed, epoch, index, 5)))
        choice, kind = draw.random(length), draw.random(length)
        replacement = (draw.random(length) * self._vocabulary).astype(np.int64)
        eligible = sample["attention_mask"].astype(bool) & ~np.isin(tokens, self._specials)
        chosen = eligible & (choice < self._share)
        if eligible.any() and not chosen.any():
            # A short sequence must not be empty: the eligible token with the lowest draw is chosen.
            chosen[np.where(eligible, choice, 2.0).argmin()] = True
        masked = np.where(kind < 0.8, self._mask, np.where(kind < 0.9, replacement, tokens))
        sample["labels"] = np.where(chosen, tokens, IGNORED)
        sample["input_ids"] = np.where(chosen, masked, tokens)
        return sample
