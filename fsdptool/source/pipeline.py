"""Diffusers pipeline folders: which component is trained, and where it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fsdptool.errors import ReferenceError  # noqa: A004 - a reference names a model here
from fsdptool.records.diagnostic import Diagnostic

SECOND_DENOISER = "DET110"
CLASS_MISMATCH = "DET111"

_DENOISERS = ("transformer", "unet", "prior", "decoder", "transformer_2", "unet_2")
"""Attribute names of what diffusers pipelines train (0.42), the first present is taken."""

_NOT_MODELS = ("Tokenizer", "Scheduler", "Processor", "FeatureExtractor", "Processing", "Guider")


@dataclass(frozen=True, slots=True)
class Component:
    """One entry of ``model_index.json``."""

    name: str
    library: str
    class_name: str


def components(index: Mapping[str, Any]) -> tuple[Component, ...]:
    """Return the components of a pipeline that are models, in file order."""
    models = []
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or len(value) != 2:
            continue
        library, class_name = value
        named = isinstance(library, str) and isinstance(class_name, str)
        if named and not any(word in class_name for word in _NOT_MODELS):
            models.append(Component(name, library, class_name))
    return tuple(models)


def pick(
    index: Mapping[str, Any], wanted: str | None, where: str
) -> tuple[Component, tuple[Diagnostic, ...]]:
    """Return the component to inspect: ``wanted``, else the denoiser.

    Raises:
        ReferenceError: The component does not exist, or none that looks like a denoiser.
    """
    have = {component.name: component for component in components(index)}
    listed = ", ".join(have) or "none that is a model"
    if wanted is not None:
        if wanted in have:
            return have[wanted], ()
        near = get_close_matches(wanted, have, n=1)
        raise ReferenceError(
            f"{where} has no model component {wanted!r}",
            help=f"did you mean {near[0]}? it has: {listed}" if near else f"it has: {listed}",
        )
    present = [name for name in _DENOISERS if name in have]
    if not present:
        raise ReferenceError(
            f"{where} has no transformer or unet among its components",
            help=f"give --component: {listed}" if have else "give a pipeline folder that names its models",
        )
    diagnostics: tuple[Diagnostic, ...] = ()
    if len(present) > 1:
        diagnostics = (
            Diagnostic(
                code=SECOND_DENOISER,
                severity="info",
                message=f"{where} also has {' and '.join(present[1:])}; this result covers {present[0]} only",
                help=f"use --component {present[1]} to inspect the other",
            ),
        )
    return have[present[0]], diagnostics
