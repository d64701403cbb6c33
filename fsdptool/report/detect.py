"""Prints the documents of ``detect``, ``families`` and ``doctor`` for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fsdptool.formatting import amount
from fsdptool.report.plan_words import lora_words
from fsdptool.report.split import print_split
from fsdptool.report.tables import count, print_finding, print_line, print_rows, print_table

_SHOWN_CLASSES = 12


def print_detect(document: Mapping[str, Any]) -> None:
    """Print the answer: model, wrap choice with reasons, units, what is uneven, findings."""
    _head(document)
    if document["leaves"] is not None:
        _leaves(document)
    elif document["tree"] is not None:
        _tree(document["tree"], "", True)
    else:
        _classes(document)
        _names(document)
        _parts(document)
    if document["where"] is not None:
        _where(document)
    for key, kind in (("tensor_parallel", "tensor"), ("expert_parallel", "expert")):
        if document[key] is not None:
            print_split(document[key], kind)
    if (span := document["sequence_parallel"]) is not None:
        first, last = f"{span['blocks']}.0", span["end"]
        print_line(f"hidden states are divided along the sequence from {first} to the output of {last}")
    _units(document)
    _details(document)
    for finding in document["diagnostics"]:
        print_finding(finding["severity"], finding["code"], finding["message"], finding["help"])


def print_class_rows(document: Mapping[str, Any], separator: Any) -> None:
    """Print the classes that were considered, or with ``--leaves`` the leaf layers, as rows for programs."""
    found = document["classes"] if document["leaves"] is None else document["leaves"]
    names = [name for name, value in found[0].items() if not isinstance(value, dict)] if found else []
    rows = [[_joined(item[name]) for name in names] for item in found]
    print_rows(names, rows, separator=separator)


def print_family_rows(document: Mapping[str, Any], separator: Any) -> None:
    """Print families, or the flavours of one, as rows for programs."""
    names: tuple[str, ...] = ("name", "title", "library", "objective", "flavours", "distribution", "version")
    found = document["families"]
    if document["flavours"] is not None:
        names, found = (
            ("name", "class", "component", "parameters", "hub_id", "objective"),
            document["flavours"],
        )
    print_rows(names, [[_joined(item[name]) for name in names] for item in found], separator=separator)


def _joined(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _head(document: Mapping[str, Any]) -> None:
    model, reference, total = document["model"], document["reference"], document["parameters"]
    cached = " (cached)" if document["cached"] else ""
    revision = f" at {reference['revision']}" if reference["revision"] else ""
    print_line(f"{reference['id']}{revision}: {model['class']} ({model['library']}){cached}", style="bold")
    text = f"{total['total']:,} parameters (exact)"
    if document["lora"] is not None:
        text += f", {total['trainable']:,} of them trained"
    elif total["frozen"]:
        text += f", {total['frozen']:,} of them frozen"
    if total["tied_saved"]:
        text += f"; ties save {total['tied_saved']:,}"
    print_line(text)
    if document["lora"] is not None:
        print_line(f"LoRA adapter: {lora_words(document['lora'])}")
    built = ", ".join(f"{dtype} {count(value)}" for dtype, value in total["by_dtype"].items())
    saved = f"; the configuration says its weights are {model['checkpoint_dtype']}"
    print_line(f"built as {built}" + (saved if model["checkpoint_dtype"] else ""))


def _classes(document: Mapping[str, Any]) -> None:
    wrap = document["wrap"]
    print_line()
    chosen = ", ".join(wrap["classes"]) or "nothing"
    print_line(f"wrap: {chosen}", style="bold green" if wrap["classes"] else "bold yellow")
    if wrap["concern"]:
        print_line(f"note: {wrap['concern']} ({wrap['concern_code']})")
    rows = document["classes"]
    print_table(
        ("class", "instances", "each", "total", "share", "wrap", "why", "example"),
        [
            (
                item["name"],
                str(item["instances"]),
                _each(item["parameters_each"]),
                count(item["parameters_total"]),
                f"{item['share']:.1%}",
                "yes" if item["chosen"] else "no",
                item["reason"],
                item["paths"][0] if item["paths"] else "",
            )
            for item in rows[:_SHOWN_CLASSES]
        ],
        numeric=(1, 2, 3, 4),
        optional=(7, 2, 3, 1, 6),
    )
    if len(rows) > _SHOWN_CLASSES:
        print_line(f"... and {len(rows) - _SHOWN_CLASSES} more classes (--format json lists all)")


def _each(pair: Any) -> str:
    low, high = pair
    return count(low) if low == high else f"{count(low)} to {count(high)}"


def _names(document: Mapping[str, Any]) -> None:
    if document["no_split_modules"]:
        print_line()
        print_table(
            ("_no_split_modules", "status", "why"),
            [(item["name"], item["status"], item["reason"]) for item in document["no_split_modules"]],
        )


def _parts(document: Mapping[str, Any]) -> None:
    if len(document["parts"]) > 1:
        print_line()
        print_table(
            ("part", "class", "parameters", "share"),
            [
                (
                    part["path"] or "(rest)",
                    part["class_name"],
                    count(part["parameters"]),
                    f"{part['share']:.1%}",
                )
                for part in document["parts"]
            ],
            numeric=(2, 3),
        )


def _leaves(document: Mapping[str, Any]) -> None:
    print_line()
    print_table(
        ("leaf class", "instances", "parameters", "share", "examples"),
        [
            (
                leaf["name"],
                str(leaf["instances"]),
                f"{leaf['parameters_total']:,}",
                f"{leaf['share']:.1%}",
                ", ".join(leaf["paths"][:3]),
            )
            for leaf in document["leaves"]
        ],
        numeric=(1, 2, 3),
        optional=(4, 1),
    )


def _tree(branch: Mapping[str, Any], indent: str, root: bool) -> None:
    if root:
        print_line()
    folded = f" x{branch['count']}" if branch["count"] > 1 else ""
    wrapped = "  [unit]" if branch["wrapped"] else ""
    each = " each" if folded else ""
    line = (
        f"{indent}{branch['name']}: {branch['class_name']}{folded}  {count(branch['parameters_each'])}{each}"
    )
    print_line(line + wrapped, style="green" if branch["wrapped"] else None)
    for child in branch["children"]:
        _tree(child, indent + "  ", False)


def _where(document: Mapping[str, Any]) -> None:
    print_line()
    print_table(
        ("class", "defined in"),
        [
            (
                place["name"],
                f"{place['file']}:{place['line']}" if place["line"] else place["module"] or "unknown",
            )
            for place in document["where"]
        ],
    )


def _units(document: Mapping[str, Any]) -> None:
    largest, units, layout = document["largest_unit"], document["units"], document["wrap"]["layout"]
    print_line()
    print_line(
        f"{len(units)} FSDP units ({layout} layout); the largest is {largest['id']}:"
        f" {count(largest['parameters'])}, {largest['share']:.1%} of all,"
        f" {amount(largest['bytes_16bit'])} gathered in 16 bit"
    )
    for kind, label in (("embedding", "embedding"), ("shared", "shared"), ("tail", "tail"), ("root", "root")):
        for unit in units:
            if unit["kind"] == kind and unit["parameters"]:
                named = ", ".join(unit["fqns"][:3]) + (", ..." if len(unit["fqns"]) > 3 else "")
                print_line(
                    f"  {label} unit: {count(unit['parameters'])} in {len(unit['fqns'])} tensors ({named})"
                )


def _details(document: Mapping[str, Any]) -> None:
    persistent = [item for item in document["buffers"] if item["persistent"]]
    if document["buffers"]:
        total = sum(item["bytes"] for item in document["buffers"])
        print_line(f"{len(document['buffers'])} buffers, {amount(total)}; {len(persistent)} persistent")
    for tie in document["ties"][:4]:
        print_line(f"tied: {' = '.join(tie[:5])}{' = ...' if len(tie) > 5 else ''}")
    if len(document["ties"]) > 4:
        print_line(f"... and {len(document['ties']) - 4} more ties")
    experts = document["experts"]
    if experts:
        print_line(f"fused experts: {experts['tensors']} tensors, {experts['share']:.1%} of the parameters")
    if document["world_size"]:
        _uneven(document)
    print_line()


def _uneven(document: Mapping[str, Any]) -> None:
    ranks, items = document["world_size"], document["uneven"]
    if not items:
        print_line(f"every parameter divides evenly over {ranks} ranks")
        return
    padding = sum(item["padding_bytes"] for item in items)
    print_line(
        f"{len(items)} parameters do not divide over {ranks} ranks: {amount(padding)} of padding in total"
    )
    worst = sorted(items, key=lambda item: -item["padding_bytes"])[:5]
    print_table(
        ("parameter", "dim 0", "padding", "empty ranks"),
        [
            (item["fqn"], str(item["dim0"]), amount(item["padding_bytes"]), str(item["empty_ranks"]))
            for item in worst
        ],
        numeric=(1, 2, 3),
        optional=(1,),
    )


def print_families(document: Mapping[str, Any]) -> None:
    """Print the list of families, or one family with its flavours."""
    if document["flavours"] is None:
        print_table(
            ("family", "title", "library", "objective", "flavours", "from"),
            [
                (
                    item["name"],
                    item["title"],
                    item["library"],
                    item["objective"],
                    ", ".join(item["flavours"]) or "(any configuration)",
                    item["distribution"],
                )
                for item in document["families"]
            ],
            optional=(5, 2, 3, 1),
        )
    else:
        _one(document)
    for finding in document["diagnostics"]:
        print_finding(finding["severity"], finding["code"], finding["message"], finding["help"])


def _one(document: Mapping[str, Any]) -> None:
    family = document["families"][0]
    print_line(f"{family['name']}: {family['title']} ({family['library']})", style="bold")
    print_line(f"default objective {family['objective']}; from {family['distribution']} {family['version']}")
    if not document["flavours"]:
        print_line("no flavours: configurations are matched to this family by their class")
        return
    print_table(
        ("reference", "class", "parameters", "hub id"),
        [
            (
                item["name"],
                item["class"] + (f" ({item['component']})" if item["component"] else ""),
                f"{item['parameters']:,}" if item["parameters"] is not None else "unknown",
                item["hub_id"] or "",
            )
            for item in document["flavours"]
        ],
        numeric=(2,),
        optional=(1, 3),
    )
    first = document["flavours"][0]
    if first["lora_targets"]:
        print_line(f"LoRA adapts {', '.join(first['lora_targets'])} by default")
    if first["wrap_hint"]:
        print_line(f"wraps {', '.join(first['wrap_hint']['classes'])}: {first['wrap_hint']['reason']}")
    if len(document["flavours"]) == 1:
        print_line(f"config: {json.dumps(first['config'], ensure_ascii=False)}")
        for key, value in first["facts"].items():
            print_line(f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")


def print_doctor(document: Mapping[str, Any]) -> None:
    """Print the document of ``fsdptool doctor``."""
    versions = document["versions"]
    print_table(
        ("what", "version"), [(name, version or "not installed") for name, version in versions.items()]
    )
    machine = document["machine"]
    print_line(
        f"machine: {machine['cores']} cores, {amount(machine['memory_bytes'])} memory"
        f" ({amount(machine['memory_available_bytes'])} available), {machine['platform']}"
    )
    if document["devices"]:
        print_table(
            ("gpu", "name", "memory", "free", "capability", "run"),
            [
                (
                    g["id"],
                    g["name"],
                    amount(g["memory_bytes"]),
                    amount(g["memory_free_bytes"]),
                    g["capability"],
                    g["run"] or "",
                )
                for g in document["devices"]
            ],
            optional=(4, 3),
        )
    else:
        print_line("GPUs: none; runs use the CPU")
    origins: dict[str, list[str]] = {}
    for plugin in document["plugins"]:
        origins.setdefault(plugin["origin"], []).append(plugin["family"])
    for origin, families in sorted(origins.items()):
        print_line(f"plugin {origin}: {len(families)} famil{'ies' if len(families) != 1 else 'y'}")
    cache = document["cache"]
    state = "writable" if cache["writable"] else "read-only"
    print_line(f"cache: {cache['folder']} ({state}), {cache['entries']} entries, {amount(cache['bytes'])}")
    for probe in document["probes"]:
        if probe["ok"]:
            text = f"yes, the weights equal those of a plain loop within {probe['difference']:.1e}"
        else:
            text = f"NO: {probe['reason']}"
        ranks = f"{probe['processes']} {probe['device']} process{'es' if probe['processes'] > 1 else ''}"
        print_line(f"FSDP2 shards on {ranks} ({probe['backend']}): {text}")
    for finding in document["diagnostics"]:
        print_finding(finding["severity"], finding["code"], finding["message"], finding["help"])
