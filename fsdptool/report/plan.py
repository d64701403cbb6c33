"""Plans on the console. Reads the documents, decides nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fsdptool.formatting import amount
from fsdptool.records.trace import ColourGroup
from fsdptool.report import plan_words as words
from fsdptool.report.curve import curve
from fsdptool.report.mesh_words import mesh_lines
from fsdptool.report.plan_lengths import print_lengths
from fsdptool.report.plan_pipeline import print_pipeline
from fsdptool.report.plan_words import duration
from fsdptool.report.tables import (
    print_command,
    print_finding,
    print_line,
    print_rows,
    print_table,
    terminal_width,
)

_SPARKS = "▁▂▃▄▅▆▇█"
_STYLES = {"fits": "bold green", "does_not_fit": "bold red", "unknown": "bold yellow"}
_FRONT = 8


def print_plan(
    document: Mapping[str, Any], *, explain: bool = False, command: Sequence[str] | None = None
) -> None:
    """Print a plan document on one screen: verdict, configuration, one rank's memory, what to change.

    Args:
        document: What ``plan_document`` returned.
        explain: Show everything else, too: states, phases, the limiting factor, every candidate, every note.
        command: The command line that was given, without what only concerns the output; None prints none.
    """
    candidate = words.shown(document)
    print_line(words.headline(document), style=_STYLES[document["verdict"]])
    print_line(words.need(candidate))
    for line in (*words.unread(document), *words.loop(document)):
        print_line(line)
    for line in words.shortfall(document):
        print_line(line)
    if candidate["step_seconds"] is not None:
        mfu = f", MFU {candidate['mfu']:.0%}" if candidate["mfu"] is not None else ""
        step = duration(candidate["step_seconds"])
        print_line(f"{step} per step, {words.speed(candidate)}{mfu} (estimates{words.time_range(candidate)})")
    if run := words.duration_of_run(document):
        print_line(run)
    if document["details"].get("adapter"):
        lora = document["inputs"]["recipe"]["method"]["lora"]
        print_line(f"trains the LoRA adapter: {words.lora_words(lora)}")
    if stored := words.dtypes(document):
        print_line(stored)
    requested = candidate["id"] in document["details"]["asked"]
    name = "requested configuration" if requested else f"chosen configuration ({candidate['id']})"
    print_line(f"{name}: {words.brief(candidate['settings'])}")
    _command(document, command)
    for line in words.spare_memory(document):
        print_line(line)
    _host(document, candidate)
    _components(candidate, explain=explain)
    _timeline(candidate)
    _mesh(document, explain=explain)
    print_pipeline(document)
    if explain:
        _states(document)
        _peak(document, candidate)
        _phases(candidate)
        _configuration(document, candidate)
        _seconds(candidate)
        _limit(document, candidate)
    print_lengths(document, explain=explain)
    _offers(document)
    _batches(document)
    if explain or document["chosen"] is None:
        _others(document, explain=explain)
    _suggestions(document)
    _notes(document, explain=explain)


_SMALL = 0.01
"""Share of the total below which components are printed as one line."""


def _command(document: Mapping[str, Any], command: Sequence[str] | None) -> None:
    """Print the flags of the configuration, alone or in the command that plans exactly it."""
    flags = document["details"].get("flags")
    if not flags:
        return
    if command is None:
        print_command("flags", flags)
        return
    given = {part for part in command if part.startswith("--")}
    missing: list[str] = []
    keep = False
    for part in flags:
        if part.startswith("--"):
            # A global batch decides the accumulation.
            decided = part == "--accumulation" and "--global-batch" in given
            keep = not decided and part not in given and part.replace("--no-", "--") not in given
        missing += [part] if keep else []
    print_command("command", [*command, *missing, "--no-search"])


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


def _components(candidate: Mapping[str, Any], *, explain: bool) -> None:
    print_line()
    total = candidate["device_total_bytes"] or 0
    shown: list[Mapping[str, Any]] = []
    small: list[Mapping[str, Any]] = []
    for item in sorted(candidate["components"], key=lambda item: -(item["bytes"] or 0)):
        tiny = item["bytes"] is not None and item["bytes"] < _SMALL * total
        (small if tiny and not explain else shown).append(item)
    if len(small) < 2:
        shown, small = [*shown, *small], []
    cells = [
        (
            item["name"].replace("_", " "),
            amount(item["bytes"]),
            _share(item["bytes"], total),
            words.MARKS[item["basis"]],
        )
        for item in shown
    ]
    if small:
        rest = sum(item["bytes"] for item in small)
        cells.append((f"{len(small)} others", amount(rest), _share(rest, total), "estimate"))
    if candidate["device_total_bytes"] is not None:
        cells.append(("total", amount(candidate["device_total_bytes"]), "", "estimate"))
    print_table(
        ("memory of one rank at its peak", "bytes", "share", "basis"), cells, numeric=(1, 2), optional=(2,)
    )


def _share(size: int | None, total: int) -> str:
    return f"{size / total:.1%}" if total and size is not None else ""


def _mesh(document: Mapping[str, Any], *, explain: bool) -> None:
    """Print why the mesh was chosen: always where it is more than sharding over all ranks."""
    plain = words.is_plain(words.shown(document)["settings"])
    lines = list(mesh_lines(document)) if explain or not plain else []
    if lines:
        print_line()
    for line in lines:
        print_line(line)


def _states(document: Mapping[str, Any]) -> None:
    states = document["details"].get("states") or {}
    if states:
        kept = ", ".join(f"{name} {amount(size)}" for name, size in states.items())
        print_line()
        print_line(f"model states over a whole step: {kept} (exact)")


def _peak(document: Mapping[str, Any], candidate: Mapping[str, Any]) -> None:
    peak = candidate["peak"]
    if peak is None:
        return
    print_line()
    allocated, reserved = candidate["allocated_peak_bytes"], candidate["reserved_peak_bytes"]
    text = f"peak: {peak['moment']}; allocated {amount(allocated)}"
    if reserved is not None:
        text += f", reserved {amount(reserved)}{words.reserved_range(document, candidate)}"
    print_line(text)
    if candidate.get("allocated_peak_range_bytes"):
        _, most = candidate["allocated_peak_range_bytes"]
        print_line(f"allocated if compiled blocks fuse nothing: {amount(most)}")
    alive = ", ".join(f"{item['name']} {amount(item['bytes'])}" for item in peak["live"][:5])
    print_line(f"allocated at the peak: {alive}")


_CURVE = 48
"""Columns of the curve of a step, where the terminal has them."""


def _timeline(candidate: Mapping[str, Any]) -> None:
    """Print the step's curve: all of the allocated memory, then each group of components to one scale.

    A narrow terminal has fewer columns of it; in the narrowest ones it is below its name.
    """
    terminal = terminal_width(sys.stdout)
    widest = max(len(group.legend) for group in ColourGroup)
    room = _CURVE if terminal is None else min(_CURVE, terminal - widest - len("      1002.0 MiB"))
    above = room < _CURVE // 2
    rows, top = curve(candidate, max(min(_CURVE, (terminal or _CURVE) - 4), 8) if above else room)
    if not rows:
        return
    print_line()
    print_line(f"allocated over one step, 0 to {amount(top)}:")
    for name, levels in rows:
        marks = "".join(_spark(level, top) for level in levels)
        if above:
            print_line(f"  {name}, at most {amount(max(levels))}")
            print_line(f"    {marks}")
        else:
            print_line(f"  {name.ljust(widest)}  {marks}  {amount(max(levels))}")


def _spark(level: int, top: int) -> str:
    if not level or not top:
        return " "
    return _SPARKS[min(level * len(_SPARKS) // top, len(_SPARKS) - 1)]


def _phases(candidate: Mapping[str, Any]) -> None:
    rows = words.phases(candidate)
    if not rows:
        return
    print_line()
    heads = ("phase of the run", "description", "device, allocated", "host, per rank", "basis")
    print_table(heads, rows, numeric=(2,), optional=(1, 4))


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
        print_table(heads, rows, numeric=(2, 3, 4), optional=(3, 4))


def _configuration(document: Mapping[str, Any], candidate: Mapping[str, Any]) -> None:
    print_line()
    print_table(("setting", "value"), words.configuration(document, candidate["settings"]))


def _seconds(candidate: Mapping[str, Any]) -> None:
    parts = candidate.get("seconds") or {}
    if not parts:
        return
    print_line()
    rows = [(name.replace("_", " "), duration(value)) for name, value in parts.items() if value]
    print_table(("step time by part", "estimate"), rows, numeric=(1,))


def _limit(document: Mapping[str, Any], candidate: Mapping[str, Any]) -> None:
    """Say why candidates were rejected and, of several, what keeps the chosen one from being faster."""
    print_line()
    kinds = [item["rejected_by"]["kind"] for item in document["candidates"] if item["rejected_by"]]
    if kinds:
        reasons = sorted(words.REJECTIONS[kind] for kind in kinds)
        counted = ", ".join(f"{reason} {reasons.count(reason)}" for reason in dict.fromkeys(reasons))
        print_line(f"rejected candidates by reason: {counted}")
    if document["chosen"] is None or len(document["candidates"]) == 1:
        return
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


def _offers(document: Mapping[str, Any]) -> None:
    if len(document["details"]["clusters"]) > 1:
        heads, offers = words.offers(document)
        print_line()
        least = [heads.index(name) for name in ("cluster", "memory", "run", "speed") if name in heads]
        print_table(heads, offers, numeric=tuple(range(2, len(heads))), optional=least)


def _others(document: Mapping[str, Any], *, explain: bool) -> None:
    candidates = document["candidates"]
    if len(candidates) < 2:
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
    print_table(heads, rows, numeric=(1, 2, 3), optional=(2, 3))


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
    print_table(
        ("suggested change", "memory", "speed", "verdict", "cost"), rows, numeric=(1, 2), optional=(2,)
    )


def _notes(document: Mapping[str, Any], *, explain: bool) -> None:
    details = document["details"]
    lines = [f"unknown: {text}" for text in document["unknowns"]]
    if explain:
        lines += [f"note: {text}" for text in details.get("notes", ())]
    for largest in details.get("max_batch", ()):
        size = largest["micro_batch"]
        lines.append(f"largest micro-batch that fits: {size if size is not None else 'none'}")
    if document["confidence"] != "verified":
        lines.append("confidence: unverified (the model of FSDP2 was not checked against this torch version)")
    findings = [item for item in document["diagnostics"] if explain or item["severity"] != "info"]
    if lines or findings:
        print_line()
    for line in lines:
        print_line(line)
    hidden = len(document["diagnostics"]) - len(findings) + (0 if explain else len(details.get("notes", ())))
    if hidden and not explain:
        more = "note" if hidden == 1 else "notes"
        if not (lines or findings):
            print_line()
        print_line(f"--explain shows phases, every candidate and {hidden} {more}")
    for finding in findings:
        print_finding(finding["severity"], finding["code"], finding["message"], finding.get("help"))
