"""``fsdptool families``: what ships, what plugins add, and one family's flavours and facts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fsdptool.cli.options import RowFormat, RowFormatOption, print_document
from fsdptool.errors import ExitCode
from fsdptool.formatting import by_size

if TYPE_CHECKING:
    from fsdptool.families.protocol import Family, Flavour
    from fsdptool.families.registry import FamilyRegistry
    from fsdptool.records.family_documents import FamilySummary, FlavourDetail


def command(
    name: Annotated[
        str | None,
        typer.Argument(help="Family, or family:flavour, to show in detail; any other text is searched for."),
    ] = None,
    format: RowFormatOption = RowFormat.TEXT,
) -> int:
    """List the model families, or show the flavours and facts of one family."""
    from fsdptool.families.registry import load_registry
    from fsdptool.records.diagnostic import answer
    from fsdptool.records.family_documents import FamilyList

    registry = load_registry()
    found = [
        _summary(registry, family) for family in registry.all() if name is None or _matches(family, name)
    ]
    if name is None or (found and name.partition(":")[0] not in registry):
        shown, detail = found, None
    else:
        family_name, _, flavour_name = name.partition(":")
        family = registry.get(family_name)
        shown = [_summary(registry, family)]
        names = [flavour_name] if flavour_name else by_size(family.flavours())
        detail = [_flavour(family, registry.flavour(family_name, each)) for each in names]
    listed = answer(
        "families",
        {"name": name, "families": [item.name for item in shown]},
        FamilyList(tuple(shown), detail if detail is None else tuple(detail)),
        diagnostics=registry.diagnostics,
    )
    if format is RowFormat.JSON:
        print_document(listed.document())
    elif format is RowFormat.TEXT:
        from fsdptool.report.console.families import print_families

        print_families(listed)
    else:
        from fsdptool.report.console.families import print_family_rows

        print_family_rows(listed.body, "tsv" if format is RowFormat.TSV else "csv")
    return int(ExitCode.CLEAN)


def _matches(family: Family, text: str) -> bool:
    """Say whether a family's name, title or one of its flavours contains a text."""
    words = (family.name, family.title, *(f"{family.name}:{flavour}" for flavour in family.flavours()))
    return any(text.casefold() in word.casefold() for word in words)


def _summary(registry: FamilyRegistry, family: Family) -> FamilySummary:
    from fsdptool.records.family_documents import FamilySummary

    origin = registry.origin(family.name)
    return FamilySummary(
        name=family.name,
        title=family.title,
        library=family.library,
        objective=family.default_objective,
        flavours=tuple(by_size(family.flavours())),
        distribution=origin.distribution,
        version=origin.version,
    )


def _flavour(family: Family, flavour: Flavour) -> FlavourDetail:
    from fsdptool.records.family_documents import FlavourDetail, HintedClasses

    hint = family.wrap_hint(flavour.config)
    targets = family.lora_targets(flavour.config)
    return FlavourDetail(
        name=f"{family.name}:{flavour.name}",
        class_=flavour.model_class,
        component=flavour.component,
        hub_id=flavour.hub_id,
        parameters=flavour.parameters,
        objective=family.objective_for(flavour.config),
        lora_targets=tuple(targets.modules),
        lora_parameters=tuple(targets.parameters),
        wrap_hint=HintedClasses(tuple(hint.classes), hint.reason) if hint else None,
        config=flavour.config,
        facts=flavour.facts,
    )
