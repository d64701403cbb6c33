"""What ``fsdptool families`` lists: families, their flavours and the facts about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fsdptool.records.annotations import Count


@dataclass(frozen=True, slots=True)
class FamilySummary:
    """A model family, its flavours and the distribution that provides it."""

    name: str
    title: str
    library: str
    objective: str
    flavours: tuple[str, ...]
    distribution: str
    version: str


@dataclass(frozen=True, slots=True)
class HintedClasses:
    """Wrap classes that a family names, and why."""

    classes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class FlavourDetail:
    """A flavour of a family: the class it builds, its configuration, and facts about it."""

    name: str
    class_: str
    component: str | None
    hub_id: str | None
    parameters: Count | None
    objective: str
    lora_targets: tuple[str, ...]
    lora_parameters: tuple[str, ...]
    wrap_hint: HintedClasses | None
    config: Mapping[str, Any]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FamilyList:
    """What `fsdptool families --format json` prints; `flavours` is null in the list of all families."""

    families: tuple[FamilySummary, ...]
    flavours: tuple[FlavourDetail, ...] | None
