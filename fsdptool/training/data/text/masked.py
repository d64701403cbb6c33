"""Texts with masked tokens, which an encoder predicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import ConfigError
from fsdptool.records.recipe import Data
from fsdptool.training.data.loader import Samples
from fsdptool.training.data.order import mix
from fsdptool.training.data.sources import Source
from fsdptool.training.data.text.common import IGNORED, Material, TextSamples, digest_of
from fsdptool.training.data.text.documents import Sequences, sequences, tokenise_documents
from fsdptool.training.data.tokenizer import Encoder


class Masked(TextSamples):
    """Documents of which some tokens are masked, drawn anew in each epoch."""

    def columns(self, tokens: str) -> dict[str, str]:
        """Return the tokens."""
        return {"input_ids": tokens}

    def tokenise(
        self, data: Data, encoder: Encoder, source: Source, facts: dict[str, Any]
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
            share=float(of.data.options.get("mask_share", 0.15)),
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
