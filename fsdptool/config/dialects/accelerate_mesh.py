"""``parallelism_config``: the mesh, whose keys get no prefix added and whose sizes are never filled in."""

from __future__ import annotations

from typing import Any

from fsdptool.config import spelling
from fsdptool.config.dialects.accelerate_keys import PARALLELISM_KEYS, PARALLELISM_OTHER
from fsdptool.config.draft import Draft
from fsdptool.config.tree import Entry, Node, effective_entries, to_python


def read_parallelism(draft: Draft, name: str, entry: Entry, block: Node) -> None:
    """Read one size of the mesh, or the rotation."""
    value = entry.node.value if entry.node.kind == "scalar" else to_python(entry.node)
    if name == "cp_comm_strategy":
        read_rotation(draft, value, entry, block)
        return
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        draft.set(name, value, entry=entry, parent=block)
        return
    meant = spelling.integer(value)
    good = meant if meant is not None and meant >= 1 else None
    draft.set(name, good or 1, entry=entry, parent=block)
    draft.report(
        "FSD306" if name == "cp" else "FSD205",
        f"{entry.key} must be a whole number of at least 1, not {value!r}",
        entry,
        value=True,
        edits=draft.editor.replace(entry.node, good) if good is not None else None,
        safe=True,
        fix=f"write {good}",
    )


def read_rotation(draft: Draft, value: Any, entry: Entry, parent: Node | None) -> None:
    """Read the context-parallel rotation."""
    if value in ("allgather", "alltoall"):
        draft.set("cp_comm_strategy", value, entry=entry, parent=parent)
        return
    meant = spelling.choice(value, spelling.ROTATIONS)
    draft.set("cp_comm_strategy", meant or "allgather", entry=entry, parent=parent)
    draft.report(
        "FSD307",
        f"unknown rotation {value!r}: allgather or alltoall",
        entry,
        value=True,
        edits=draft.editor.replace(entry.node, meant) if meant else None,
        fix=f"write {meant}",
    )


def read_block(draft: Draft, block: Node | None) -> None:
    """Read the mesh block into ``draft``; without one every size is 1 and ``dp_shard`` takes the rest."""
    draft.extras["parallelism_block"] = block if (block is not None and block.entries) else None
    if not (block is not None and block.entries) or block is None:
        for name in ("dp_replicate", "cp", "tp", "sp"):
            draft.set(name, 1)
        draft.set("dp_shard", None)
        draft.set("cp_comm_strategy", "allgather")
        return
    known = {**PARALLELISM_KEYS, **dict.fromkeys(PARALLELISM_OTHER, "")}
    chosen: dict[str, Entry] = {}
    for entry in effective_entries(block):
        key = str(entry.key)
        if key in known:
            chosen[key] = entry
            continue
        _unknown_parallelism(draft, block, entry, known)
    for key, name in PARALLELISM_KEYS.items():
        found = chosen.get(key)
        if found is None:
            draft.set(name, "allgather" if name == "cp_comm_strategy" else 1)
        else:
            read_parallelism(draft, name, found, block)


def _unknown_parallelism(draft: Draft, block: Node, entry: Entry, known: dict[str, str]) -> None:
    key = str(entry.key)
    draft.ignore(entry, "parallelism_config gets no prefix added: the key is not read")
    full = f"parallelism_config_{key}"
    if full not in known:
        near = spelling.nearest(key, [name.removeprefix("parallelism_config_") for name in known], cutoff=0.8)
        full = f"parallelism_config_{near}" if near else spelling.nearest(key, known, cutoff=0.8) or ""
    if full and block.get(full) is None:
        draft.report(
            "FSD203",
            f"{key} is not read: the key is {full}",
            entry,
            edits=draft.editor.rename(entry, full),
            safe=False,
            fix=f"write {full}",
            changes={PARALLELISM_KEYS.get(full, "*"): entry.node.value},
        )
        return
    draft.report(
        "FSD202",
        f"{key} is not read by anyone",
        entry,
        help="remove it",
        edits=draft.editor.remove(block, entry),
        safe=True,
        fix=f"remove {key}",
    )
