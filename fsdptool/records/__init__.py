"""The frozen records that pass between rooms. Standard library only.

They load on first use (PEP 562): making fifty slotted dataclasses costs a quick command a tenth of a second.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdptool.records.anatomy import (
        Anatomy,
        Buffer,
        Module,
        NoSplitEntry,
        Parameter,
        WrapCandidate,
        WrapChoice,
    )
    from fsdptool.records.cluster import Cluster, Gpu
    from fsdptool.records.diagnostic import Diagnostic, Edit, Fix, Severity
    from fsdptool.records.model import ModelSpec, Reference
    from fsdptool.records.plan import Candidate, Component, Holding, Moment, Peak, Phase, Plan, Suggestion
    from fsdptool.records.recipe import Recipe
    from fsdptool.records.run import Metrics, Summary
    from fsdptool.records.settings import FsdpSettings, Mesh
    from fsdptool.records.units import Unit, UnitPlan

_HOME = {
    "Anatomy": "anatomy",
    "Buffer": "anatomy",
    "Candidate": "plan",
    "Cluster": "cluster",
    "Component": "plan",
    "Diagnostic": "diagnostic",
    "Edit": "diagnostic",
    "Fix": "diagnostic",
    "FsdpSettings": "settings",
    "Gpu": "cluster",
    "Holding": "plan",
    "Mesh": "settings",
    "Metrics": "run",
    "ModelSpec": "model",
    "Module": "anatomy",
    "Moment": "plan",
    "Suggestion": "plan",
    "NoSplitEntry": "anatomy",
    "Parameter": "anatomy",
    "Peak": "plan",
    "Phase": "plan",
    "Plan": "plan",
    "Recipe": "recipe",
    "Reference": "model",
    "Severity": "diagnostic",
    "Summary": "run",
    "Unit": "units",
    "UnitPlan": "units",
    "WrapCandidate": "anatomy",
    "WrapChoice": "anatomy",
}
"""Record to the module that defines it."""

__all__ = [
    "Anatomy",
    "Buffer",
    "Candidate",
    "Cluster",
    "Component",
    "Diagnostic",
    "Edit",
    "Fix",
    "FsdpSettings",
    "Gpu",
    "Holding",
    "Mesh",
    "Metrics",
    "ModelSpec",
    "Module",
    "Moment",
    "NoSplitEntry",
    "Parameter",
    "Peak",
    "Phase",
    "Plan",
    "Recipe",
    "Reference",
    "Severity",
    "Suggestion",
    "Summary",
    "Unit",
    "UnitPlan",
    "WrapCandidate",
    "WrapChoice",
]


def __getattr__(name: str) -> Any:
    """Load a record on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'fsdptool.records' has no attribute {name!r}")
    return getattr(import_module(f"fsdptool.records.{_HOME[name]}"), name)
