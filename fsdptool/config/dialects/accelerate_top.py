"""How accelerate 1.15 reads its top-level values: processes, machines, GPU ids, precision."""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.dialects.accelerate_scalars import replace_any
from fsdptool.config.draft import Draft
from fsdptool.files.tree import Entry, to_python


def read_top(draft: Draft, key: str, entry: Entry) -> None:
    """Read one of the top-level keys about processes and machines."""
    value = to_python(entry.node)
    if key in ("use_cpu", "debug"):
        if not isinstance(value, bool) and value is not None:
            meant = spelling.boolean(value)
            draft.report_value(
                "FSD205",
                f"{key} must be true or false, not {value!r}",
                entry,
                meant,
                safe=meant == bool(value),
                changes={key: meant},
            )
        draft.set(key, bool(value), entry=entry)
    elif key == "gpu_ids":
        _gpu_ids(draft, value, entry)
    elif key == "main_process_ip":
        draft.set(key, None if value is None else str(value), entry=entry)
    elif key == "num_processes" and value in ("gpu", "auto", "cpu"):
        draft.set(key, value, entry=entry)
    elif value is None:
        _null(draft, key, entry)
    else:
        low = {"machine_rank": 0, "main_process_port": 0, "num_processes": -1}.get(key, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value >= low:
            draft.set(key, None if value == -1 else value, entry=entry)
            return
        number = spelling.integer(value)
        good = number if number is not None and number >= low else None
        draft.set(
            key,
            good if good is not None else {"num_machines": 1, "machine_rank": 0}.get(key),
            entry=entry,
        )
        draft.report_value("FSD205", f"{key} must be a whole number, not {value!r}", entry, good, safe=True)


def _null(draft: Draft, key: str, entry: Entry) -> None:
    """A number written as null: the launcher takes it before its default, and compares it."""
    machines = draft.root.get("num_machines")
    several = machines is not None and (spelling.integer(machines.node.value) or 1) > 1
    stops = key == "num_machines" or (key == "machine_rank" and several)
    draft.set(key, 1 if key == "num_machines" else None, entry=entry)
    if stops:
        draft.report(
            "FSD205",
            f"{key} must be a whole number, not null; the launcher stops with a TypeError",
            entry,
            edits=draft.editor.remove(draft.root, entry),
            safe=True,
            fix=f"remove {key}",
        )


def _gpu_ids(draft: Draft, value: Any, entry: Entry) -> None:
    if value is None or isinstance(value, str):
        draft.set("gpu_ids", value, entry=entry)
        return
    if isinstance(value, list):
        text: str | None = ",".join(str(item) for item in value)
    elif isinstance(value, int) and not isinstance(value, bool):
        # PyYAML reads 0,1 as text but 4,567 never as a number; a bare number may be a sexagesimal.
        text = entry.node.raw if entry.node.raw.isdigit() else str(value)
    else:
        text = None
    draft.set("gpu_ids", text, entry=entry)
    draft.report(
        "FSD219",
        f"gpu_ids {value!r} is not text; the launcher crashes",
        entry,
        value=True,
        edits=replace_any(draft, entry, text) if text is not None else None,
        fix=f"write '{text}'",
    )


def read_precision(draft: Draft, entry: Entry) -> None:
    """Read ``mixed_precision``: no, fp16, bf16 or fp8 in any case; unquoted no is a boolean."""
    value = to_python(entry.node)
    if isinstance(value, str) and value.lower() in ("no", "fp16", "bf16", "fp8"):
        draft.set("mixed_precision", value.lower(), entry=entry)
        if value != value.lower():
            draft.report_value(
                "FSD217", f"mixed_precision {value!r} means {value.lower()}", entry, value.lower()
            )
        return
    if value is False:
        draft.set("mixed_precision", "no", entry=entry)
        draft.report(
            "FSD208",
            f"mixed_precision: {entry.node.raw} is the boolean false to YAML 1.1",
            entry,
            value=True,
            edits=draft.editor.replace(entry.node, "no"),
            fix="write 'no'",
        )
        return
    meant = spelling.choice(value, spelling.PRECISIONS)
    draft.set("mixed_precision", meant or "no", entry=entry)
    draft.report_value(
        "FSD206", f"mixed_precision {value!r} is not one of 'no', fp16, bf16, fp8", entry, meant
    )
