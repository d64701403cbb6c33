"""Base classes for families made of transformers or diffusers models (docs/how-to/add-a-family.md)."""

from fsdptool.families.bases.catalogue import CatalogueFamily, FamilyCard, read_cards, read_flavours
from fsdptool.families.bases.families import DiffusersFamily, TransformersFamily

__all__ = [
    "CatalogueFamily",
    "DiffusersFamily",
    "FamilyCard",
    "TransformersFamily",
    "read_cards",
    "read_flavours",
]
