"""accelerate's YAML (or JSON): read as accelerate 1.15's loader, launcher and plugin read it.

Sources: accelerate 1.15.0 ``commands/config/config_args.py`` (loader), ``commands/launch.py``
(defaults, ``_validate_launch_command``), ``utils/launch.py:prepare_multi_gpu_env`` (environment),
``utils/dataclasses.py:FullyShardedDataParallelPlugin`` and ``parallelism_config.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsdptool import spelling
from fsdptool.config.canonical import LEGACY_DEFAULTS
from fsdptool.config.context import LintContext
from fsdptool.config.dialects.accelerate import launch, values
from fsdptool.config.dialects.accelerate.fsdp1 import read_legacy, synchronise
from fsdptool.config.dialects.accelerate.keys import CONVERTED, FSDP_KEYS, INERT, NAMES, TOP_LEVEL
from fsdptool.config.dialects.accelerate.unread import report_inside, report_top_level
from fsdptool.files.tree import Entry, Node, effective_entries, to_python


def read(lint: LintContext) -> None:
    """Read the file into facts, and report what the loader and the launcher say of it."""
    environment = lint.root.get("compute_environment")
    if environment is not None and spelling.nearest(environment.node.value, ("AMAZON_SAGEMAKER",)):
        lint.runs_fsdp = lint.configures_fsdp = False
        message = "the file configures a job on Amazon SageMaker, which has other keys and does not use FSDP"
        lint.report_value("FSD110", message, environment)
        return
    _top_level(lint)
    block = _block(lint, "fsdp_config")
    kind = _distributed_type(lint, block)
    _processes(lint)
    _precision(lint)
    mesh_block = _block(lint, "parallelism_config")
    lint.names = NAMES
    lint.distributed_type = kind
    lint.deepspeed = _filled(_block(lint, "deepspeed_config"))
    lint.fsdp_block = block
    lint.runs_fsdp = kind == "FSDP"
    _fsdp_block(lint, block, kind)
    launch.read_block(lint, mesh_block)


def _filled(node: Node | None) -> bool:
    return node is not None and bool(node.entries)


def _block(lint: LintContext, key: str) -> Node | None:
    entry = lint.root.get(key)
    if entry is None:
        return None
    if entry.node.kind == "map":
        return entry.node
    if entry.node.kind != "scalar" or entry.node.value is not None:
        lint.report_value("FSD205", f"{key} must be a mapping", entry)
    return None


def _top_level(lint: LintContext) -> None:
    for entry in effective_entries(lint.root):
        key = entry.key
        if key in TOP_LEVEL or key in CONVERTED:
            if key in INERT:
                _inert(lint, entry)
            continue
        report_top_level(lint, entry)


def _inert(lint: LintContext, entry: Entry) -> None:
    key = str(entry.key)
    if lint.document.language == "flags" and entry.key_node.file is None:
        lint.set(key, entry.node.value, entry=entry)  # a flag of the launcher, which does take effect
        return
    lint.ignore(entry, "accepted at top level, but never takes effect")
    machines = lint.root.get("num_machines")
    alone = machines is None or machines.node.value in (1, None)
    if entry.node.value not in (INERT[key], None, "no") and not (key == "same_network" and alone):
        lint.report("FSD209", f"{key} has no effect in the file", entry)
    if key == "rdzv_backend" and isinstance(entry.node.value, str):
        lint.set("rdzv_backend", entry.node.value, entry=entry)
        lint.overridden["rdzv_backend"] = INERT["rdzv_backend"]


def _distributed_type(lint: LintContext, block: Node | None) -> str | None:
    environment = lint.root.get("compute_environment")
    if environment is not None and environment.node.value != "LOCAL_MACHINE":
        near = spelling.nearest(environment.node.value, ("LOCAL_MACHINE",))
        lint.report_value(
            "FSD218",
            f"compute_environment is {environment.node.value!r}, not LOCAL_MACHINE",
            environment,
            edits=lint.editor.replace(environment.node, "LOCAL_MACHINE") if near else None,
            fix="write LOCAL_MACHINE",
        )
    entry = lint.root.get("distributed_type")
    if entry is None:
        add = None
        if _filled(block):
            add = lint.editor.add(lint.root, None, {"distributed_type": "FSDP"})
        lint.report(
            "FSD212",
            "distributed_type is missing",
            lint.root.start,
            edits=add,
            fix="add distributed_type: FSDP",
            changes={"*": "FSDP"},
        )
        return "FSDP" if add else None
    kind = entry.node.value
    known = values.DISTRIBUTED_TYPES
    if kind not in known:
        near = "FSDP" if str(kind).upper().startswith("FSDP") else spelling.nearest(kind, known, cutoff=0.6)
        lint.report_value(
            "FSD206",
            f"distributed_type {kind!r} is not one of {', '.join(known)}",
            entry,
            near,
            safe=near != "FSDP",
            changes={"*": near} if near == "FSDP" else {},
        )
        return near
    return str(kind)


def _processes(lint: LintContext) -> None:
    if "rdzv_backend" not in lint.facts:
        lint.set("rdzv_backend", INERT["rdzv_backend"])
    # The number of machines first: the others depend on it.
    for key in (
        "num_machines",
        "num_processes",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
        "use_cpu",
        "gpu_ids",
        "debug",
    ):
        entry = lint.root.get(key)
        if entry is None:
            default: Any = {"num_machines": 1, "machine_rank": 0, "use_cpu": False, "debug": False}.get(key)
            lint.set(key, default)
            continue
        launch.read_top(lint, key, entry, to_python(entry.node))


def _precision(lint: LintContext) -> None:
    entry = lint.root.get("mixed_precision")
    if entry is None or entry.node.value is None:
        legacy = lint.root.get("fp16")
        if legacy is not None and legacy.node.value:
            lint.set("mixed_precision", "fp16", entry=legacy)
        elif legacy is not None:
            lint.set("mixed_precision", "no", entry=legacy)
        else:
            lint.set("mixed_precision", "no")
        return
    launch.read_precision(lint, entry)


def _fsdp_block(lint: LintContext, block: Node | None, kind: str | None) -> None:
    if block is not None and kind != "FSDP":
        for entry in effective_entries(block):
            lint.ignore(entry, f"distributed_type is {kind}, so FSDP does not start")
        return
    if kind != "FSDP":
        return
    chosen = {FSDP_KEYS[key]: entry for key, entry in _choose(lint, block).items()}
    read_plugin(lint, chosen, block, values.default)


def read_plugin(
    lint: LintContext,
    chosen: Mapping[str, Entry],
    parent: Node | None,
    default: Callable[[LintContext, str, int], None],
) -> None:
    """Read the settings that accelerate's plugin takes, from a file, a command line or the environment.

    Args:
        lint: Its ``names`` say how the settings are written.
        chosen: The entries that count, by the canonical names of their settings.
        parent: The mapping that holds them.
        default: Records what a setting is where nobody writes it, for a version.
    """
    values.read_version(lint, chosen.get("fsdp_version"))
    version = lint.get("fsdp_version")
    for name in FSDP_KEYS.values():
        if name == "fsdp_version":
            continue
        if name not in chosen:
            default(lint, name, version)
        elif name in LEGACY_DEFAULTS:
            read_legacy(lint, name, chosen, parent, version)
        else:
            values.read_block_key(lint, name, chosen, parent, version)
    synchronise(lint)


def _choose(lint: LintContext, block: Node | None) -> dict[str, Entry]:
    """Resolve prefixes and synonyms as the launcher's loop does: the last of one name wins."""
    chosen: dict[str, Entry] = {}
    if block is None:
        return chosen
    for entry in effective_entries(block):
        if not isinstance(entry.key, str):
            lint.report("FSD205", f"the key {entry.key!r} is not text; accelerate cannot use it", entry)
            continue
        full = entry.key if entry.key.startswith("fsdp") else f"fsdp_{entry.key}"
        if full in FSDP_KEYS:
            _prefix(lint, block, entry, full, chosen)
        else:
            report_inside(lint, block, entry, full)
    return chosen


def _prefix(lint: LintContext, block: Node, entry: Entry, full: str, chosen: dict[str, Entry]) -> None:
    earlier = chosen.get(full)
    chosen[full] = entry
    if earlier is not None:
        lint.ignore(earlier, f"{entry.key} comes later in the file and wins")
        lint.report_removable(
            "FSD215",
            f"{earlier.key} and {entry.key} are the same setting; the later one takes effect",
            earlier,
            block,
        )
    elif entry.key != full:
        twin = block.get(full)
        if twin is None:
            lint.report(
                "FSD204",
                f"{entry.key} is read as {full}",
                entry,
                edits=lint.editor.rename(entry, full),
                fix=f"write {full}",
            )
