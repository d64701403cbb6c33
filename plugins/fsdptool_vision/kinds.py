"""Which class makes a family, by the ``kind`` of its card."""

from __future__ import annotations

from collections.abc import Mapping

from fsdptool.families.bases import CatalogueFamily, TransformersFamily

KINDS: Mapping[str, type[CatalogueFamily]] = {"": TransformersFamily}
