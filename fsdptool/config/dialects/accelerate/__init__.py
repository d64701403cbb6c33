"""accelerate's YAML (or JSON): told from other files, read as accelerate 1.15 reads it, written and migrated.

Sources: accelerate 1.15.0 ``commands/config/config_args.py`` (loader), ``commands/launch.py``
(defaults, ``_validate_launch_command``), ``utils/launch.py:prepare_multi_gpu_env`` (environment),
``utils/dataclasses.py:FullyShardedDataParallelPlugin`` and ``parallelism_config.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import WRITTEN, begins, check_expressible, values_written
from fsdptool.config.dialects.accelerate import launch, plugin
from fsdptool.config.dialects.accelerate.keys import (
    CONVERTED,
    DEAD,
    FSDP_KEYS,
    IN_PYTHON,
    INERT,
    LEGACY_KEYS,
    NAMES,
    PARALLELISM_KEYS,
    TOP_LEVEL,
    WHOLE_NUMBERS,
)
from fsdptool.config.dialects.protocol import Dialect, LintContext
from fsdptool.config.edits import block_lines
from fsdptool.config.key_history import has_key, versions_with
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Entry, Node, effective_entries, to_python
from fsdptool.records.mesh import TRAINED, ParallelDims

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext, Rewriter, Target
    from fsdptool.files.tree import Node
    from fsdptool.records.sharding import FsdpSettings

NAME = "accelerate"
CANNOT: tuple[str, ...] = ()
"""Settings that this dialect cannot express."""


def mapping(settings: FsdpSettings) -> dict[str, Any]:
    """Return the settings as the mapping an accelerate file holds, in the order it is written.

    Raises:
        ConfigError: As :func:`write`.
    """
    check_expressible(settings, NAME)
    top: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": settings.debug,
        "distributed_type": "FSDP",
        "fsdp_config": _fsdp_mapping(settings),
        "machine_rank": settings.machine_rank,
    }
    for key in ("main_process_ip", "main_process_port", "gpu_ids"):
        if getattr(settings, key) is not None:
            top[key] = getattr(settings, key)
    top["mixed_precision"] = settings.mixed_precision
    top["num_machines"] = settings.num_machines
    if settings.num_processes is not None:
        top["num_processes"] = settings.num_processes
    mesh = mesh_block(settings)
    if mesh:
        top["parallelism_config"] = mesh
    top["rdzv_backend"] = settings.rdzv_backend
    top["use_cpu"] = settings.use_cpu
    return top


def _fsdp_mapping(settings: FsdpSettings) -> dict[str, Any]:
    block = values_written(settings, FSDP_KEYS)
    if not settings.activation_checkpointing_offload:
        block.pop("fsdp_activation_checkpointing_offload")
    return block


def mesh_block(settings: FsdpSettings) -> dict[str, Any]:
    """Return the ``parallelism_config`` block, empty when the mesh is plain sharding over the world.

    accelerate fills nothing in: an unwritten size is 1.

    Raises:
        ConfigError: ``dp_shard`` is open, and the process count that would decide it too.
    """
    mesh = settings.mesh
    if mesh == ParallelDims() and settings.cp_comm_strategy == "allgather":
        return {}
    if mesh.dp_shard is None:
        raise ConfigError(
            "accelerate cannot express an open dp_shard next to other mesh sizes",
            help="resolve the mesh for the process count first",
        )
    block: dict[str, Any] = {}
    for key, name in PARALLELISM_KEYS.items():
        if name == "cp_comm_strategy":
            if mesh.cp > 1 or settings.cp_comm_strategy != "allgather":
                block[key] = settings.cp_comm_strategy
        elif name in TRAINED or mesh.size(name) > 1:
            block[key] = mesh.size(name)
    return block


class Accelerate(Dialect):
    """accelerate's YAML (or JSON)."""

    name = "accelerate"
    consumers = ("accelerate", "fsdptool")

    def matches(self, root: Node) -> float:
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

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        read(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return accelerate YAML; every default that any consumer reads differently is written.

        Raises:
            ConfigError: A class name or ``min_num_params`` cannot be written under the wrap policy.
        """
        lines = block_lines(mapping(settings))
        return "\n".join([*(f"# {line}" if line else "#" for line in header), *lines]) + "\n"

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> dict[str, Any]:
        """Turn an FSDP1 file into FSDP2, one edit at a time; every default that flips is written out."""
        block = "fsdp_config"
        if lint.root.get(block) is None:
            steps.apply(steps.editor.add(steps.root, None, {block: {"fsdp_version": 2}}), block)
        for key in FSDP_KEYS:
            bare = key.removeprefix("fsdp_")
            parent, _ = steps.block(block)
            if parent.kind == "map" and parent.get(key) is not None:
                steps.drop(block, bare)
            steps.rename(block, bare, key)
        strategy = "fsdp_sharding_strategy"
        parent, _ = steps.block(block)
        if parent.kind == "map" and parent.get("fsdp_reshard_after_forward") is not None:
            steps.drop(block, strategy)
        steps.put(block, "fsdp_reshard_after_forward", target.reshard, synonyms=(strategy,))
        steps.put(block, "fsdp_version", 2)
        steps.put(block, "fsdp_state_dict_type", WRITTEN["state_dict_type"][target.state_dict])
        dead = [key for key, meant in DEAD.items() if meant is None]
        steps.drop(
            block,
            *LEGACY_KEYS,
            *dead,
            *(key.removeprefix("fsdp_") for key in (*LEGACY_KEYS, *dead) if key != "fsdp"),
        )
        if lint.get("wrap_policy") != "size":
            steps.drop(block, "fsdp_min_num_params")
        if target.mesh and lint.root.get("parallelism_config") is None:
            sizes = {f"parallelism_config_{key}_size": size for key, size in target.mesh.items()}
            steps.apply(
                steps.editor.add(steps.root, None, {"parallelism_config": sizes}), "parallelism_config"
            )
        return {}


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
        if lint.consumer.name == "accelerate" and has_key(
            "accelerate", ("file",), str(key), lint.consumer.version
        ):
            lint.ignore(entry, "a key of an older accelerate that does not concern FSDP")
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
    known = plugin.DISTRIBUTED_TYPES
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
    plugin.read_plugin(lint, chosen, block, plugin.default)


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
    former = has_key("accelerate", ("file",), key, lint.consumer.version) is False
    if former and lint.consumer.name == "accelerate":
        newest = versions_with("accelerate", ("file",), key)[1]
        lint.report_removable(
            "FSD201",
            f"{key} was a key of accelerate up to {newest}: {lint.consumer.version} refuses the file",
            entry,
            lint.root,
            help="remove it",
            safe=False,
            changes={},
        )
    elif near is not None and lint.root.get(near) is None:
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
