"""accelerate's YAML (or JSON): read as accelerate 1.15's loader, launcher and plugin read it.

Sources: accelerate 1.15.0 ``commands/config/config_args.py`` (loader), ``commands/launch.py``
(defaults, ``_validate_launch_command``), ``utils/launch.py:prepare_multi_gpu_env`` (environment),
``utils/dataclasses.py:FullyShardedDataParallelPlugin`` and ``parallelism_config.py``.
"""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.dialects import accelerate_top as top
from fsdptool.config.dialects import accelerate_values as values
from fsdptool.config.dialects.accelerate_keys import (
    CANNOT,
    CONVERTED,
    FSDP_KEYS,
    INERT,
    NAME,
    NAMES,
    PARALLELISM_KEYS,
    TOP_LEVEL,
)
from fsdptool.config.dialects.accelerate_mesh import read_block
from fsdptool.config.dialects.accelerate_unread import report_inside, report_top_level
from fsdptool.config.dialects.accelerate_write import mapping, mesh_block, migrate, write
from fsdptool.config.draft import Draft
from fsdptool.files.tree import Entry, Node, effective_entries


def matches(root: Node) -> float:
    """Return how surely the mapping is accelerate's, 0 to 1."""
    keys = {entry.key for entry in root.entries}
    if "distributed_type" in keys:
        return 1.0
    if keys & {"compute_environment", "main_training_function", "rdzv_backend", "parallelism_config"}:
        return 0.9
    block = root.get("fsdp_config")
    if block and "num_processes" in keys and "num_machines" in keys:
        return 0.8
    return 0.0


def read(draft: Draft) -> None:
    """Read the file into facts, and report what the loader and the launcher say of it."""
    _top_level(draft)
    block = _block(draft, "fsdp_config")
    kind = _distributed_type(draft, block)
    _processes(draft)
    _precision(draft)
    mesh_block = _block(draft, "parallelism_config")
    draft.extras["names"] = NAMES
    draft.extras["distributed_type"] = kind
    draft.extras["deepspeed"] = _filled(_block(draft, "deepspeed_config"))
    draft.extras["fsdp_block"] = block
    draft.runs_fsdp = kind == "FSDP"
    _fsdp_block(draft, block, kind)
    read_block(draft, mesh_block)


def _filled(node: Node | None) -> bool:
    return node is not None and bool(node.entries)


def _block(draft: Draft, key: str) -> Node | None:
    entry = draft.root.get(key)
    if entry is None:
        return None
    if entry.node.kind == "map":
        return entry.node
    if entry.node.kind != "scalar" or entry.node.value is not None:
        draft.report("FSD205", f"{key} must be a mapping", entry, value=True)
    return None


def _top_level(draft: Draft) -> None:
    for entry in effective_entries(draft.root):
        key = entry.key
        if key in TOP_LEVEL or key in CONVERTED:
            if key in INERT:
                _inert(draft, entry)
            continue
        report_top_level(draft, entry)


def _inert(draft: Draft, entry: Entry) -> None:
    key = str(entry.key)
    draft.ignore(entry, "accepted at top level, but its value never wins")
    machines = draft.root.get("num_machines")
    alone = machines is None or machines.node.value in (1, None)
    if entry.node.value not in (INERT[key], None, "no") and not (key == "same_network" and alone):
        draft.report("FSD209", f"{key} has no effect in the file", entry)
    if key == "rdzv_backend" and isinstance(entry.node.value, str):
        draft.set("rdzv_backend", entry.node.value, entry=entry)
        draft.unheeded["rdzv_backend"] = INERT["rdzv_backend"]


