"""Text families: decoders, encoders, encoder-decoders."""

from __future__ import annotations

from collections.abc import Iterable

from fsdptool.families.protocol import Family


def families() -> Iterable[Family]:
    """Yield the families of this package: all of them are plain transformers models."""
    from fsdptool.families.bases.catalogue import instances, read_cards
    from fsdptool.families.bases.families import TransformersFamily

    return instances(read_cards(__name__), {"": TransformersFamily})
