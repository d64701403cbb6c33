"""How accelerate 1.15 reads its top-level values: processes, machines, GPU ids, precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdptool import spelling
from fsdptool.config.canonical import MESH
from fsdptool.config.dialects.accelerate import plugin
from fsdptool.config.dialects.accelerate.keys import DETAILS, PARALLELISM_KEYS
from fsdptool.config.dialects.protocol import LintContext
from fsdptool.files.tree import Entry, Node, effective_entries, to_python


def read_top(lint: LintContext, key: str, entry: Entry, value: Any) -> None:
    """Read one of the settings of the launch, as the launcher and torchrun take a ``value``.

    A flag's value comes out of argparse; a file's is what YAML or JSON makes of it, and no type is checked
    before the launcher computes with it.
    """
    if key in ("use_cpu", "debug"):
        _truth(lint, key, entry, value)
    elif key == "gpu_ids":
        _gpu_ids(lint, value, entry)
    elif key == "main_process_ip":
        lint.set(key, None if value is None else str(value), entry=entry)
    elif key == "num_processes":
        _process_count(lint, key, entry, value)
    elif key == "num_machines":
        _machines(lint, key, entry, value)
    elif key == "machine_rank":
        _rank(lint, key, entry, value)
    else:
        _port(lint, key, entry, value)


def _port(lint: LintContext, key: str, entry: Entry, value: Any) -> None:
    """Read the port, which the launcher tries to connect to on the first machine."""
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 65535
    number = _near(value, 0, 65535)
    lint.set(key, value if good else number, entry=entry)
    if good or value is None:
        return
    unread = (lint.get("num_machines") or 1) > 1 and lint.get("machine_rank") not in (0, None)
    message = f"{key} must be a whole number from 0 to 65535, not {value!r}"
    if unread and plugin.whole(value) == number is not None:
        lint.report_value(
            "FSD205", f"{message}: fails on the first machine", entry, number, severity="warning"
        )
    else:
        lint.report_value("FSD205", message, entry, number, safe=True)


def _near(value: Any, low: int, high: int = 10**9) -> int | None:
    """Return the number that a value can only have meant, if it lies within the bounds."""
    number = spelling.integer(value)
    return number if number is not None and low <= number <= high else None


def _truth(lint: LintContext, key: str, entry: Entry, value: Any) -> None:
    """Read what the launcher tests for truth without parsing it: any text but an empty one is true."""
    lint.set(key, bool(value), entry=entry)
    if isinstance(value, bool) or value is None:
        return
    meant, truth = spelling.boolean(value), str(bool(value)).lower()
    if meant is bool(value):
        lint.report_value("FSD207", f"{key} {value!r} is read as {truth}", entry, meant)
        return
    lint.report_value(
        "FSD337",
        f"{key} {value!r} is not parsed: accelerate reads it as {truth}",
        entry,
        meant,
        severity=None if meant is not None else "warning",
        safe=False,
        changes={key: meant},
    )


def _process_count(lint: LintContext, key: str, entry: Entry, value: Any) -> None:
    """Read the process count, of which torchrun makes ``int(str(value))`` on one machine."""
    several = (lint.get("num_machines") or 1) > 1
    if value in (None, -1) and lint.document.language != "flags":
        lint.set(key, None, entry=None if value is None else entry)
        return
    if value in ("gpu", "auto", "cpu"):
        lint.set(key, value, entry=entry)
        return
    number = plugin.whole(value) if isinstance(value, str) and not several else value
    if isinstance(number, int) and not isinstance(number, bool) and number >= 1:
        lint.set(key, number, entry=entry)
        if isinstance(value, str):
            lint.report_value("FSD217", f"{key} {value!r} means {number}", entry, number)
        return
    lint.set(key, _near(value, 1), entry=entry)
    message = f"{key} must be a whole number of at least 1, not {value!r}"
    lint.report_value("FSD205", message, entry, _near(value, 1), safe=True)


def _machines(lint: LintContext, key: str, entry: Entry, value: Any) -> None:
    """Read the number of machines: the launcher compares it with 1, and divides by it only above."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    alone = isinstance(value, int | float) and not value > 1
    lint.set(key, value if whole and value >= 1 else _near(value, 1) or 1, entry=entry)
    if whole and value >= 1:
        return
    if value is None:
        _report_null(lint, key, entry)
        return
    message = f"{key} must be a whole number of at least 1, not {value!r}"
    lint.report_value(
        "FSD205",
        f"{message}: one machine runs" if alone else message,
        entry,
        1 if alone else _near(value, 1),
        severity="warning" if alone else None,
        safe=True,
    )