def _distributed_type(draft: Draft, block: Node | None) -> str | None:
    environment = draft.root.get("compute_environment")
    if environment is not None and environment.node.value != "LOCAL_MACHINE":
        near = spelling.nearest(environment.node.value, ("LOCAL_MACHINE",))
        draft.report(
            "FSD218",
            f"compute_environment is {environment.node.value!r}, not LOCAL_MACHINE",
            environment,
            value=True,
            edits=draft.editor.replace(environment.node, "LOCAL_MACHINE") if near else None,
            fix="write LOCAL_MACHINE",
        )
    entry = draft.root.get("distributed_type")
    if entry is None:
        add = None
        if _filled(block):
            add = draft.editor.add(draft.root, None, {"distributed_type": "FSDP"})
        draft.report(
            "FSD212",
            "distributed_type is missing",
            draft.root.start,
            edits=add,
            fix="add distributed_type: FSDP",
            changes={"*": "FSDP"},
        )
        return "FSDP" if add else None
    kind = entry.node.value
    known = values.DISTRIBUTED_TYPES
    if kind not in known:
        near = "FSDP" if str(kind).upper().startswith("FSDP") else spelling.nearest(kind, known, cutoff=0.6)
        draft.report_value(
            "FSD206",
            f"distributed_type {kind!r} is not one of {', '.join(known)}",
            entry,
            near,
            safe=near != "FSDP",
            changes={"*": near} if near == "FSDP" else {},
        )
        return near
    return str(kind)


def _processes(draft: Draft) -> None:
    if "rdzv_backend" not in draft.facts:
        draft.set("rdzv_backend", INERT["rdzv_backend"])
    for key in (
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "use_cpu",
        "gpu_ids",
        "debug",
    ):
        entry = draft.root.get(key)
        if entry is None:
            default: Any = {"num_machines": 1, "machine_rank": 0, "use_cpu": False, "debug": False}.get(key)
            draft.set(key, default)
            continue
        top.read_top(draft, key, entry)


def _precision(draft: Draft) -> None:
    entry = draft.root.get("mixed_precision")
    if entry is None or entry.node.value is None:
        legacy = draft.root.get("fp16")
        if legacy is not None and legacy.node.value:
            draft.set("mixed_precision", "fp16", entry=legacy)
        elif legacy is not None:
            draft.set("mixed_precision", "no", entry=legacy)
        else:
            draft.set("mixed_precision", "no")
        return
    top.read_precision(draft, entry)


def _fsdp_block(draft: Draft, block: Node | None, kind: str | None) -> None:
    if block is not None and kind != "FSDP":
        for entry in effective_entries(block):
            draft.ignore(entry, f"distributed_type is {kind}, so FSDP does not start")
        return
    if kind != "FSDP":
        return
    chosen = _choose(draft, block)
    values.read_version(draft, chosen.get("fsdp_version"))
    version = draft.get("fsdp_version")
    for key, name in FSDP_KEYS.items():
        if key == "fsdp_version":
            continue
        found = chosen.get(key)
        if found is None:
            values.default(draft, key, name, version)
        else:
            values.read_block_key(draft, key, name, found, block, version)


def _choose(draft: Draft, block: Node | None) -> dict[str, Entry]:
    """Resolve prefixes and synonyms as the launcher's loop does: the last of one name wins."""
    chosen: dict[str, Entry] = {}
    if block is None:
        return chosen
    for entry in effective_entries(block):
        if not isinstance(entry.key, str):
            draft.report("FSD205", f"the key {entry.key!r} is not text; accelerate cannot use it", entry)
            continue
        full = entry.key if entry.key.startswith("fsdp") else f"fsdp_{entry.key}"
        if full in FSDP_KEYS:
            _prefix(draft, block, entry, full, chosen)
        else:
            report_inside(draft, block, entry, full)
    return chosen


def _prefix(draft: Draft, block: Node, entry: Entry, full: str, chosen: dict[str, Entry]) -> None:
    earlier = chosen.get(full)
    chosen[full] = entry
    if earlier is not None:
        draft.ignore(earlier, f"{entry.key} stands later in the file and wins")
        draft.report_removable(
            "FSD215", f"{earlier.key} and {entry.key} are one setting; the later one counts", earlier, block
        )
    elif entry.key != full:
        twin = block.get(full)
        if twin is None:
            draft.report(
                "FSD204",
                f"{entry.key} is read as {full}",
                entry,
                edits=draft.editor.rename(entry, full),
                fix=f"write {full}",
            )


__all__ = [
    "CANNOT",
    "FSDP_KEYS",
    "NAME",
    "PARALLELISM_KEYS",
    "TOP_LEVEL",
    "mapping",
    "matches",
    "mesh_block",
    "migrate",
    "read",
    "write",
]
