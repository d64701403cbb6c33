"""A detection as a page, and its parts: wrap classes, units, tree, leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape

from fsdptool.formatting import alike, amount, count
from fsdptool.records.anatomy import WrapOrigin
from fsdptool.records.detection import Branch, ConsideredClass, Detection, Part
from fsdptool.records.diagnostic import Answer, Diagnostic
from fsdptool.report.page.parts import breaking, cards, findings, foot, html_table, page, section


def detection_page(answer: Answer[Detection]) -> str:
    """Return the page of an answer of ``detect``, as HTML text."""
    body = detection_body(answer.body, answer.envelope.diagnostics)
    return page(_title(answer.body), f"{body}{foot(answer.envelope.inputs_digest)}")


def detection_body(
    detection: Detection,
    diagnostics: Iterable[Diagnostic],
    choice: Callable[[ConsideredClass], str] | None = None,
) -> str:
    """Return the page's sections.

    Args:
        detection: The detection.
        diagnostics: The findings.
        choice: From a considered class to what its cell "wrap" contains, as HTML; None says yes or no.
    """
    body = [
        _head(detection),
        _wrap_classes(detection, choice),
        _no_split(detection),
        section("Parts", _shares("part", [(p.path or "(rest)", p) for p in detection.parts])),
        _units(detection),
        _uneven(detection),
        _leaves(detection),
        _tree(detection),
        _places(detection),
        findings(diagnostics),
    ]
    return "\n".join(part for part in body if part)


def _title(detection: Detection) -> str:
    return f"{detection.reference.id}: {detection.model.class_}"


def _head(detection: Detection) -> str:
    model, wrap, total = detection.model, detection.wrap, detection.parameters
    largest, root = detection.largest_unit, detection.units[-1]
    figures = [
        ("parameters (exact)", count(total.total), f"{total.total:,}"),
        ("wrap classes", ", ".join(wrap.classes) or "none", f"chosen by {_ORIGINS[wrap.origin]}"),
        ("FSDP units", str(wrap.units), f"{wrap.layout} layout"),
        (
            "largest unit",
            count(largest.parameters),
            f"{largest.id}, {amount(largest.bytes_16bit)} gathered in 16 bit",
        ),
        ("root unit", count(root.parameters), _tensors(len(root.fqns))),
    ]
    if detection.world_size:
        padding = sum(item.padding_bytes for item in detection.uneven)
        figures.append((f"padding on {detection.world_size} ranks", amount(padding), "over all ranks"))
    if total.frozen:
        figures.append(("frozen", count(total.frozen), f"{total.frozen:,} parameters"))
    if total.tied_saved:
        figures.append(("saved by ties", count(total.tied_saved), f"{len(detection.ties)} groups"))
    return (
        f'<header><p class="soft">{escape(model.library)} · {escape(model.family)}</p>'
        f"<h1>{breaking(_title(detection))}</h1>{_concern(wrap.concern)}{cards(figures)}</header>"
    )


def _tensors(number: int) -> str:
    return (
        f"{number} tensor{'s' * (number != 1)} of its own" if number else "the other units own every tensor"
    )


_ORIGINS: Mapping[WrapOrigin, str] = {
    "structure": "the model's structure",
    "hint": "the model family",
    "person": "you",
}


def _wrap_classes(detection: Detection, choice: Callable[[ConsideredClass], str] | None) -> str:
    choose = choice or (lambda item: "yes" if item.chosen else "no")
    rows = [
        f"<tr{' class=chosen' if item.chosen else ''}>"
        f'<th scope="row">{breaking(item.name)}</th><td>{choose(item)}</td>'
        f'<td class="n">{item.instances}</td><td class="n">{count(item.parameters_total)}</td>'
        f'<td class="n">{item.share:.1%}</td><td class="wide">{escape(item.reason)}</td></tr>'
        for item in detection.classes
    ]
    heads = ("class", "wrap", "instances", "parameters", "share", "reason")
    tall = len(rows) > 16
    table = html_table("Classes that were considered", heads, rows, numbers=(2, 3, 4), tall=tall, cards=True)
    return section("Wrap classes", table if rows else "")


_STATUS = {"right": "fits", "unsuitable": "does_not_fit", "absent": "unknown"}
"""Colour of each status of an entry of ``_no_split_modules``."""


def _no_split(detection: Detection) -> str:
    rows = [
        f'<tr><th scope="row">{breaking(item.name)}</th>'
        f'<td class="{_STATUS[item.status]}">{item.status}</td>'
        f'<td class="wide">{escape(item.reason)}</td></tr>'
        for item in detection.no_split_modules
    ]
    heads = ("entry", "status", "reason")
    table = html_table("What the model itself declares", heads, rows, cards=True)
    return section("_no_split_modules", table if rows else "")


def _leaves(detection: Detection) -> str:
    leaves = detection.leaves
    if not leaves:
        return ""
    wrapped = set(detection.wrap.classes)
    rows = [
        f'<tr><th scope="row">{breaking(leaf.name)}</th>'
        f"<td>{'yes' if leaf.name in wrapped else 'no'}</td>"
        f'<td class="n">{leaf.instances}</td><td class="n">{count(leaf.parameters_total)}</td>'
        f'<td class="n">{leaf.share:.1%}</td>'
        f'<td class="wide">{breaking(", ".join(leaf.paths[:3]))}</td></tr>'
        for leaf in leaves
    ]
    blocks = ", ".join(detection.wrap.classes) or "the root only"
    note = (
        "<p>Tools that count leaf layers offer these classes. A unit for each of them would need"
        f" {sum(leaf.instances for leaf in leaves):,} all-gathers in forward instead of"
        f" {detection.wrap.units:,} with {breaking(blocks)}.</p>"
    )
    heads = ("leaf class", "wrap", "instances", "parameters", "share", "examples")
    table = html_table("Classes that own parameters directly", heads, rows, numbers=(2, 3, 4), cards=True)
    return section("Leaf layers", note + table)


def _tree(detection: Detection) -> str:
    tree = detection.tree
    return section("Module tree", f'<ul class="tree">{_branch(tree, 3)}</ul>' if tree else "")


def _branch(branch: Branch, opened: int) -> str:
    """Return one module and those inside it; so many levels are open."""
    folded = f" × {branch.count}" if branch.count > 1 else ""
    unit = ' <b class="fits">unit</b>' if branch.wrapped else ""
    each = " each" if folded else ""
    label = (
        f"{breaking(branch.name)}: {breaking(branch.class_name)}{folded}"
        f" <small>{count(branch.parameters_each)}{each}</small>{unit}"
    )
    if not branch.children:
        return f"<li>{label}</li>"
    inner = "".join(_branch(child, opened - 1) for child in branch.children)
    state = " open" if opened > 0 else ""
    return f"<li><details{state}><summary>{label}</summary><ul>{inner}</ul></details></li>"


def _places(detection: Detection) -> str:
    rows = []
    for place in detection.where or ():
        # The folder of the installation does not matter to a reader.
        file = (place.file or "").rpartition("/site-packages/")[2]
        at = f"{file}:{place.line}" if place.line else place.module or "unknown"
        rows.append(f'<tr><th scope="row">{breaking(place.name)}</th><td>{breaking(at)}</td></tr>')
    table = html_table("Where the classes are defined", ("class", "defined in"), rows)
    return section("Sources", table if rows else "")


def _units(detection: Detection) -> str:
    units = detection.units
    rows = [
        f'<tr><th scope="row">{breaking(name)}</th><td class="n">{len(same)}</td>'
        f"<td>{escape(same[0].kind)}</td>"
        f'<td>{breaking(same[0].class_)}</td><td class="n">{len(same[0].fqns)}</td>'
        f'<td class="n">{same[0].parameters:,}</td></tr>'
        for name, same in alike(
            units,
            lambda unit: unit.id,
            lambda unit: (unit.kind, unit.class_, len(unit.fqns), unit.parameters),
        )
    ]
    heads = ("unit", "number", "kind", "class", "tensors of each", "parameters of each")
    table = html_table("Every FSDP unit", heads, rows, numbers=(1, 4, 5), tall=True, cards=True)
    return section(f"{len(units)} FSDP units", table)


def _uneven(detection: Detection) -> str:
    ranks, items = detection.world_size, detection.uneven
    if not ranks:
        return ""
    if not items:
        return section("Sharding", f"<p>Every parameter divides evenly over {ranks} ranks.</p>")
    rows = [
        f'<tr><th scope="row">{breaking(name)}</th><td class="n">{len(same)}</td>'
        f'<td class="n">{same[0].dim0:,}</td>'
        f'<td class="n">{amount(same[0].padding_bytes)}</td><td class="n">{same[0].empty_ranks}</td></tr>'
        for name, same in alike(
            sorted(items, key=lambda item: -item.padding_bytes),
            lambda item: item.fqn,
            lambda item: (item.dim0, item.padding_bytes, item.empty_ranks),
        )
    ]
    heads = ("parameter", "number", "rows", "padding of each", "empty ranks")
    table = html_table(
        "Parameters that shard unevenly", heads, rows, numbers=(1, 2, 3, 4), tall=True, cards=True
    )
    return section(f"{len(items)} parameters do not divide evenly over {ranks} ranks", table)


def _shares(what: str, rows: Iterable[tuple[str, Part]]) -> str:
    lines = [
        f'<tr><th scope="row">{breaking(name)}</th><td>{breaking(item.class_name)}</td>'
        f'<td class="n">{count(item.parameters)}</td><td class="n">{item.share:.1%}</td>'
        '<td class="wide"><svg viewBox="0 0 100 6" preserveAspectRatio="none" class="share"'
        ' aria-hidden="true">'
        f'<rect class="g-states" width="{item.share * 100:.2f}" height="6"/></svg></td></tr>'
        for name, item in rows
    ]
    heads = (what, "class", "parameters", "share", "of all")
    if len(lines) < 2:
        return ""
    return html_table("Where the parameters are", heads, lines, numbers=(2, 3), cards=True)


def _concern(text: str | None) -> str:
    return f"<p>{escape(text[:1].upper() + text[1:])}.</p>" if text else ""