def _rank(lint: LintContext, key: str, entry: Entry, value: Any) -> None:
    """Read the rank of the machine, which counts (as ``int(value)``) with several machines only."""
    several = (lint.get("num_machines") or 1) > 1
    good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if isinstance(value, str) and several:
        number = plugin.whole(value)
        if number is not None and number >= 0:
            lint.set(key, number, entry=entry)
            lint.report_value("FSD217", f"{key} {value!r} means {number}", entry, number)
            return
    number = int(value) if isinstance(value, bool) else _near(value, 0)
    lint.set(key, value if good else number or (None if value is None else 0), entry=entry)
    if good or (value is None and not several):
        return
    if value is None:
        _report_null(lint, key, entry)
        return
    message = f"{key} must be a whole number of at least 0, not {value!r}"
    taken = not several or (isinstance(value, int | float) and value >= 0)
    lint.report_value(
        "FSD205",
        message if several else f"{message}; one machine does not need it",
        entry,
        _near(value, 0),
        severity="warning" if taken else None,
        safe=True,
    )


def _report_null(lint: LintContext, key: str, entry: Entry) -> None:
    """Report a number written as null: the launcher takes it before its default, and compares it."""
    lint.report(
        "FSD205",
        f"{key} must be a whole number, not null; the launcher stops with a TypeError",
        entry,
        edits=lint.editor.remove(lint.root, entry),
        safe=True,
        fix=f"remove {key}",
    )


def _gpu_ids(lint: LintContext, value: Any, entry: Entry) -> None:
    if value is None or isinstance(value, str):
        lint.set("gpu_ids", value, entry=entry)
        return
    if isinstance(value, list):
        text: str | None = ",".join(str(item) for item in value)
    elif isinstance(value, int) and not isinstance(value, bool):
        # PyYAML reads 0,1 as text but 4,567 never as a number; a bare number may be a sexagesimal.
        text = entry.node.raw if entry.node.raw.isdigit() else str(value)
    else:
        text = None
    lint.set("gpu_ids", text, entry=entry)
    lint.report_value(
        "FSD219",
        f"gpu_ids {value!r} is not text; the launcher crashes",
        entry,
        edits=lint.editor.replace_entry(entry, text) if text is not None else None,
        fix=f"write '{text}'",
    )


def read_precision(lint: LintContext, entry: Entry) -> None:
    """Read ``mixed_precision``: no, fp16, bf16 or fp8 in any case; unquoted no is a boolean."""
    value = to_python(entry.node)
    if isinstance(value, str) and value.lower() in ("no", "fp16", "bf16", "fp8"):
        lint.set("mixed_precision", value.lower(), entry=entry)
        if value != value.lower():
            lint.report_value(
                "FSD217", f"mixed_precision {value!r} means {value.lower()}", entry, value.lower()
            )
        return
    if value is False:
        lint.set("mixed_precision", "no", entry=entry)
        lint.report_value(
            "FSD208",
            f"mixed_precision: {entry.node.raw} is the boolean false in YAML 1.1",
            entry,
            edits=lint.editor.replace(entry.node, "no"),
            fix="write 'no'",
        )
        return
    meant = spelling.choice(value, spelling.PRECISIONS)
    lint.set("mixed_precision", meant or "no", entry=entry)
    lint.report_value(
        "FSD206", f"mixed_precision {value!r} is not one of 'no', fp16, bf16, fp8", entry, meant
    )


def read_parallelism(lint: LintContext, name: str, entry: Entry) -> None:
    """Read one size of the mesh, or the rotation."""
    value = to_python(entry.node)
    if name == "cp_comm_strategy":
        read_rotation(lint, value, entry)
        return
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        lint.set(name, value, entry=entry)
        return
    meant = spelling.integer(value)
    good = meant if meant is not None and meant >= 1 else None
    # The launcher compares cp and sp with 1 before it makes text of them; the others may be text.
    if name not in ("cp", "sp") and isinstance(value, str) and plugin.whole(value) == good is not None:
        lint.set(name, good, entry=entry)
        lint.report_value("FSD217", f"{entry.key} {value!r} means {good}", entry, good)
        return
    lint.set(name, good or 1, entry=entry)
    report_size(lint, str(entry.key), name, entry, good)


def report_size(lint: LintContext, key: str, name: str, entry: Entry, meant: int | None = None) -> None:
    """Report an invalid mesh size; ``meant`` is the only size that it can have meant, or None."""
    message = f"{key} must be a whole number of at least 1, not {to_python(entry.node)!r}"
    lint.report_value("FSD306" if name == "cp" else "FSD205", message, entry, meant, safe=True)


def read_rotation(lint: LintContext, value: Any, entry: Entry) -> None:
    """Read the context-parallel rotation."""
    if value in ("allgather", "alltoall"):
        lint.set("cp_comm_strategy", value, entry=entry)
        return
    meant = spelling.choice(value, spelling.ROTATIONS)
    lint.set("cp_comm_strategy", meant or "allgather", entry=entry)
    lint.report_value(
        "FSD307",
        f"unknown context-parallel rotation {value!r}: use allgather or alltoall",
        entry,
        meant,
        severity="warning" if lint.get("cp") == 1 else None,
    )


