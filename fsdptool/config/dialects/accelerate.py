"""accelerate's YAML (or JSON): read as accelerate 1.15's loader, launcher and plugin read it.

Sources: accelerate 1.15.0 ``commands/config/config_args.py`` (loader), ``commands/launch.py``
(defaults, ``_validate_launch_command``), ``utils/launch.py:prepare_multi_gpu_env`` (environment),
``utils/dataclasses.py:FullyShardedDataParallelPlugin`` and ``parallelism_config.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool.config import spelling
from fsdptool.config.dialects import accelerate_values as values
from fsdptool.config.draft import Draft
from fsdptool.config.edits import block_lines
from fsdptool.config.expressible import check_expressible
from fsdptool.config.facts import WRITTEN
from fsdptool.config.tree import Entry, Node, effective_entries
from fsdptool.errors import ConfigError
from fsdptool.records.settings import FsdpSettings, Mesh

if TYPE_CHECKING:
    from fsdptool.config.migrate import Rewriter, Target

NAME = "accelerate"

TOP_LEVEL = frozenset(
    """compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank
    num_machines gpu_ids main_process_ip main_process_port rdzv_backend same_network
    main_training_function enable_cpu_affinity fp8_config deepspeed_config fsdp_config
    parallelism_config megatron_lm_config mpirun_config downcast_bf16 tpu_name tpu_zone
    tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config""".split()
)
WHOLE_NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
CONVERTED = frozenset({"fp16", "dynamo_backend"})
"""Old top-level keys the loader still converts."""

INERT = {
    "rdzv_backend": "static",
    "same_network": False,
    "enable_cpu_affinity": False,
    "downcast_bf16": False,
    "main_training_function": "main",
}
"""Keys whose file value never wins, with the value that harms nobody."""

FSDP_KEYS = {
    "fsdp_version": "fsdp_version",
    "fsdp_reshard_after_forward": "reshard_after_forward",
    "fsdp_auto_wrap_policy": "wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap": "wrap_classes",
    "fsdp_min_num_params": "min_num_params",
    "fsdp_state_dict_type": "state_dict_type",
    "fsdp_offload_params": "cpu_offload",
    "fsdp_cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "fsdp_activation_checkpointing": "activation_checkpointing",
    "fsdp_activation_checkpointing_offload": "activation_checkpointing_offload",
    "fsdp_ignored_modules": "ignored_modules",
    "fsdp_sharding_strategy": "sharding_strategy",
    "fsdp_backward_prefetch": "backward_prefetch",
    "fsdp_forward_prefetch": "forward_prefetch",
    "fsdp_use_orig_params": "use_orig_params",
    "fsdp_sync_module_states": "sync_module_states",
}
PARALLELISM_KEYS = {
    "parallelism_config_dp_replicate_size": "dp_replicate",
    "parallelism_config_dp_shard_size": "dp_shard",
    "parallelism_config_tp_size": "tp",
    "parallelism_config_cp_size": "cp",
    "parallelism_config_cp_comm_strategy": "cp_comm_strategy",
    "parallelism_config_sp_size": "sp",
}
PARALLELISM_OTHER = frozenset(
    """parallelism_config_cp_backend parallelism_config_sp_backend parallelism_config_sp_seq_length
    parallelism_config_sp_seq_length_is_variable parallelism_config_sp_attn_implementation""".split()
)
DEAD = {
    "fsdp_backward_prefetch_policy": None,
    "fsdp_limit_all_gathers": None,
    "fsdp_flatten_parameters": None,
    "fsdp": None,
    "fsdp_transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_cpu_offload": "fsdp_offload_params",
    "fsdp_offload": "fsdp_offload_params",
    "fsdp_cpu_offload_usage": None,
    "fsdp_activation_cpu_offload": "fsdp_activation_checkpointing_offload",
    "fsdp_mixed_precision": None,
    "fsdp_mixed_precision_policy": None,
}
"""Keys that look right and are not read, with the one that was meant."""

LEGACY_KEYS = (
    "fsdp_sharding_strategy",
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
)
"""Keys of FSDP1 that FSDP2 has no use for."""

NAMES = {canonical: key for key, canonical in (*FSDP_KEYS.items(), *PARALLELISM_KEYS.items())}


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
    kind = _distributed_type(draft)
    _processes(draft)
    _precision(draft)
    block = _block(draft, "fsdp_config")
    mesh_block = _block(draft, "parallelism_config")
    draft.extras["names"] = NAMES
    draft.extras["distributed_type"] = kind
    draft.extras["deepspeed"] = _filled(_block(draft, "deepspeed_config"))
    draft.extras["fsdp_block"] = block
    draft.runs_fsdp = kind == "FSDP"
    _fsdp_block(draft, block, kind)
    _parallelism_block(draft, mesh_block)


def _filled(node: Node | None) -> bool:
    return node is not None and bool(node.entries)


def _block(draft: Draft, key: str) -> Node | None:
    entry = draft.root.get(key)
    if entry is None:
        return None
    if entry.node.kind == "map":
        return entry.node
    if entry.node.kind != "scalar" or entry.node.value not in (None, {}):
        draft.report("FSD205", f"{key} must be a mapping", entry, value=True)
    return None


def _top_level(draft: Draft) -> None:
    for entry in effective_entries(draft.root):
        key = entry.key
        if key in TOP_LEVEL or key in CONVERTED:
            if key in INERT:
                _inert(draft, entry)
            continue
        _unknown_top_level(draft, entry)


def _inert(draft: Draft, entry: Entry) -> None:
    key = str(entry.key)
    draft.ignore(entry, "accepted at top level, but its value never wins")
    machines = draft.root.get("num_machines")
    alone = machines is None or machines.node.value in (1, None)
    if entry.node.value not in (INERT[key], None, "no") and not (key == "same_network" and alone):
        draft.report("FSD209", f"{key} has no effect in the file", entry)
    if key == "rdzv_backend" and isinstance(entry.node.value, str):
        draft.set("rdzv_backend", entry.node.value, entry=entry, parent=draft.root)


def _unknown_top_level(draft: Draft, entry: Entry) -> None:
    key = str(entry.key)
    draft.ignore(entry, "unknown at top level: the file is refused")
    inner = key if key.startswith("fsdp_") else f"fsdp_{key}"
    if inner in FSDP_KEYS or inner in DEAD or f"parallelism_config_{key}" in PARALLELISM_KEYS:
        home = "parallelism_config" if f"parallelism_config_{key}" in PARALLELISM_KEYS else "fsdp_config"
        draft.report("FSD210", f"{key} belongs inside {home}; accelerate refuses it at top level", entry,
                     edits=_move(draft, entry, home, inner), safe=False,
                     fix=f"move {key} into {home}", changes=_moved(entry, inner))  # fmt: skip
        return
    whole = isinstance(entry.node.value, int) and not isinstance(entry.node.value, bool)
    near = spelling.nearest(key, WHOLE_NUMBERS if whole else TOP_LEVEL, cutoff=0.65 if whole else 0.75)
    if near is not None and draft.root.get(near) is None:
        draft.report("FSD201", f"unknown key {key!r}: did you mean {near!r}?", entry,
                     help=f"rename it to {near}", edits=draft.editor.rename(entry, near), safe=False,
                     fix=f"rename {key} to {near}", changes={"*": near})  # fmt: skip
    else:
        draft.report("FSD201", f"unknown key {key!r}", entry, help="remove it; accelerate refuses the file",
                     edits=draft.editor.remove(draft.root, entry), safe=False,
                     fix=f"remove {key}", changes={})  # fmt: skip


def _move(draft: Draft, entry: Entry, home: str, key: str) -> Any:
    target = draft.root.get(home)
    removed = draft.editor.remove(draft.root, entry)
    if target is None or entry.node.kind != "scalar" or removed is None:
        return None
    twin = target.node.get(key)
    if twin is not None:
        # Written where it belongs as well: the stray one may go if it says the same.
        return removed if twin.node.value == entry.node.value else None
    added = draft.editor.add(target.node, target, {key: entry.node.value})
    return None if added is None else (*removed, *added)


def _moved(entry: Entry, key: str) -> dict[str, Any]:
    return {FSDP_KEYS.get(key, key): entry.node.value}


def _distributed_type(draft: Draft) -> str | None:
    environment = draft.root.get("compute_environment")
    if environment is not None and environment.node.value != "LOCAL_MACHINE":
        near = spelling.nearest(environment.node.value, ("LOCAL_MACHINE",))
        draft.report("FSD218", f"compute_environment is {environment.node.value!r}, not LOCAL_MACHINE",
                     environment, value=True,
                     edits=draft.editor.replace(environment.node, "LOCAL_MACHINE") if near else None,
                     fix="write LOCAL_MACHINE")  # fmt: skip
    entry = draft.root.get("distributed_type")
    if entry is None:
        add = None
        if _filled(_block(draft, "fsdp_config")):
            add = draft.editor.add(draft.root, None, {"distributed_type": "FSDP"})
        draft.report("FSD212", "distributed_type is missing", draft.root.start,
                     edits=add, fix="add distributed_type: FSDP", changes={"*": "FSDP"})  # fmt: skip
        return "FSDP" if add else None
    kind = entry.node.value
    known = values.DISTRIBUTED_TYPES
    if kind not in known:
        near = "FSDP" if str(kind).upper().startswith("FSDP") else spelling.nearest(kind, known, cutoff=0.6)
        draft.report("FSD206", f"distributed_type {kind!r} is not one of {', '.join(known)}", entry, value=True,
                     edits=draft.editor.replace(entry.node, near) if near else None, safe=near != "FSDP",
                     fix=f"write {near}", changes={"*": near} if near == "FSDP" else {})  # fmt: skip
        return near
    return str(kind)


def _processes(draft: Draft) -> None:
    for key in ("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
                "use_cpu", "gpu_ids", "debug"):  # fmt: skip
        entry = draft.root.get(key)
        if entry is None:
            default: Any = {"num_machines": 1, "machine_rank": 0, "use_cpu": False, "debug": False}.get(key)
            draft.set(key, default)
            continue
        values.read_top(draft, key, entry)


def _precision(draft: Draft) -> None:
    entry = draft.root.get("mixed_precision")
    if entry is None or entry.node.value is None:
        legacy = draft.root.get("fp16")
        if legacy is not None and legacy.node.value:
            draft.set("mixed_precision", "fp16", entry=legacy, parent=draft.root)
        elif legacy is not None:
            draft.set("mixed_precision", "no", entry=legacy, parent=draft.root)
        else:
            draft.set("mixed_precision", "no")
        return
    values.read_precision(draft, entry)


def _fsdp_block(draft: Draft, block: Node | None, kind: str | None) -> None:
    if block is not None and kind != "FSDP":
        for entry in effective_entries(block):
            draft.ignore(entry, f"distributed_type is {kind}, so FSDP does not start")
        return
    if kind != "FSDP":
        return
    chosen = _choose(draft, block)
    values.read_version(draft, chosen.get("fsdp_version"), block)
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
            _unread(draft, block, entry, full)
    return chosen


def _prefix(draft: Draft, block: Node, entry: Entry, full: str, chosen: dict[str, Entry]) -> None:
    earlier = chosen.get(full)
    chosen[full] = entry
    if earlier is not None:
        draft.ignore(earlier, f"{entry.key} stands later in the file and wins")
        draft.report("FSD215", f"{earlier.key} and {entry.key} are one setting; the later one counts", earlier,
                     edits=draft.editor.remove(block, earlier), fix=f"remove {earlier.key}")  # fmt: skip
    elif entry.key != full:
        twin = block.get(full)
        if twin is None:
            draft.report("FSD204", f"{entry.key} is read as {full}", entry,
                         edits=draft.editor.rename(entry, full), fix=f"write {full}")  # fmt: skip


def _unread(draft: Draft, block: Node, entry: Entry, full: str) -> None:
    key = str(entry.key)
    if key.startswith("_"):
        draft.report("FSD220", f"{key} is a note", entry)
        return
    if full in DEAD or key in DEAD:
        meant = DEAD.get(full, DEAD.get(key))
        values.report_dead(draft, block, entry, full, meant)
        return
    if key in TOP_LEVEL and key not in ("fsdp_config",):
        draft.ignore(entry, "belongs at top level; inside fsdp_config nobody reads it")
        edits = None
        if draft.root.get(key) is None and entry.node.kind == "scalar":
            removed = draft.editor.remove(block, entry)
            added = draft.editor.add(draft.root, None, {key: entry.node.value})
            edits = (*removed, *added) if removed is not None and added is not None else None
        if edits is None:
            edits = draft.editor.remove(block, entry)
        draft.report("FSD210", f"{key} belongs at top level; inside fsdp_config nobody reads it", entry,
                     severity="warning", edits=edits, safe=False, fix=f"move {key} to the top level",
                     changes={"*": key})  # fmt: skip
        return
    near = spelling.nearest(full, FSDP_KEYS, cutoff=0.8)
    if near is not None and block.get(near) is None:
        draft.ignore(entry, f"unknown; {near} was meant?")
        draft.report("FSD202", f"{key} is not read: did you mean {near}?", entry,
                     help=f"rename it to {near}; it then begins to count",
                     edits=draft.editor.rename(entry, near), safe=False, fix=f"rename {key} to {near}",
                     changes={FSDP_KEYS[near]: entry.node.value})  # fmt: skip
        return
    draft.ignore(entry, "unknown inside fsdp_config")
    draft.report("FSD202", f"{key} is not read by anyone", entry, help="remove it",
                 edits=draft.editor.remove(block, entry), safe=True, fix=f"remove {key}")  # fmt: skip


def _parallelism_block(draft: Draft, block: Node | None) -> None:
    draft.extras["parallelism_block"] = block if _filled(block) else None
    if not _filled(block) or block is None:
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
            values.read_parallelism(draft, name, found, block)


def _unknown_parallelism(draft: Draft, block: Node, entry: Entry, known: dict[str, str]) -> None:
    key = str(entry.key)
    draft.ignore(entry, "parallelism_config gets no prefix added: the key is not read")
    full = f"parallelism_config_{key}"
    if full not in known:
        near = spelling.nearest(key, [name.removeprefix("parallelism_config_") for name in known], cutoff=0.8)
        full = f"parallelism_config_{near}" if near else spelling.nearest(key, known, cutoff=0.8) or ""
    if full and block.get(full) is None:
        draft.report("FSD203", f"{key} is not read: the key is {full}", entry,
                     edits=draft.editor.rename(entry, full), safe=False, fix=f"write {full}",
                     changes={PARALLELISM_KEYS.get(full, "*"): entry.node.value})  # fmt: skip
        return
    draft.report("FSD202", f"{key} is not read by anyone", entry, help="remove it",
                 edits=draft.editor.remove(block, entry), safe=True, fix=f"remove {key}")  # fmt: skip


def write(settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
    """Return the settings as accelerate YAML. Every default that any consumer reads differently is written.

    Raises:
        ConfigError: A class name or ``min_num_params`` cannot be written under the wrap policy.
    """
    lines = block_lines(mapping(settings))
    return "\n".join([*(f"# {line}" if line else "#" for line in header), *lines]) + "\n"


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
    block: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": settings.reshard_after_forward,
        "fsdp_auto_wrap_policy": WRITTEN["wrap_policy"][settings.wrap_policy],
    }
    if settings.wrap_classes:
        block["fsdp_transformer_layer_cls_to_wrap"] = ",".join(settings.wrap_classes)
    if settings.min_num_params is not None:
        block["fsdp_min_num_params"] = settings.min_num_params
    block["fsdp_state_dict_type"] = WRITTEN["state_dict_type"][settings.state_dict_type]
    block["fsdp_offload_params"] = settings.cpu_offload
    block["fsdp_cpu_ram_efficient_loading"] = settings.cpu_ram_efficient_loading
    block["fsdp_activation_checkpointing"] = settings.activation_checkpointing
    if settings.activation_checkpointing_offload:
        block["fsdp_activation_checkpointing_offload"] = True
    if settings.ignored_modules is not None:
        block["fsdp_ignored_modules"] = settings.ignored_modules
    return block


def mesh_block(settings: FsdpSettings) -> dict[str, Any]:
    """Return the ``parallelism_config`` block, empty when the mesh is plain sharding over the world.

    accelerate fills nothing in: an unwritten size is 1.

    Raises:
        ConfigError: ``dp_shard`` is open, and the process count that would decide it too.
    """
    mesh = settings.mesh
    if mesh == Mesh() and settings.cp_comm_strategy == "allgather":
        return {}
    if mesh.dp_shard is None:
        raise ConfigError("accelerate cannot express an open dp_shard next to other mesh sizes",
                          help="resolve the mesh for the process count first")  # fmt: skip
    sizes = {
        "dp_replicate_size": mesh.dp_replicate,
        "dp_shard_size": mesh.dp_shard,
        "tp_size": mesh.tp,
        "cp_size": mesh.cp,
    }
    if mesh.cp > 1 or settings.cp_comm_strategy != "allgather":
        sizes["cp_comm_strategy"] = settings.cp_comm_strategy  # type: ignore[assignment]
    if mesh.sp > 1:
        sizes["sp_size"] = mesh.sp
    return {f"parallelism_config_{key}": value for key, value in sizes.items()}


def migrate(steps: Rewriter, draft: Draft, target: Target) -> None:
    """Turn an FSDP1 file into FSDP2, one edit at a time; every default that flips is written out."""
    block = "fsdp_config"
    if draft.root.get(block) is None:
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
    steps.drop(block, *LEGACY_KEYS, *dead, *(key.removeprefix("fsdp_") for key in (*LEGACY_KEYS, *dead)
                                             if key != "fsdp"))  # fmt: skip
    if draft.get("wrap_policy") != "size":
        steps.drop(block, "fsdp_min_num_params")
    if target.mesh and draft.root.get("parallelism_config") is None:
        sizes = {f"parallelism_config_{key}_size": size for key, size in target.mesh.items()}
        steps.apply(steps.editor.add(steps.root, None, {"parallelism_config": sizes}), "parallelism_config")
