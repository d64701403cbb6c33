"""Inspect a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdptool.inspection.document import View, describe
from fsdptool.records.recipe import Layout


def detect(
    progress: Callable[[str], None],
    *,
    reference: str,
    wrap: Sequence[str],
    world_size: int | None,
    layout: Layout,
    revision: str | None,
    component: str | None,
    stamp: object,
) -> dict[str, Any]:
    """Return the document of ``detect`` with every view, and the classes that are detected without ``wrap``.

    Args:
        progress: Takes texts of progress.
        reference: Model reference.
        wrap: Classes to wrap; empty takes the detected ones.
        world_size: Ranks that share the parameters, or None.
        layout: Whose FSDP units to list.
        revision, component: As for ``detect``.
        stamp: State of the reference's files, so that a changed file is another question.
    """
    from fsdptool.families.registry import load_registry
    from fsdptool.inspection import examine
    from fsdptool.modeling.units import detected
    from fsdptool.source import resolve

    progress("resolving the reference")
    spec = resolve(reference, revision=revision, component=component)
    progress("building the model without weights")
    views: tuple[View, ...] = ("leaves", "tree", "where")
    inspection = plain = examine(spec)
    if wrap:
        inspection = examine(spec, wrap=tuple(wrap))
    inspection, published = detected(inspection)
    answer = describe(
        inspection,
        world_size=world_size,
        layout=layout,
        views=views,
        published=published,
        diagnostics=load_registry().diagnostics,
    )
    return {"document": answer.document(), "detected": list(plain.anatomy.wrap.classes)}
