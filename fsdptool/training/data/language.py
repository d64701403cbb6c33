"""Samples of text for a language objective: table, part, packing, and what the family's batch names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import TensorSpec
from fsdptool.families.registry import family_of
from fsdptool.records.model import ModelSpec
from fsdptool.records.recipe import Data, Recipe
from fsdptool.training.data.collate import Stack
from fsdptool.training.data.loader import Collate, Samples
from fsdptool.training.data.packing import fit, single, wrap
from fsdptool.training.data.ragged import Ragged
from fsdptool.training.data.text import Labelled, MaskedSequences, Packing, Pairs, Sequences
from fsdptool.training.data.tokenise import tokenised
from fsdptool.training.data.tokenizer import Encoder, load_tokenizer

Wanted = Mapping[str, TensorSpec]
"""What the family says a micro-batch is, by name."""

_HASH_RANGE = 1 << 63
LANGUAGE = ("causal_lm", "masked_lm", "seq2seq", "classification")
"""Objectives whose samples are made of text."""


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
    wanted = {item.name: item for item in family_of(spec).batch_spec(spec.config, recipe)}
    tokens = wanted.get("input_ids")
    if tokens is None:
        raise ConfigError(
            f"{spec.model_class} takes no text under objective {kind}",
            help="choose another data.source, or synthetic",
        )
    encoder = load_tokenizer(data, spec, vocabulary=tokens.high)
    table = tokenised(kind, data, encoder, cache=cache)
    rows = _part(table, part, recipe.evaluation.holdout, data)
    if kind == "classification":
        _check_labels(table, wanted, spec)
    samples = _MAKERS[kind](_Material(table, rows, encoder, recipe, data, wanted))
    if len(samples) == 0:
        raise ConfigError(
            f"data {table.facts['source']} has no tokens", help="check data.path and the files' content"
        )
    return samples, Stack(only=frozenset(wanted))


def _check_labels(table: Ragged, wanted: Wanted, spec: ModelSpec) -> None:
    known, names = wanted["labels"].high, table.facts["labels"]
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
    found = every[held_out] if part == "held_out" else every[~held_out]
    if len(found) == 0:
        raise ConfigError(
            f"evaluation.holdout {holdout} of {len(table)} documents in {data.path} leaves none to "
            f"{'evaluate on' if part == 'held_out' else 'train on'}",
            help="choose another share, or give evaluation.data",
        )
    return found


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
            "data.document_mask cannot be had: this model cannot keep documents apart that share a sequence"
            " (its layers carry a state from token to token, or take no positions)",
            help="let documents run into one another (data.document_mask: false), or set data.packing: false",
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