def read_block(lint: LintContext, block: Node | None) -> None:
    """Read the mesh block into ``lint``; without one every size is 1 and ``dp_shard`` takes the rest."""
    lint.parallelism_block = block if (block is not None and block.entries) else None
    if not (block is not None and block.entries) or block is None:
        for name in MESH:
            lint.set(name, None if name == "dp_shard" else 1)
        lint.set("cp_comm_strategy", "allgather")
        return
    known = {**PARALLELISM_KEYS, **DETAILS}
    chosen: dict[str, Entry] = {}
    for entry in effective_entries(block):
        key = str(entry.key)
        if key in known:
            chosen[key] = entry
            continue
        _report_unread(lint, block, entry, known)
    for key, name in PARALLELISM_KEYS.items():
        written = chosen.get(key)
        if written is None:
            lint.set(name, "allgather" if name == "cp_comm_strategy" else 1)
        else:
            read_parallelism(lint, name, written)
    read_details(lint, {name: chosen[key] for key, name in DETAILS.items() if key in chosen})


def _report_unread(lint: LintContext, block: Node, entry: Entry, known: dict[str, str]) -> None:
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
    lint.report_removable("FSD202", f"{entry.key} is not read", entry, block, help="remove it", safe=True)


def read_details(lint: LintContext, details: Mapping[str, Entry], *, written_in: str = "file") -> None:
    """Read the backends, and what sequence parallelism takes besides its size.

    Source: accelerate 1.15 ``utils/launch.py:prepare_extend_env_parallelism_config`` (all travels as
    text; the details only with ``sp`` above 1) and ``utils/dataclasses.py:DeepSpeedSequenceParallelConfig``.

    Args:
        lint: Where ``sp`` is known already.
        details: Entries by the names of :data:`DETAILS`.
        written_in: ``file``, ``flags`` (argparse's ``type=bool`` takes any text for true) or
            ``environment`` (no launcher fills in ``sdpa``).
    """
    for name, only in (("cp_backend", "torch"), ("sp_backend", "deepspeed")):
        entry = details.get(name)
        if entry is not None and to_python(entry.node) != only:
            value = to_python(entry.node)
            clear = value is None or spelling.nearest(value, (only,)) is not None
            lint.report_value(
                "FSD206",
                f"{entry.key} {value!r} is not {only}, the only supported value",
                entry,
                only if clear else None,
            )
    if lint.get("sp") == 1:
        for name in ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation"):
            if name in details:
                lint.ignore(details[name], "read with sp_size above 1 only")
                lint.report("FSD209", f"{details[name].key} is read with sp_size above 1 only", details[name])
        return
    _variable_length(lint, details.get("sp_seq_length_is_variable"), written_in == "flags")
    _sequence_length(lint, details.get("sp_seq_length"))
    default = None if written_in == "environment" else "sdpa"
    _attention(lint, details.get("sp_attn_implementation"), default)


def _variable_length(lint: LintContext, entry: Entry | None, any_text: bool) -> None:
    value = True if entry is None else to_python(entry.node)
    variable = bool(value) if any_text else str(value).lower() == "true"
    lint.set("sp_seq_length_is_variable", variable, entry=entry)
    if entry is None or isinstance(value, bool) or (any_text and spelling.boolean(value) is True):
        return
    lint.report_value(
        "FSD207",
        f"{entry.key} {value!r} is read as {str(variable).lower()}",
        entry,
        variable,
        severity="warning" if spelling.boolean(value) is not variable else None,
    )


def _sequence_length(lint: LintContext, entry: Entry | None) -> None:
    lint.set("sp_seq_length", None)
    if entry is None or to_python(entry.node) is None:
        return
    if lint.get("sp_seq_length_is_variable"):
        lint.ignore(entry, "read with sp_seq_length_is_variable false only")
        return
    try:
        lint.set("sp_seq_length", int(str(to_python(entry.node))), entry=entry)
    except ValueError:
        message = f"{entry.key} must be a whole number, not {to_python(entry.node)!r}"
        lint.report_value("FSD205", message, entry)


def _attention(lint: LintContext, entry: Entry | None, default: str | None) -> None:
    value = default if entry is None else to_python(entry.node)
    known = ("sdpa", "flash_attention_2", "flash_attention_3")
    text = value if isinstance(value, str) else None
    kernel = text is not None and "/" in text and "flash-attn" in text
    lint.set("sp_attn_implementation", text, entry=entry)
    if entry is None or text in known or kernel:
        return
    near = "sdpa" if value is None else spelling.nearest(value, known)
    lint.report_value(
        "FSD206",
        f"{entry.key} {value!r} is not one of {', '.join(known)} or a flash-attn kernel from the hub",
        entry,
        near,
        changes={"sp_attn_implementation": near},
    )
