"""Keys of accelerate's files that are not read, or not in the place where they are written."""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.canonical import begins
from fsdptool.config.context import LintContext
from fsdptool.config.dialects.accelerate.keys import (
    DEAD,
    FSDP_KEYS,
    IN_PYTHON,
    PARALLELISM_KEYS,
    TOP_LEVEL,
    WHOLE_NUMBERS,
)
from fsdptool.files.tree import Entry, Node


def report_inside(lint: LintContext, block: Node, entry: Entry, full: str) -> None:
    """Report a key of ``fsdp_config`` that is not read; ``full`` is the key with its prefix."""
    key = str(entry.key)
    if key.startswith("_"):
        lint.report("FSD220", f"{key} is a note", entry)
        return
    if key not in TOP_LEVEL and (full in DEAD or key in DEAD):
        meant = DEAD.get(full, DEAD.get(key))
        _report_dead(lint, block, entry, full, meant)
        return
    if key in TOP_LEVEL and key not in ("fsdp_config",):
        lint.ignore(entry, "belongs at top level; it is not read inside fsdp_config")
        removed = lint.editor.remove(block, entry)
        moves = lint.root.get(key) is None and entry.node.kind == "scalar" and removed is not None
        added = lint.editor.add(lint.root, None, {key: entry.node.value}) if moves else None
        lint.report(
            "FSD210",
            f"{key} belongs at top level; it is not read inside fsdp_config",
            entry,
            severity="warning",
            edits=(*removed, *added) if removed is not None and added is not None else removed,
            safe=added is None,
            fix=f"remove {key}" if added is None else f"move {key} to the top level",
            changes={} if added is None else {"*": key},
        )
        return
    near = spelling.nearest(full, FSDP_KEYS, cutoff=0.8)
    if near is not None and block.get(near) is None:
        lint.ignore(entry, f"unknown; did you mean {near}?")
        lint.report_renamed(
            "FSD202",
            f"{key} is not read: did you mean {near}?",
            entry,
            near,
            help=f"rename it to {near}; it then takes effect",
            changes=begins(FSDP_KEYS[near], entry.node.value),
        )
        return
    lint.ignore(entry, "unknown inside fsdp_config")
    _report_unread(lint, block, entry)


def report_in_parallelism(lint: LintContext, block: Node, entry: Entry, known: dict[str, str]) -> None:
    """Report a key of ``parallelism_config`` that is not read; ``known`` are the keys that are."""
    key = str(entry.key)
    lint.ignore(entry, "prefixes are not added in parallelism_config: the key is not read")
    full = f"parallelism_config_{key}"
    if full not in known:
        near = spelling.nearest(key, [name.removeprefix("parallelism_config_") for name in known], cutoff=0.8)
        full = f"parallelism_config_{near}" if near else spelling.nearest(key, known, cutoff=0.8) or ""
    if full and block.get(full) is None:
        lint.report_renamed(
            "FSD203",
            f"{key} is not read: the key is {full}",
            entry,
            full,
            fix=f"write {full}",
            changes={PARALLELISM_KEYS.get(full, "*"): entry.node.value},
        )
        return
    _report_unread(lint, block, entry)


def _report_unread(lint: LintContext, block: Node, entry: Entry) -> None:
    lint.report_removable("FSD202", f"{entry.key} is not read", entry, block, help="remove it", safe=True)


def report_top_level(lint: LintContext, entry: Entry) -> None:
    """Report a key that the loader does not know at top level: it refuses the file."""
    key = str(entry.key)
    lint.ignore(entry, "unknown at top level: the file is refused")
    inner = key if key.startswith("fsdp_") else f"fsdp_{key}"
    if inner in FSDP_KEYS or inner in DEAD or f"parallelism_config_{key}" in PARALLELISM_KEYS:
        home = "parallelism_config" if f"parallelism_config_{key}" in PARALLELISM_KEYS else "fsdp_config"
        lint.report(
            "FSD210",
            f"{key} belongs inside {home}; accelerate refuses it at top level",
            entry,
            edits=_move(lint, entry, home, inner),
            safe=False,
            fix=f"move {key} into {home}",
            changes=_moved(entry, inner),
        )
        return
    whole = isinstance(entry.node.value, int) and not isinstance(entry.node.value, bool)
    near = (
        spelling.nearest(key, WHOLE_NUMBERS, cutoff=0.65) or spelling.same_ends(key, WHOLE_NUMBERS)
        if whole
        else spelling.nearest(key, TOP_LEVEL, cutoff=0.75)
    )
    if near is not None and lint.root.get(near) is None:
        lint.report_renamed(
            "FSD201",
            f"unknown key {key!r}: did you mean {near!r}?",
            entry,
            near,
            help=f"rename it to {near}",
            changes={"*": near},
        )
    else:
        lint.report_removable(
            "FSD201",
            f"unknown key {key!r}",
            entry,
            lint.root,
            help="remove it; accelerate refuses the file",
            safe=False,
            changes={},
        )


def _move(lint: LintContext, entry: Entry, home: str, key: str) -> Any:
    target = lint.root.get(home)
    removed = lint.editor.remove(lint.root, entry)
    if target is None or entry.node.kind != "scalar" or removed is None:
        return None
    twin = target.node.get(key)
    if twin is not None:
        # Written where it belongs as well: the stray one may go if it says the same.
        return removed if twin.node.value == entry.node.value else None
    added = lint.editor.add(target.node, target, {key: entry.node.value})
    return None if added is None else (*removed, *added)


def _moved(entry: Entry, key: str) -> dict[str, Any]:
    return {FSDP_KEYS.get(key, key): entry.node.value}


def _report_dead(lint: LintContext, block: Node, entry: Entry, full: str, meant: str | None) -> None:
    """Report a key that looks right and is not read."""
    key = str(entry.key)
    if meant is not None and block.get(meant) is None:
        lint.ignore(entry, f"not read; the key is {meant}")
        lint.report_renamed(
            "FSD211", f"{key} is not read: the key is {meant}", entry, meant, changes={"*": entry.node.value}
        )
        return
    lint.ignore(entry, "not read by this version of accelerate")
    advice = f"remove it; {IN_PYTHON[full]}" if full in IN_PYTHON else "remove it"
    lint.report_removable("FSD211", f"{key} is not read", entry, block, help=advice, safe=True)
