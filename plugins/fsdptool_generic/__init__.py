"""Families that serve everything unregistered, through transformers and diffusers themselves."""

from __future__ import annotations

from collections.abc import Iterable

from fsdptool.families.protocol import Family


def families() -> Iterable[Family]:
    """Yield the families of this package."""
    from fsdptool_generic.family import GenericFamily

    return (GenericFamily(),)
