"""Plans and their comparison on the console. Reads the documents, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fsdptool.formatting import amount
from fsdptool.report import plan_words as words
from fsdptool.report.plan_words import duration, rate
from fsdptool.report.tables import print_finding, print_line, print_rows, print_table

_SPARKS = "▁▂▃▄▅▆▇█"
_STYLES = {"fits": "bold green", "does_not_fit": "bold red", "unknown": "bold yellow"}
_FRONT = 8


def print_plan(document: Mapping[str, Any], *, explain: bool = False) -> None:
    """Print a plan document: verdict, one rank's memory, time, other candidates, suggestions.

    Args:
        document: What ``plan_document`` returned.
        explain: Show the limiting factor, the full configuration and every candidate.
    """
    candidate = words.shown(document)
    print_line(words.headline(document), style=_STYLES[document["verdict"]])
    print_line(words.need(candidate))
    for line in words.shortfall(document):
        print_line(line)
    if candidate["step_seconds"] is not None:
        mfu = f", MFU {candidate['mfu']:.0%}" if candidate["mfu"] is not None else ""
        step = duration(candidate["step_seconds"])
        print_line(f"{step} per step, {words.speed(candidate)}{mfu} (estimates{words.time_range(candidate)})")
    requested = candidate["id"] in document["details"]["asked"]
    name = "requested configuration" if requested else f"chosen configuration ({candidate['id']})"
    print_line(f"{name}: {words.brief(candidate['settings'])}")
    for line in words.spare_memory(document):
        print_line(line)
    _components(candidate)
    _states(document)
    _peak(candidate)
    _timeline(candidate)
    _phases(candidate)
    _host(document, candidate)
    if explain:
        _configuration(candidate)
        _seconds(candidate)
        _limit(document, candidate)
    _others(document, explain=explain)
    _batches(document)
    _suggestions(document)
    _notes(document)


def print_candidates(document: Mapping[str, Any], separator: Literal["tsv", "csv"]) -> None:
    """Print every candidate for programs: figures in bytes and seconds, an empty cell for what is unknown."""
    figures = (
        *("allocated_peak_bytes", "reserved_peak_bytes", "device_total_bytes", "usable_bytes"),
        *("host_bytes_per_node", "step_seconds", "samples_per_second", "tokens_per_second", "mfu"),
    )
    settings = [name for name in document["candidates"][0]["settings"] if name != "cluster"]
    names = [offer["name"] for offer in document["details"]["offers"]]
    rows = []
    for item in document["candidates"]:
        values = {**item["settings"], "wrap_classes": " ".join(item["settings"]["wrap_classes"])}
        rejection = item["rejected_by"] or {}
        chosen = item["id"] == document["chosen"]
        rows.append(
            (
                *(item["id"], names[values["cluster"]], "chosen" if chosen else rejection.get("kind")),
                *(item[name] for name in figures),
                *(values[name] for name in settings),
                rejection.get("detail"),
            )
        )
    heads = ("candidate", "cluster", "verdict", *figures, *settings, "reason")
    print_rows(heads, rows, separator=separator)


def print_changes(path: str, changes: Sequence[tuple[str, Any, Any]]) -> None:
    """Print what changed since a plan was saved, one row each."""
    if not changes:
        print_line(f"{path}: no changes", style="bold green")
        return
    count = f"{len(changes)} value{'s' if len(changes) != 1 else ''} changed"
    print_line(f"{path}: {count}", style="bold red")
    print_table(("value", "saved", "now"), [(what, _value(a), _value(b)) for what, a, b in changes])


def _components(candidate: Mapping[str, Any]) -> None:
    print_line()
    rows = sorted(candidate["components"], key=lambda item: -(item["bytes"] or 0))
    total = candidate["device_total_bytes"] or 0
    cells = [
        (
            item["name"].replace("_", " "),
            amount(item["bytes"]),
            f"{item['bytes'] / total:.1%}" if total and item["bytes"] is not None else "",
            words.MARKS[item["basis"]],
        )
        for item in rows
    ]
    if candidate["device_total_bytes"] is not None:
        cells.append(("total", amount(candidate["device_total_bytes"]), "", "estimate"))
    print_table(("memory of one rank at its peak", "bytes", "share", "basis"), cells, numeric=(1, 2))


def _states(document: Mapping[str, Any]) -> None:
    states = document["details"].get("states") or {}
    if states:
        kept = ", ".join(f"{name} {amount(size)}" for name, size in states.items())
        print_line()
        print_line(f"model states over a whole step: {kept} (exact)")
    if stored := words.dtypes(document):
        print_line(stored)


def _peak(candidate: Mapping[str, Any]) -> None:
    peak = candidate["peak"]
    if peak is None:
        return
    print_line()
    allocated, reserved = candidate["allocated_peak_bytes"], candidate["reserved_peak_bytes"]
    text = f"peak: {peak['moment']}; allocated {amount(allocated)}"
    print_line(text + (f", reserved {amount(reserved)}" if reserved is not None else ""))
    alive = ", ".join(f"{item['name']} {amount(item['bytes'])}" for item in peak["live"][:5])
    print_line(f"allocated at the peak: {alive}")


def _timeline(candidate: Mapping[str, Any]) -> None:
    timeline = candidate["timeline"]
    if len(timeline) < 2:
        return
    levels = words.resample(timeline, 64)
    top = max(levels) or 1
    marks = "".join(_SPARKS[min(level * len(_SPARKS) // top, len(_SPARKS) - 1)] for level in levels)
    print_line(f"one step: {marks} (0 to {amount(top)} allocated)")


def _phases(candidate: Mapping[str, Any]) -> None:
    rows = words.phases(candidate)
    if not rows:
        return
    print_line()
    heads = ("phase of the run", "description", "device, allocated", "host, per rank", "basis")
    print_table(heads, rows, numeric=(2,))


def _host(document: Mapping[str, Any], candidate: Mapping[str, Any]) -> None:
    host = candidate["host_bytes_per_node"]
    if host:
        cluster = document["inputs"]["clusters"][candidate["settings"]["cluster"]]
        known = cluster.get("host_memory_bytes")
        limit = f"of {amount(known)}" if known is not None else "(not checked: its size is not given)"
        print_line(f"host memory per node: {amount(host)} {limit}")


def _batches(document: Mapping[str, Any]) -> None:
    """Print the largest micro-batch of every combination of settings that was tried (``--max-batch``)."""
    rows = [
        (
            item["checkpointing"].replace("_", " "),
            words.resharding(item["reshard_after_forward"]),
            "none fits" if item["micro_batch"] is None else f"{item['micro_batch']} x {item['accumulation']}",
            amount(item["device_total_bytes"]) if item["micro_batch"] is not None else "",
            words.speed(item) if item["micro_batch"] is not None else "",
        )
        for cluster in document["details"].get("max_batch", ())
        for item in cluster.get("settings", ())
    ]
    if len(rows) > 1:
        print_line()
        heads = ("checkpointing", "reshard", "largest micro-batch x accumulation", "memory", "speed")
        print_table(heads, rows, numeric=(2, 3, 4))


def _configuration(candidate: Mapping[str, Any]) -> None:
    print_line()
    print_table(("setting", "value"), words.configuration(candidate["settings"]))


def _seconds(candidate: Mapping[str, Any]) -> None:
    parts = candidate.get("seconds") or {}
    if not parts:
        return
    print_line()
    rows = [(name.replace("_", " "), duration(value)) for name, value in parts.items() if value]
    print_table(("step time by part", "estimate"), rows, numeric=(1,))


def _limit(document: Mapping[str, Any], candidate: Mapping[str, Any]) -> None:
    """Say what keeps the answer from being faster."""
    print_line()
    reasons: dict[str, int] = {}
    for item in document["candidates"]:
        if item["rejected_by"]:
            kind = words.REJECTIONS[item["rejected_by"]["kind"]]
            reasons[kind] = reasons.get(kind, 0) + 1
    if reasons:
        counted = ", ".join(f"{kind} {number}" for kind, number in sorted(reasons.items()))
        print_line(f"rejected by: {counted}")
    speed = candidate.get("samples_per_second")
    faster = [
        item
        for item in document["candidates"]
        if speed and (item.get("samples_per_second") or 0) > speed * 1.02 and item["rejected_by"]
    ]
    if not faster:
        print_line("limiting factor: step time; no other candidate is more than 2 % faster")
        return
    best = max(faster, key=lambda item: item["samples_per_second"])
    rejection = best["rejected_by"]
    print_line(
        f"limiting factor: {words.REJECTIONS[rejection['kind']]}; {best['id']}"
        f" ({words.brief(best['settings'])}) is faster, but {rejection['detail']}"
    )


def _others(document: Mapping[str, Any], *, explain: bool) -> None:
    candidates = document["candidates"]
    if len(candidates) < 2:
        return
    if len(document["details"]["clusters"]) > 1:
        heads, offers = words.offers(document)
        print_line()
        print_table(heads, offers, numeric=tuple(range(2, len(heads))))
        if not explain:
            return
    front = list(document["details"].get("front", ()))
    names = [item["id"] for item in candidates] if explain else front[:_FRONT]
    if document["chosen"] is not None and document["chosen"] not in names:
        names.insert(0, document["chosen"])
    rows = []
    for name in names:
        item = words.find(document, name)
        if item is not None:
            rows.append(_row(document, item))
    print_line()
    if not rows:
        print_line(f"none of the {len(candidates)} candidates fits (--explain lists them)")
        return
    title = "candidate" if explain else f"Pareto front of {len(candidates)} candidates"
    heads = (title, "memory", "per step", "speed", "settings", "verdict")
    print_table(heads, rows, numeric=(1, 2, 3))


def _row(document: Mapping[str, Any], item: Mapping[str, Any]) -> tuple[str, ...]:
    verdict = "chosen" if item["id"] == document["chosen"] else words.reason(item) or "fits"
    settings = words.brief(item["settings"])
    if len(document["details"]["clusters"]) > 1:
        settings = f"{document['details']['clusters'][item['settings']['cluster']]}; {settings}"
    if item.get("price_per_million_samples") is not None:
        verdict = f"{verdict}; price per million samples {words.money(item['price_per_million_samples'])}"
    return (
        item["id"],
        amount(item["device_total_bytes"]),
        duration(item["step_seconds"]),
        words.speed(item),
        settings,
        verdict,
    )


def _suggestions(document: Mapping[str, Any]) -> None:
    steps = document["next_steps"]
    if not steps:
        return
    print_line()
    rows = [
        (
            step["change"],
            amount(step["device_total_bytes"]),
            words.speed(step) if step.get("samples_per_second") else "",
            words.FITS[step["fits"]],
            step["cost"],
        )
        for step in steps
    ]
    print_table(("suggested change", "memory", "speed", "verdict", "cost"), rows, numeric=(1, 2))


def _notes(document: Mapping[str, Any]) -> None:
    details = document["details"]
    lines = [f"unknown: {text}" for text in document["unknowns"]]
    lines += [f"note: {text}" for text in details.get("notes", ())]
    for largest in details.get("max_batch", ()):
        size = largest["micro_batch"]
        lines.append(f"largest micro-batch that fits: {size if size is not None else 'none'}")
    if document["confidence"] != "verified":
        lines.append("confidence: unverified (the model of FSDP2 was not checked against this torch version)")
    if lines or document["diagnostics"]:
        print_line()
    for line in lines:
        print_line(line)
    for finding in document["diagnostics"]:
        print_finding(finding["severity"], finding["code"], finding["message"], finding.get("help"))


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def print_comparison(document: Mapping[str, Any]) -> None:
    """Print a comparison document: figures, then moment by moment."""
    run = document["kind"] == "run"
    heads = ("predicted", "measured", "measured over predicted") if run else ("left", "right", "difference")
    print_line(f"{document['left']} and {document['right']}", style="bold")
    if document["error_percent"] is not None:
        error = document["error_percent"]
        print_line(
            f"the predicted peak is {abs(error):.2f} % {'above' if error >= 0 else 'below'} the measured one"
        )
    print_line()
    print_table(("", *heads), [_cells(row) for row in document["rows"]], numeric=(1, 2, 3))
    if document["moments"]:
        print_line()
        title = "measured" if run else "moment"
        print_table((title, *heads), [_cells(row) for row in document["moments"]], numeric=(1, 2, 3))
    for note in document["notes"]:
        print_line(f"note: {note}")


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    percent = f"{row['percent']:+.1f} %" if row["percent"] is not None else ""
    return row["what"], _cell(row["left"], row["unit"]), _cell(row["right"], row["unit"]), percent


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return "unknown" if unit != "text" else "none"
    forms = {"bytes": amount, "seconds": duration, "rate": rate}
    return forms[unit](value) if unit in forms else str(value)
