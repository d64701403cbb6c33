"""The frozen records that pass between rooms. Standard library only."""

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
from fsdptool.records.plan import Candidate, Component, Holding, Moment, NextStep, Peak, Plan
from fsdptool.records.recipe import Recipe
from fsdptool.records.run import Metrics, Summary
from fsdptool.records.settings import FsdpSettings, Mesh
from fsdptool.records.units import Unit, UnitPlan

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
    "NextStep",
    "NoSplitEntry",
    "Parameter",
    "Peak",
    "Plan",
    "Recipe",
    "Reference",
    "Severity",
    "Summary",
    "Unit",
    "UnitPlan",
    "WrapCandidate",
    "WrapChoice",
]
