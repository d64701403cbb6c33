"""Families and flavours in JSON lines: ``data/families.jsonl`` and ``data/flavours.jsonl`` of a package.

Files are read on first use, and flavours are read only when one family's are wanted.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from fsdptool.families.protocol import Family, Flavour, LoraTargets, Match, WrapHint
from fsdptool.files.values import PACKED


@dataclass(frozen=True, slots=True)
class FamilyCard:
    """One line of ``families.jsonl``.

    Attributes:
        name: Registered name.
        title: What a person reads.
        library: ``transformers`` or ``diffusers``.
        objective: Default objective.
        kind: Which class of the package makes the family; ``""`` is the package's plain one.
        match: Conditions on a raw configuration, any of which claims it: every key must have the
            value given (a list: one of these; null: absent or null).
        lora: Module suffixes LoRA adapts by default.
        lora_parameters: Fused parameters (experts) LoRA can adapt besides (peft ``target_parameters``).
        wrap: Wrap classes where structure alone errs, and ``wrap_reason`` why.
        options: What the kind's class needs to know besides.
    """

    name: str
    title: str
    library: str
    objective: str
    kind: str = ""
    match: tuple[Mapping[str, Any], ...] = ()
    lora: tuple[str, ...] = ()
    lora_parameters: tuple[str, ...] = ()
    wrap: tuple[str, ...] = ()
    wrap_reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    package: str = ""


def _lines(package: str, name: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of a package's data, which a wheel of this project holds compressed."""
    packed = files(package) / "data" / f"{name}{PACKED}"
    plain = files(package) / "data" / name
    data = gzip.decompress(packed.read_bytes()) if packed.is_file() else plain.read_bytes()
    return (json.loads(line) for line in data.decode().splitlines() if line)


_TUPLES = ("match", "lora", "lora_parameters", "wrap")


@cache
def read_cards(package: str) -> tuple[FamilyCard, ...]:
    """Return the families of ``package``, in file order."""
    cards = []
    for line in _lines(package, "families.jsonl"):
        line.update({key: tuple(line[key]) for key in _TUPLES if key in line})
        cards.append(FamilyCard(package=package, **line))
    return tuple(cards)


@cache
def read_flavours(package: str) -> Mapping[str, Mapping[str, Flavour]]:
    """Return the flavours of ``package`` by family, then by name."""
    flavours: dict[str, dict[str, Flavour]] = {}
    for line in _lines(package, "flavours.jsonl"):
        family = line.pop("family")
        flavour = Flavour(**line)
        flavours.setdefault(family, {})[flavour.name] = flavour
    return flavours


def _agrees(config: Mapping[str, Any], condition: Mapping[str, Any]) -> bool:
    return all(
        config.get(key) in wanted if isinstance(wanted, list) else config.get(key) == wanted
        for key, wanted in condition.items()
    )


class CatalogueFamily(Family):
    """A family that is described by a card and lists its flavours in its package's data.

    Subclasses may set the same attributes on the class instead and pass no card.
    """

    package: str = ""
    """Import package whose ``data/flavours.jsonl`` lists the flavours; empty: there are none."""
    claims: tuple[Mapping[str, Any], ...] = ()
    lora: LoraTargets = LoraTargets(())
    hint: WrapHint | None = None
    options: Mapping[str, Any] = {}

    def __init__(self, card: FamilyCard | None = None) -> None:
        if card is None:
            return
        self.name = card.name
        self.title = card.title
        self.library = card.library
        self.default_objective = card.objective
        self.package = card.package
        self.claims = card.match
        self.lora = LoraTargets(card.lora, card.lora_parameters, card.options.get("lora_exclude"))
        self.hint = WrapHint(card.wrap, card.wrap_reason) if card.wrap else None
        self.options = card.options

    def flavours(self) -> Mapping[str, Flavour]:
        """Return the flavours of the package's data file that name this family."""
        return read_flavours(self.package).get(self.name, {}) if self.package else {}

    def match(self, config: Mapping[str, Any]) -> Match | None:
        """Claim a configuration that meets one of the conditions; the most specific one scores highest."""
        met = [condition for condition in self.claims if _agrees(config, condition)]
        if not met:
            return None
        best = max(met, key=len)
        evidence = ", ".join(f"{key} is {config.get(key)!r}" for key in best)
        # A longer condition is more specific: SDXL's UNet against any UNet of its class.
        return Match(min(0.9 + 0.02 * len(best), 1.0), evidence)

    def objective_for(self, config: Mapping[str, Any]) -> str:
        """Return the family's objective, or what the card says of the configuration's class."""
        by_class: Mapping[str, str] = self.options.get("objectives", {})
        return (
            by_class.get(self.model_class(config), self.default_objective)
            if by_class
            else self.default_objective
        )

    def untouched(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the card's prefixes of parameters that the default objective does not reach."""
        return tuple(self.options.get("untouched", ()))

    def complete(self, config: Mapping[str, Any], model_class: str) -> dict[str, Any]:
        """Return the configuration with its class's defaults filled in."""
        return dict(config)

    def small(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what ``families.shrink`` gets wrong for this family: dotted keys, small values."""
        small: Mapping[str, Any] = self.options.get("small", {})
        return small

    def lora_targets(self, config: Mapping[str, Any]) -> LoraTargets:
        """Return the card's LoRA targets; fused experts only where the configuration has experts."""
        key = self.options.get("experts_when")
        if key is not None and not (config.get("text_config") or config).get(key):
            return LoraTargets(self.lora.modules, exclude=self.lora.exclude)
        return self.lora

    def wrap_hint(self, config: Mapping[str, Any]) -> WrapHint | None:
        """Return the card's wrap hint."""
        return self.hint


def instances(
    cards: Iterable[FamilyCard], kinds: Mapping[str, type[CatalogueFamily]]
) -> Iterator[CatalogueFamily]:
    """Make each card's family from the class its kind names."""
    return (kinds[card.kind](card) for card in cards)
