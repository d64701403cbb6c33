"""Samples of text: tokens, the part of the data, and how samples are collated."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.families.protocol import Objective
from fsdptool.inspection import micro_batch
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.recipe import Data, Recipe
from fsdptool.training.data.loader import Collate, Samples, Stack, TrimmedStack
from fsdptool.training.data.ragged import Ragged
from fsdptool.training.data.text import TEXT_SAMPLES
from fsdptool.training.data.text.common import Material
from fsdptool.training.data.tokenise import tokenised
from fsdptool.training.data.tokenizer import load_tokenizer

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
