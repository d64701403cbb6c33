"""What a reference resolves to: everything needed to build the model, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdptool.records.diagnostic import Diagnostic

ReferenceKind = Literal["flavour", "hub", "folder", "config", "pipeline", "adapter"]


@dataclass(frozen=True, slots=True)
class Reference:
    """How the user named the model.

    Attributes:
        kind: ``flavour`` (``family:flavour``), ``hub`` (a Hugging Face id), ``folder``,
            ``config`` (a bare ``config.json``), ``pipeline`` (a diffusers folder with
            ``model_index.json``) or ``adapter`` (a PEFT folder; the spec is its base model's).
        id: The reference as written, without a revision.
        revision: Commit hash or tag of a hub reference, or None.
    """

    kind: ReferenceKind
    id: str
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A resolved model: enough to build it on the meta device, and to find its weights.

    Attributes:
        reference: Where it came from.
        family: Registered family name, or ``generic``.
        flavour: Flavour name within the family, or None.
        library: ``transformers``, ``diffusers``, or the family's own name.
        model_class: Class to build, for example ``LlamaForCausalLM``.
        config: The raw configuration, exactly as read (never a config object).
        objective: Default training objective of the family, or None if unknown.
        folder: Local folder that holds configuration and weights, or None.
        weights: Local safetensors files that belong to this component, sorted; empty if none.
        component: Name of the pipeline component (``transformer``, ``unet``), or None.
        adapter: ``adapter_config.json`` of a PEFT reference, or None.
        trust_remote_code: Whether the user allowed code from the reference to run.
        diagnostics: Findings of the resolution (misspelt config keys, ...).
    """

    reference: Reference
    family: str
    flavour: str | None
    library: str
    model_class: str
    config: Mapping[str, Any]
    objective: str | None = None
    folder: str | None = None
    weights: tuple[str, ...] = ()
    component: str | None = None
    adapter: Mapping[str, Any] | None = None
    trust_remote_code: bool = False
    diagnostics: tuple[Diagnostic, ...] = field(default=())
