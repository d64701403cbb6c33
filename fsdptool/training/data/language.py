"""Samples of text for every language objective: tokens, part of the data, packing, names of the batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import TensorSpec
from fsdptool.families.registry import family_of
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Data, Recipe
from fsdptool.training.data.loader import Collate, Samples, Stack, TrimmedStack
from fsdptool.training.data.order import FittedPacking, WrappedPacking, fit, mix, single, wrap
from fsdptool.training.data.ragged import Ragged
from fsdptool.training.data.tokenise import tokenised
from fsdptool.training.data.tokenizer import Encoder, load_tokenizer

IGNORED = -100
"""Label of a token that is not learned (torch's ``cross_entropy`` default)."""

Packing = WrappedPacking | FittedPacking


def _digest(*parts: Any) -> str:
    digest = hashlib.blake2b(digest_size=20)
    for part in parts:
        digest.update(repr(part).encode())
    return digest.hexdigest()


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
        self.digest = _digest(table.digest, length, document_mask, _fingerprint(packing))

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
        self.digest = _digest(inner.digest, share, seed)

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
        self.digest = _digest(table.digest, length, target_length, rows.tobytes())

    def __len__(self) -> int:
        return len(self._rows)

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        """Return one pair; ``epoch`` changes nothing."""
        row = int(self._rows[index])
        tokens, mask = padded(self._table.row("input_ids", row), self._length, self._pad)
        labels, _ = padded(self._table.row("labels", row), self._target_length, IGNORED)
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


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
        self.digest = _digest(table.digest, length, rows.tobytes())

    def __len__(self) -> int:
        return len(self._rows)

    def sample(self, index: int, epoch: int) -> Mapping[str, Any]:
        """Return one text and its class; ``epoch`` changes nothing."""
        row = int(self._rows[index])
        tokens, mask = padded(self._table.row("input_ids", row), self._length, self._pad)
        return {"input_ids": tokens, "attention_mask": mask, "labels": self._table.row("label", row)[0]}


def padded(row: NDArray[Any], length: int, pad: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a row cut or filled to ``length``, and where it is real (1) or filled (0)."""
    found = np.full(length, pad, dtype=np.int64)
    if len(row) > length:
        found[: length - 1] = row[: length - 1]
        found[-1] = row[-1]
    else:
        found[: len(row)] = row
    return found, (np.arange(length) < len(row)).astype(np.int64)


Wanted = Mapping[str, TensorSpec]
"""What the family says a micro-batch is, by name."""

_HASH_RANGE = 1 << 63


@dataclass(frozen=True, slots=True)
class _Material:
    """What samples are made of: a tokenised table, its rows of one part, and what a batch holds."""

    table: Ragged
    rows: NDArray[np.int64]
    encoder: Encoder
    recipe: Recipe
    data: Data
    wanted: Wanted


def open_language(
    kind: str, recipe: Recipe, spec: ModelSpec, data: Data, cache: Path, part: str
) -> tuple[Samples, Collate]:
    """Return the samples of one part (``train``, ``held_out``, ``all``) and how they are collated.

    Raises:
        ConfigError: The data or the tokenizer cannot be used, or does not suit the model.
        StorageError: The cache cannot be written.
    """
    batch_spec = {item.name: item for item in family_of(spec).batch_spec(spec.config, recipe)}
    tokens = batch_spec.get("input_ids")
    if tokens is None:
        raise ConfigError(
            f"{spec.model_class} does not take text under objective {kind}",
            help="choose another data.source, or synthetic",
        )
    encoder = load_tokenizer(data, spec, vocabulary=tokens.high)
    table = tokenised(kind, data, encoder, cache=cache)
    rows = _part(table, part, recipe.evaluation.holdout, data)
    if kind == "classification":
        _check_labels(table, batch_spec, spec)
    samples = _MAKERS[kind](_Material(table, rows, encoder, recipe, data, batch_spec))
    if len(samples) == 0:
        raise ConfigError(
            f"data {table.facts['source']} has no tokens", help="check data.path and the files' content"
        )
    if data.padded == "longest":
        if kind == "seq2seq":
            raise ConfigError(
                "data.padding: longest is not supported under objective seq2seq: pairs have two lengths",
                help="set data.padding: length",
            )
        return samples, TrimmedStack(only=frozenset(batch_spec))
    return samples, Stack(only=frozenset(batch_spec))


def _check_labels(table: Ragged, batch_spec: Wanted, spec: ModelSpec) -> None:
    known, names = batch_spec["labels"].high, table.facts["labels"]
    if known is not None and known > 1 and len(names) > known:
        raise ConfigError(
            f"data {table.facts['source']} has {len(names)} labels, {spec.reference.id} predicts {known}",
            help=f"set model.overrides.num_labels: {len(names)}",
        )


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


def _sequences(of: _Material) -> Sequences:
    lengths = of.table.lengths("input_ids")
    rows = of.rows[lengths[of.rows] > 0]
    length = of.wanted["input_ids"].shape[-1]
    strategy = of.data.options.get("packing", "fit" if of.data.assistant_only_loss else "wrap")
    if strategy not in ("wrap", "fit"):
        raise ConfigError(f"data.options.packing {strategy!r} is neither wrap nor fit")
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


def _make_causal(of: _Material) -> Samples:
    if of.data.packing and of.data.document_mask and "position_ids" not in of.wanted:
        raise ConfigError(
            "data.document_mask is not supported: this model cannot separate documents that share a sequence"
            " (its layers carry a state from token to token, or take no positions)",
            help="set data.document_mask: false (documents attend to one another), or data.packing: false",
        )
    return _sequences(of)


def _make_masked(of: _Material) -> Samples:
    assert of.encoder.mask is not None  # the table could not have been made without
    known = np.asarray(of.encoder.tokenizer.all_special_ids, dtype=np.int64)
    return MaskedSequences(
        _sequences(of),
        specials=np.union1d(known, [of.encoder.pad]),
        mask=of.encoder.mask,
        vocabulary=of.encoder.vocabulary,
        share=float(of.data.options.get("mask_share", 0.15)),
        seed=of.recipe.seed,
    )


def _make_pairs(of: _Material) -> Samples:
    length, target_length = of.wanted["input_ids"].shape[-1], of.wanted["labels"].shape[-1]
    return Pairs(of.table, of.rows, length=length, target_length=target_length, pad=of.encoder.pad)


def _make_labelled(of: _Material) -> Samples:
    return Labelled(of.table, of.rows, length=of.wanted["input_ids"].shape[-1], pad=of.encoder.pad)


_MAKERS: dict[str, Callable[[_Material], Samples]] = {
    "causal_lm": _make_causal,
    "masked_lm": _make_masked,
    "seq2seq": _make_pairs,
    "classification": _make_labelled,
}
