"""Detections on the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fsdptool.formatting import alike, amount, count
from fsdptool.records.detection import Branch, Detection, LeafClass, Place, PlacedParameter, SplitSummary
from fsdptool.records.diagnostic import Answer
from fsdptool.records.tensor_plan import WholeReason
from fsdptool.report.console.tables import print_findings, print_line, print_records, print_table
from fsdptool.report.plan_words import lora_words

_SHOWN_CLASSES = 12


def print_detect(answer: Answer[Detection]) -> None:
    """Print the answer: model, wrap choice with reasons, units, what is uneven, findings."""
    detection = answer.body
    _head(detection)
    if detection.leaves is not None:
        _leaves(detection.leaves)
    elif detection.tree is not None:
        _tree(detection.tree, "", True)
    else:
        _classes(detection)
        _names(detection)
        _parts(detection)
    if detection.where is not None:
        _where(detection.where)
    for split, kind in ((detection.tensor_parallel, "tensor"), (detection.expert_parallel, "expert")):
        if split is not None:
            _split(split, kind)
    if (span := detection.sequence_parallel) is not None:
        first, last = f"{span.blocks}.0", span.end
        print_line(f"hidden states are divided along the sequence from {first} to the output of {last}")
    _units(detection)
    _details(detection)
    print_findings(answer.envelope.diagnostics)


def print_class_rows(detection: Detection, separator: Literal["tsv", "csv"]) -> None:
    """Print the classes that were considered, or with ``--leaves`` the leaf layers, as rows for programs."""
    print_records(detection.classes if detection.leaves is None else detection.leaves, separator)


def _head(detection: Detection) -> None:
    model, reference, total = detection.model, detection.reference, detection.parameters
    cached = " (cached)" if detection.cached else ""
    revision = f" at {reference.revision}" if reference.revision else ""
    print_line(f"{reference.id}{revision}: {model.class_} ({model.library}){cached}", style="bold")
    text = f"{total.total:,} parameters (exact)"
    if detection.lora is not None:
        text += f", {total.trainable:,} of them trained"
    elif total.frozen:
        text += f", {total.frozen:,} of them frozen"
    if total.tied_saved:
        text += f"; ties save {total.tied_saved:,}"
    print_line(text)
    if detection.lora is not None:
        print_line(f"LoRA adapter: {lora_words(detection.lora)}")
    built = ", ".join(f"{dtype} {count(value)}" for dtype, value in total.by_dtype.items())
    saved = f"; the configuration says its weights are {model.checkpoint_dtype}"
    print_line(f"built as {built}" + (saved if model.checkpoint_dtype else ""))


def _classes(detection: Detection) -> None:
    wrap = detection.wrap
    print_line()
    chosen = ", ".join(wrap.classes) or "nothing"
    print_line(f"wrap: {chosen}", style="bold green" if wrap.classes else "bold yellow")
    if wrap.concern:
        print_line(f"note: {wrap.concern} ({wrap.concern_code})")
    rows = detection.classes
    print_table(
        ("class", "instances", "each", "total", "share", "wrap", "why", "example"),
        [
            (
                item.name,
                str(item.instances),
                _each(item.parameters_each),
                count(item.parameters_total),
                f"{item.share:.1%}",
                "yes" if item.chosen else "no",
                item.reason,
                item.paths[0] if item.paths else "",
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


def _names(detection: Detection) -> None:
    if detection.no_split_modules:
        print_line()
        print_table(
            ("_no_split_modules", "status", "why"),
            [(item.name, item.status, item.reason) for item in detection.no_split_modules],
        )


def _parts(detection: Detection) -> None:
    if len(detection.parts) > 1:
        print_line()
        print_table(
            ("part", "class", "parameters", "share"),
            [
                (part.path or "(rest)", part.class_name, count(part.parameters), f"{part.share:.1%}")
                for part in detection.parts
            ],
            numeric=(2, 3),
        )


def _leaves(leaves: Sequence[LeafClass]) -> None:
    print_line()
    print_table(
        ("leaf class", "instances", "parameters", "share", "examples"),
        [
            (
                leaf.name,
                str(leaf.instances),
                f"{leaf.parameters_total:,}",
                f"{leaf.share:.1%}",
                ", ".join(leaf.paths[:3]),
            )
            for leaf in leaves
        ],
        numeric=(1, 2, 3),
        optional=(4, 1),
    )


def _tree(branch: Branch, indent: str, root: bool) -> None:
    if root:
        print_line()
    folded = f" x{branch.count}" if branch.count > 1 else ""
    wrapped = "  [unit]" if branch.wrapped else ""
    each = " each" if folded else ""
    line = f"{indent}{branch.name}: {branch.class_name}{folded}  {count(branch.parameters_each)}{each}"
    print_line(line + wrapped, style="green" if branch.wrapped else None)
    for child in branch.children:
        _tree(child, indent + "  ", False)


def _where(places: Sequence[Place]) -> None:
    print_line()
    print_table(
        ("class", "defined in"),
        [
            (place.name, f"{place.file}:{place.line}" if place.line else place.module or "unknown")
            for place in places
        ],
    )


def _units(detection: Detection) -> None:
    largest, units, layout = detection.largest_unit, detection.units, detection.wrap.layout
    print_line()
    print_line(
        f"{len(units)} FSDP units ({layout} layout); the largest is {largest.id}:"
        f" {count(largest.parameters)}, {largest.share:.1%} of all,"
        f" {amount(largest.bytes_16bit)} gathered in 16 bit"
    )
    for kind, label in (("embedding", "embedding"), ("shared", "shared"), ("tail", "tail"), ("root", "root")):
        for unit in units:
            if unit.kind == kind and unit.parameters:
                named = ", ".join(unit.fqns[:3]) + (", ..." if len(unit.fqns) > 3 else "")
                print_line(f"  {label} unit: {count(unit.parameters)} in {len(unit.fqns)} tensors ({named})")


def _details(detection: Detection) -> None:
    persistent = [item for item in detection.buffers if item.persistent]
    if detection.buffers:
        total = sum(item.bytes for item in detection.buffers)
        print_line(f"{len(detection.buffers)} buffers, {amount(total)}; {len(persistent)} persistent")
    for tie in detection.ties[:4]:
        print_line(f"tied: {' = '.join(tie[:5])}{' = ...' if len(tie) > 5 else ''}")
    if len(detection.ties) > 4:
        print_line(f"... and {len(detection.ties) - 4} more ties")
    experts = detection.experts
    if experts:
        print_line(f"fused experts: {experts.tensors} tensors, {experts.share:.1%} of the parameters")
    if detection.world_size:
        _uneven(detection)
    print_line()


def _uneven(detection: Detection) -> None:
    ranks, items = detection.world_size, detection.uneven
    if not items:
        print_line(f"every parameter divides evenly over {ranks} ranks")
        return
    padding = sum(item.padding_bytes for item in items)
    print_line(
        f"{len(items)} parameters do not divide over {ranks} ranks: {amount(padding)} of padding in total"
    )
    worst = alike(
        sorted(items, key=lambda item: -item.padding_bytes),
        lambda item: item.fqn,
        lambda item: (item.dim0, item.padding_bytes, item.empty_ranks),
    )
    print_table(
        ("parameter", "number", "dim 0", "padding of each", "empty ranks"),
        [
            (name, str(len(same)), str(same[0].dim0), amount(same[0].padding_bytes), str(same[0].empty_ranks))
            for name, same in worst[:5]
        ],
        numeric=(1, 2, 3, 4),
        optional=(2,),
    )


_REASONS: Mapping[WholeReason, str] = {
    "norm": "norm",
    "router": "router: every rank needs all scores",
    "after_sum": "added once, after the sum",
    "latent": "low-rank projection",
    "embedding": "embedding that is not divided",
    "head": "head that is not divided",
    "state": "state along the sequence",
    "spanned": "a norm over all heads follows",
    "stream": "acts on the whole residual",
    "coupled": "its code treats all heads at once",
    "unknown": "how to divide it is not known",
    "overridden": "the family keeps it whole",
}


def _split(split: SplitSummary, kind: str) -> None:
    """Print every distinct parameter with its placement, local shape and reason.

    Args:
        split: The division.
        kind: ``tensor`` or ``expert``.
    """
    print_line()
    print_line(
        f"{kind} parallelism over {split.size} ranks: {count(split.local_parameters)} parameters each",
        style="bold",
    )
    rows = [
        (
            item.name + (f" (x{item.count})" if item.count > 1 else ""),
            _placement(item),
            _shape(item.shape),
            _shape(item.local_shape),
            _why(item),
        )
        for item in split.parameters
        if kind == "tensor" or item.style
    ]
    print_table(("parameter", "placement", "shape", "on one rank", "why"), rows, optional=(2, 4))
    for note in split.notes:
        print_line(f"note: {note}")


def _placement(item: PlacedParameter) -> str:
    if item.style is None:
        return "whole, gradients summed" if item.partial_gradient else "whole"
    parts = len(item.sections)
    return f"{item.style}, dimension {item.dim}" + (f", {parts} sections" if parts > 1 else "")


def _why(item: PlacedParameter) -> str:
    return _REASONS[item.reason] if item.reason else f"from the {item.origin}"


def _shape(lengths: Sequence[int]) -> str:
    return " x ".join(str(length) for length in lengths) or "scalar"
