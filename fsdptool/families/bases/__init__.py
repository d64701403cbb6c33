"""Base classes for families made of data, and of transformers models (docs/how-to/add-a-family.md)."""

from fsdptool.families.bases.catalogue import CatalogueFamily, FamilyCard, read_cards, read_flavours
from fsdptool.families.bases.families import TransformersFamily

__all__ = [
    "CatalogueFamily",
    "FamilyCard",
    "TransformersFamily",
    "read_cards",
    "read_flavours",
]
