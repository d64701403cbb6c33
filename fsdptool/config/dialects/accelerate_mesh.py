"""``parallelism_config``: the mesh, whose keys get no prefix added and whose sizes are never filled in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdptool import spelling
from fsdptool.config.dialects.accelerate_keys import DETAILS, PARALLELISM_KEYS
from fsdptool.config.dialects.accelerate_unread import report_in_parallelism
from fsdptool.config.draft import Draft
from fsdptool.files.tree import Entry, Node, effective_entries, to_python


def read_parallelism(draft: Draft, name: str, entry: Entry) -> None:
    """Read one size of the mesh, or the rotation."""
    value = to_python(entry.node)
    if name == "cp_comm_strategy":
        read_rotation(draft, value, entry)
        return
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        draft.set(name, value, entry=entry)
        return
    meant = spelling.integer(value)
    good = meant if meant is not None and meant >= 1 else None
    # The launcher compares cp and sp with 1 before it makes text of them; the others may be text.
    if name not in ("cp", "sp") and isinstance(value, str) and good is not None and value.strip().isdecimal():
        draft.set(name, good, entry=entry)
        draft.report_value("FSD217", f"{entry.key} {value!r} means {good}", entry, good)
        return
    draft.set(name, good or 1, entry=entry)
    report_size(draft, str(entry.key), name, entry, good)


def report_size(draft: Draft, key: str, name: str, entry: Entry, meant: int | None = None) -> None:
    """Report a mesh size that is none; ``meant`` is what it can only have meant, or None."""
    message = f"{key} must be a whole number of at least 1, not {to_python(entry.node)!r}"
    draft.report_value("FSD306" if name == "cp" else "FSD205", message, entry, meant, safe=True)


def read_rotation(draft: Draft, value: Any, entry: Entry) -> None:
    """Read the context-parallel rotation."""
    if value in ("allgather", "alltoall"):
        draft.set("cp_comm_strategy", value, entry=entry)
        return
    meant = spelling.choice(value, spelling.ROTATIONS)
    draft.set("cp_comm_strategy", meant or "allgather", entry=entry)
    draft.report_value(
        "FSD307",
        f"unknown rotation {value!r}: allgather or alltoall",
        entry,
        meant,
        severity="warning" if draft.get("cp") == 1 else None,
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
    known = {**PARALLELISM_KEYS, **DETAILS}
    chosen: dict[str, Entry] = {}
    for entry in effective_entries(block):
        key = str(entry.key)
        if key in known:
            chosen[key] = entry
            continue
        report_in_parallelism(draft, block, entry, known)
    for key, name in PARALLELISM_KEYS.items():
        found = chosen.get(key)
        if found is None:
            draft.set(name, "allgather" if name == "cp_comm_strategy" else 1)
        else:
            read_parallelism(draft, name, found)
    read_details(draft, {name: chosen[key] for key, name in DETAILS.items() if key in chosen})


def read_details(draft: Draft, found: Mapping[str, Entry], *, written_in: str = "file") -> None:
    """Read the backends, and what sequence parallelism takes besides its size.

    Source: accelerate 1.15 ``utils/launch.py:prepare_extend_env_parallelism_config`` (all travels as
    text; the details only with ``sp`` above 1) and ``utils/dataclasses.py:DeepSpeedSequenceParallelConfig``.

    Args:
        draft: Where ``sp`` is known already.
        found: Entries by the names of :data:`DETAILS`.
        written_in: ``file``, ``flags`` (argparse's ``type=bool`` takes any text for true) or
            ``environment`` (no launcher fills in ``sdpa``).
    """
    for name, only in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
        entry = found.get(name)
        if entry is not None and to_python(entry.node) != only:
            value = to_python(entry.node)
            clear = value is None or spelling.nearest(value, (only,)) is not None
            draft.report_value(
                "FSD206",
                f"{entry.key} {value!r} is not {only}, the only one there is",
                entry,
                only if clear else None,
            )
    if draft.get("sp") == 1:
        for name in ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"):
            if name in found:
                draft.ignore(found[name], "read with sp_size above 1 only")
                draft.report("FSD209", f"{found[name].key} is read with sp_size above 1 only", found[name])
        return
    _variable_length(draft, found.get("sp_seq_length_is_variable"), written_in == "flags")
    _sequence_length(draft, found.get("sp_seq_length"))
    default = None if written_in == "environment" else "sdpa"
    _attention(draft, found.get("sp_attn_implementation"), default)


def _variable_length(draft: Draft, entry: Entry | None, any_text: bool) -> None:
    value = True if entry is None else to_python(entry.node)
    variable = bool(value) if any_text else str(value).lower() == "true"
    draft.set("sp_seq_length_is_variable", variable, entry=entry)
    if entry is None or isinstance(value, bool) or (any_text and spelling.boolean(value) is True):
        return
    draft.report_value(
        "FSD207",
        f"{entry.key} {value!r} is read as {str(variable).lower()}",
        entry,
        variable,
        severity="warning" if spelling.boolean(value) is not variable else None,
    )


def _sequence_length(draft: Draft, entry: Entry | None) -> None:
    draft.set("sp_seq_length", None)
    if entry is None or to_python(entry.node) is None:
        return
    if draft.get("sp_seq_length_is_variable"):
        draft.ignore(entry, "read with sp_seq_length_is_variable false only")
        return
    try:
        draft.set("sp_seq_length", int(str(to_python(entry.node))), entry=entry)
    except ValueError:
        message = f"{entry.key} must be a whole number, not {to_python(entry.node)!r}"
        draft.report("FSD205", message, entry, value=True)


def _attention(draft: Draft, entry: Entry | None, default: str | None) -> None:
    value = default if entry is None else to_python(entry.node)
    known = ("sdpa", "flash_attention_2", "flash_attention_3")
    text = value if isinstance(value, str) else None
    kernel = text is not None and "/" in text and "flash-attn" in text
    draft.set("sp_attn_implementation", text, entry=entry)
    if entry is None or text in known or kernel:
        return
    near = "sdpa" if value is None else spelling.nearest(value, known)
    draft.report_value(
        "FSD206",
        f"{entry.key} {value!r} is not one of {', '.join(known)} nor a flash-attn kernel of the hub",
        entry,
        near,
        changes={"sp_attn_implementation": near},
    )
