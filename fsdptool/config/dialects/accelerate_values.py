"""How accelerate 1.15 reads each value: text of the YAML value, exported, parsed again by the plugin."""

from __future__ import annotations

from typing import Any

from fsdptool.config import spelling
from fsdptool.config.draft import Draft
from fsdptool.config.edits import block_list_to_scalar
from fsdptool.config.facts import BOOLEANS, WRITTEN
from fsdptool.config.tree import Entry, Node, to_python
from fsdptool.records.diagnostic import Edit

DISTRIBUTED_TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU",
    "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM",
)  # fmt: skip

TRUE_WORDS = frozenset({"y", "yes", "t", "true", "on", "1"})
FALSE_WORDS = frozenset({"n", "no", "f", "false", "off", "0"})

_STRATEGIES = {
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
    "NO_SHARD": "no_shard",
    "HYBRID_SHARD": "hybrid_shard",
    "HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
    "_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "4": "hybrid_shard",
    "5": "hybrid_shard_zero2",
}
STATE_DICTS = {
    "FULL_STATE_DICT": "full",
    "LOCAL_STATE_DICT": "local",
    "SHARDED_STATE_DICT": "sharded",
    "1": "full",
    "2": "local",
    "3": "sharded",
}
POLICIES = {"TRANSFORMER_BASED_WRAP": "transformer", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
_PREFETCHES = {"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "1", "2"}

_ENVIRONMENT = {
    "wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "wrap_classes": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "ignored_modules": "FSDP_IGNORED_MODULES",
}
"""Variables the launcher does not export when the file is silent, so that an inherited one decides."""


def word_of_truth(value: Any) -> bool | None:
    """Return what accelerate's ``str_to_bool(str(value).lower())`` makes of a value; None: it raises."""
    word = str(value).lower()
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def default(draft: Draft, key: str, name: str, version: int) -> None:
    """Record what the consumer does when ``key`` is not written."""
    variable = _ENVIRONMENT.get(name)
    if variable and draft.environment.get(variable) is not None:
        _from_environment(draft, key, name, variable)
        return
    if name in ("sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params",
                "sync_module_states"):  # fmt: skip
        if version == 1:
            draft.set(name, {"sharding_strategy": "full_shard", "backward_prefetch": None,
                             "forward_prefetch": False, "use_orig_params": True,
                             "sync_module_states": True}[name])  # fmt: skip
        return
    if name == "reshard_after_forward" and version == 1:
        return
    defaults: dict[str, Any] = {
        "reshard_after_forward": True,
        "wrap_policy": "none",
        "wrap_classes": (),
        "min_num_params": 100_000_000 if draft.get("wrap_policy") == "size" else None,
        "state_dict_type": "full" if version == 1 else "sharded",
        "cpu_offload": False,
        "cpu_ram_efficient_loading": True,
        "activation_checkpointing": False,
        "activation_checkpointing_offload": False,
        "ignored_modules": None,
    }
    draft.set(name, defaults[name])


def _from_environment(draft: Draft, key: str, name: str, variable: str) -> None:
    text = draft.environment[variable]
    value: Any = text
    if name == "wrap_policy":
        value = POLICIES.get(text.upper(), "none")
    elif name == "state_dict_type":
        value = STATE_DICTS.get(text.upper(), "sharded")
    elif name == "wrap_classes":
        value = tuple(text.split(","))
    draft.set(name, value, origin=f"environment variable {variable}")
    draft.report("FSD341", f"{key} is not written; {variable}={text} in the environment decides")


def read_version(draft: Draft, entry: Entry | None, block: Node | None) -> None:
    """Read ``fsdp_version``: text that must be 1 or 2 (3 fails in the plugin with KeyError 'TRUE')."""
    if entry is None:
        draft.set("fsdp_version", 1)
        return
    value = entry.node.value
    text = str(value).strip()
    if text in ("1", "2"):
        draft.set("fsdp_version", int(text), entry=entry, parent=block)
        return
    meant = spelling.integer(value)
    fix = meant if meant in (1, 2) else None
    draft.set("fsdp_version", fix or 2, entry=entry, parent=block)
    draft.report("FSD206", f"fsdp_version must be 1 or 2, not {value!r}", entry, value=True,
                 edits=draft.editor.replace(entry.node, fix) if fix else None,
                 fix=f"write {fix}")  # fmt: skip


def read_block_key(draft: Draft, key: str, name: str, entry: Entry, block: Node | None, version: int) -> None:
    """Read one known key of ``fsdp_config``; keys of the other version become findings."""
    if name in ("sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params",
                "sync_module_states"):  # fmt: skip
        _legacy(draft, key, name, entry, block, version)
    elif name == "reshard_after_forward":
        _reshard(draft, entry, block, version)
    elif name == "wrap_classes":
        read_classes(draft, entry, block)
    elif name == "min_num_params":
        _threshold(draft, key, entry, block, version)
    elif name == "ignored_modules":
        value = entry.node.value if entry.node.kind == "scalar" else str(to_python(entry.node))
        draft.set(name, None if value is None else str(value), entry=entry, parent=block)
    elif name in BOOLEANS:
        read_boolean(draft, key, name, entry, block)
    else:
        table = POLICIES if name == "wrap_policy" else STATE_DICTS
        read_choice(draft, key, name, entry, block, table, version)


def read_boolean(draft: Draft, key: str, name: str, entry: Entry, parent: Node | None) -> None:
    """Read a boolean that travels as text: ``y yes t true on 1`` and their opposites, any case."""
    value = entry.node.value if entry.node.kind == "scalar" else to_python(entry.node)
    truth = word_of_truth(value)
    if truth is None:
        meant = spelling.boolean(value)
        draft.set(name, meant if meant is not None else False, entry=entry, parent=parent)
        draft.report("FSD206", f"{key} must be true or false, not {value!r}", entry, value=True,
                     edits=draft.editor.replace(entry.node, meant) if meant is not None else None,
                     fix=f"write {str(meant).lower()}")  # fmt: skip
        return
    draft.set(name, truth, entry=entry, parent=parent)
    if not isinstance(value, bool):
        draft.report("FSD207", f"{key} is {type(value).__name__} {value!r}, read as {str(truth).lower()}", entry,
                     value=True, edits=draft.editor.replace(entry.node, truth),
                     fix=f"write {str(truth).lower()}")  # fmt: skip


def read_choice(draft: Draft, key: str, name: str, entry: Entry, parent: Node | None,
                table: dict[str, str], version: int) -> None:  # fmt: skip
    """Read an enumeration: any case, and for state dicts torch's enum numbers."""
    value = entry.node.value if entry.node.kind == "scalar" else to_python(entry.node)
    if value is None:
        # The launcher exports nothing for null, so the default (or the environment) decides.
        default(draft, key, name, version)
        return
    found = table.get(str(value).upper())
    written = WRITTEN[name]
    if found is None:
        meant = spelling.choice(value, spelling.WRAP_POLICIES if name == "wrap_policy"
                                else spelling.STATE_DICT_TYPES)  # fmt: skip
        draft.set(name, meant or ("none" if name == "wrap_policy" else "sharded"), entry=entry, parent=parent)
        if name == "wrap_policy" and meant is None and "." in str(value):
            draft.report(
                "FSD348", f"{key} {value!r} is a dotted path; no program imports it", entry, value=True
            )
            return
        choices = ", ".join(written.values())
        draft.report("FSD206", f"{key} {value!r} is not one of {choices}", entry, value=True,
                     edits=draft.editor.replace(entry.node, written[meant]) if meant else None,
                     fix=f"write {written[meant]}" if meant else None)  # fmt: skip
        return
    draft.set(name, found, entry=entry, parent=parent)
    if str(value) != written[found] and found != "local":
        draft.report("FSD217", f"{key} {value!r} means {written[found]}", entry, value=True,
                     edits=draft.editor.replace(entry.node, written[found]),
                     fix=f"write {written[found]}")  # fmt: skip


def _reshard(draft: Draft, entry: Entry, block: Node | None, version: int) -> None:
    value = entry.node.value if entry.node.kind == "scalar" else to_python(entry.node)
    key = "fsdp_reshard_after_forward"
    strategy = spelling.choice(value, spelling.STRATEGIES) if not isinstance(value, bool) else None
    if version == 1:
        draft.ignore(entry, "not read under version 1: fsdp_sharding_strategy decides")
        if strategy not in (None, "full_shard") and block is not None:
            own = block.get("fsdp_sharding_strategy") or block.get("sharding_strategy")
            if own is None:
                draft.report("FSD336", f"{value} is written under {key}, which version 1 does not read: the run "
                             "is FULL_SHARD", entry, value=True)  # fmt: skip
        return
    read_reshard(draft, entry, block, key)


def read_reshard(draft: Draft, entry: Entry, parent: Node | None, key: str) -> None:
    """Read FSDP2's boolean; a strategy name or number is refused, with what it means where that is sure."""
    value = entry.node.value if entry.node.kind == "scalar" else to_python(entry.node)
    strategy = spelling.choice(value, spelling.STRATEGIES) if not isinstance(value, bool) else None
    truth = word_of_truth(value)
    if truth is not None:
        draft.set("reshard_after_forward", truth, entry=entry, parent=parent)
        if not isinstance(value, bool):
            draft.report("FSD207", f"{key} is {type(value).__name__} {value!r}, read as {str(truth).lower()}",
                         entry, value=True, edits=draft.editor.replace(entry.node, truth),
                         fix=f"write {str(truth).lower()}")  # fmt: skip
        return
    meant = {"full_shard": True, "shard_grad_op": False}.get(strategy or "")
    if meant is None:
        meant = spelling.boolean(value)
    draft.set("reshard_after_forward", meant if meant is not None else True, entry=entry, parent=parent)
    if strategy == "no_shard":
        draft.report("FSD332", f"{key} is {value!r}: NO_SHARD has no FSDP2 equivalent", entry, value=True)
        return
    if strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        draft.report(
            "FSD334", f"{key} is {value!r}: hybrid sharding is a mesh under FSDP2", entry, value=True
        )
        return
    draft.report("FSD322", f"{key} must be true or false under version 2, not {value!r}", entry, value=True,
                 edits=draft.editor.replace(entry.node, meant) if meant is not None else None,
                 fix=f"write {str(meant).lower()}")  # fmt: skip


def read_classes(draft: Draft, entry: Entry, parent: Node | None) -> None:
    """Read the class list: one text, split at commas, nothing trimmed."""
    value = to_python(entry.node)
    if value is None:
        default(draft, str(entry.key), "wrap_classes", draft.get("fsdp_version") or 1)
        return
    exact = isinstance(value, str) and all(part.isidentifier() for part in value.split(","))
    names = spelling.classes(value)
    draft.set("wrap_classes", names or (), entry=entry, parent=parent)
    if exact:
        return
    if names:
        draft.report("FSD214", f"{entry.key} {value!r} is not split into class names", entry, value=True,
                     edits=replace_any(draft, entry, ",".join(names)),
                     fix=f"write {','.join(names)}")  # fmt: skip
    elif names == ():
        edits = draft.editor.remove(parent, entry) if parent is not None else None
        draft.report("FSD214", f"{entry.key} is empty: accelerate looks for a class without a name", entry,
                     help="remove the key, or name the classes", edits=edits, fix="remove the key")  # fmt: skip
    else:
        draft.report("FSD214", f"{entry.key} {value!r} holds no class names", entry, value=True)


def replace_any(draft: Draft, entry: Entry, value: Any) -> tuple[Edit, ...] | None:
    """Replace a value that may be a block list by one scalar."""
    node = entry.node
    if node.kind == "list" and not node.flow and not node.alias:
        return block_list_to_scalar(draft.editor, entry, value)
    return draft.editor.replace(node, value)


def _threshold(draft: Draft, key: str, entry: Entry, block: Node | None, version: int) -> None:
    value = entry.node.value if entry.node.kind == "scalar" else to_python(entry.node)
    policy = block.get("fsdp_auto_wrap_policy") or block.get("auto_wrap_policy") if block else None
    chosen = spelling.choice(policy.node.value, spelling.WRAP_POLICIES) if policy else "none"
    if chosen != "size":
        draft.ignore(entry, "read with SIZE_BASED_WRAP only")
        if version == 2 or value not in (0, 100_000_000, None):
            draft.report("FSD325", f"{key} is not read: the policy is not SIZE_BASED_WRAP", entry,
                         edits=draft.editor.remove(block, entry) if block else None,
                         fix=f"remove {key}")  # fmt: skip
        return
    try:
        number = int(str(value))
    except ValueError:
        meant = spelling.integer(value)
        draft.set("min_num_params", meant or 100_000_000, entry=entry, parent=block)
        draft.report("FSD213", f"{key} {value!r} is not an integer to YAML 1.1", entry, value=True,
                     edits=draft.editor.replace(entry.node, meant) if meant is not None else None,
                     fix=f"write {meant}")  # fmt: skip
        return
    draft.set("min_num_params", number, entry=entry, parent=block)


def _legacy(draft: Draft, key: str, name: str, entry: Entry, block: Node | None, version: int) -> None:
    """Keys of FSDP1: settings under version 1, findings under version 2."""
    value = entry.node.value if entry.node.kind == "scalar" else to_python(entry.node)
    if version == 1:
        _legacy_under_1(draft, key, name, value, entry, block)
        return
    draft.ignore(entry, "FSDP1 only; not read under version 2")
    remove = draft.editor.remove(block, entry) if block is not None else None
    if name == "sharding_strategy":
        _strategy_under_2(draft, key, value, entry, block, remove)
    elif name == "sync_module_states" and not value and _ram_truthy(block):
        draft.report("FSD321", f"{key}: false makes accelerate launch refuse the file", entry, edits=remove,
                     fix=f"remove {key}")  # fmt: skip
    elif name == "forward_prefetch" and word_of_truth(value):
        draft.report("FSD303", f"{key}: true is lost: FSDP2 through accelerate has no explicit forward prefetch",
                     entry, severity="warning", edits=remove, safe=True, fix=f"remove {key}",
                     help="remove it; fsdptool's own trainer prefetches with `sharding.prefetch`")  # fmt: skip
    elif name == "backward_prefetch" and value is not None and str(value).upper() not in _PREFETCHES:
        draft.report("FSD206", f"{key} {value!r} is ignored under version 2, but the plugin still stops at it: "
                     f"KeyError", entry, value=True, edits=remove, safe=True,
                     fix=f"remove {key}")  # fmt: skip
    else:
        draft.report("FSD302", f"{key} has no meaning under version 2", entry, edits=remove,
                     fix=f"remove {key}")  # fmt: skip


def _ram_truthy(block: Node | None) -> bool:
    entry = None
    if block is not None:
        entry = block.get("fsdp_cpu_ram_efficient_loading") or block.get("cpu_ram_efficient_loading")
    return True if entry is None else bool(to_python(entry.node))


def _strategy_under_2(
    draft: Draft, key: str, value: Any, entry: Entry, block: Node | None, remove: Any
) -> None:
    strategy = spelling.choice(value, spelling.STRATEGIES)
    own = block.get("fsdp_reshard_after_forward") or block.get("reshard_after_forward") if block else None
    runs = word_of_truth(own.node.value) if own is not None else True
    draft.extras["written_strategy"] = strategy
    if strategy == "no_shard":
        draft.report(
            "FSD332", f"{key} {value!r} is ignored; NO_SHARD has no FSDP2 equivalent", entry, value=True
        )
    elif strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        _hybrid_under_2(draft, key, value, strategy, entry, block, own, remove)
    elif strategy == "shard_grad_op" and runs is not False:
        edits = None
        if block is not None and remove is not None and own is None:
            edits = draft.editor.rename(entry, "fsdp_reshard_after_forward")
            replaced = draft.editor.replace(entry.node, False)
            edits = (*edits, *replaced) if edits is not None and replaced is not None else None
        elif block is not None and remove is not None and own is not None:
            replaced = draft.editor.replace(own.node, False)
            edits = (*remove, *replaced) if replaced is not None else None
        draft.report("FSD303", f"{key} {value!r} is ignored: parameters are freed after forward all the same",
                     entry, value=True, edits=edits, safe=False, fix="write fsdp_reshard_after_forward: false",
                     changes={"reshard_after_forward": False})  # fmt: skip
    else:
        draft.report("FSD302", f"{key} has no meaning under version 2", entry, edits=remove,
                     fix=f"remove {key}")  # fmt: skip


def _hybrid_under_2(draft: Draft, key: str, value: Any, strategy: str, entry: Entry, block: Node | None,
                    own: Entry | None, remove: Any) -> None:  # fmt: skip
    from fsdptool.config.facts import hybrid_mesh

    machines = draft.get("num_machines")
    mesh = hybrid_mesh(draft.get("num_processes"), machines)
    has_block = draft.root.get("parallelism_config") is not None
    reshard = strategy == "hybrid_shard"
    single = machines == 1 and (draft.written("num_machines") or draft.get("num_processes") is not None)
    if has_block or single:
        severity: Any = "warning"
        message = f"{key} {value!r} is ignored under version 2"
        if machines == 1 and not has_block:
            message += "; on one machine it would replicate nothing"
        runs = word_of_truth(own.node.value) if own is not None else True
        if runs == reshard:
            draft.report("FSD302", message, entry, edits=remove, fix=f"remove {key}")
            return
        draft.report("FSD303", message, entry, value=True, severity=severity)
        return
    edits = None
    changes: dict[str, Any] = {}
    if mesh and remove is not None and reshard:
        added = draft.editor.add(draft.root, None, {"parallelism_config": {
            "parallelism_config_dp_replicate_size": mesh["dp_replicate"],
            "parallelism_config_dp_shard_size": mesh["dp_shard"]}})  # fmt: skip
        edits = (*remove, *added) if added is not None else None
        changes = dict(mesh)
    draft.report("FSD334", f"{key} {value!r} is ignored under version 2: the run shards over all ranks", entry,
                 value=True, edits=edits, safe=False, fix="write the mesh in parallelism_config",
                 changes=changes)  # fmt: skip


def _legacy_under_1(draft: Draft, key: str, name: str, value: Any, entry: Entry, block: Node | None) -> None:
    if name == "sharding_strategy":
        strategy = _STRATEGIES.get(str(value).upper())
        if strategy is None:
            draft.set(name, "full_shard", entry=entry, parent=block)
            draft.report("FSD206", f"{key} {value!r} is no sharding strategy", entry, value=True)
            return
        draft.set(name, strategy, entry=entry, parent=block)
        if str(value).isdigit():
            draft.report("FSD323", f"{key} {value} is {strategy.upper()}", entry, value=True,
                         edits=draft.editor.replace(entry.node, strategy.upper()), safe=True,
                         fix=f"write {strategy.upper()}")  # fmt: skip
        return
    if name == "backward_prefetch":
        text = None if value is None else str(value).upper()
        if text is not None and text not in _PREFETCHES:
            draft.set(name, None, entry=entry, parent=block)
            draft.report("FSD206", f"{key} {value!r} is not BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH", entry,
                         value=True, edits=draft.editor.replace(entry.node, "NO_PREFETCH")
                         if spelling.normal(value) in ("none", "no", "off") else None,
                         fix="write NO_PREFETCH")  # fmt: skip
            return
        shown = {"1": "BACKWARD_PRE", "2": "BACKWARD_POST", "NO_PREFETCH": None}.get(text or "", text)
        draft.set(name, shown, entry=entry, parent=block)
        return
    read_boolean(draft, key, name, entry, block)
    if name == "sync_module_states" and not value and _ram_truthy(block):
        draft.report("FSD321", f"{key}: false makes accelerate launch refuse the file while RAM-efficient loading "
                     "is on", entry, value=True, help="set it to true, or fsdp_cpu_ram_efficient_loading to false",
                     edits=draft.editor.replace(entry.node, True), safe=False, fix="write true",
                     changes={"sync_module_states": True})  # fmt: skip


def report_dead(draft: Draft, block: Node, entry: Entry, full: str, meant: str | None) -> None:
    """Report a key that looks right and that nobody reads."""
    key = str(entry.key)
    if meant is not None and block.get(meant) is None:
        draft.ignore(entry, f"not read; the key is {meant}")
        draft.report("FSD211", f"{key} is not read: the key is {meant}", entry,
                     edits=draft.editor.rename(entry, meant), safe=False, fix=f"rename {key} to {meant}",
                     changes={"*": entry.node.value})  # fmt: skip
        return
    draft.ignore(entry, "not read by this version of accelerate")
    draft.report("FSD211", f"{key} is not read", entry, help="remove it",
                 edits=draft.editor.remove(block, entry), safe=True, fix=f"remove {key}")  # fmt: skip


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
    draft.report("FSD306" if name == "cp" else "FSD205",
                 f"{entry.key} must be a whole number of at least 1, not {value!r}", entry, value=True,
                 edits=draft.editor.replace(entry.node, good) if good is not None else None, safe=True,
                 fix=f"write {good}")  # fmt: skip


def read_rotation(draft: Draft, value: Any, entry: Entry, parent: Node | None) -> None:
    """Read the context-parallel rotation."""
    if value in ("allgather", "alltoall"):
        draft.set("cp_comm_strategy", value, entry=entry, parent=parent)
        return
    meant = spelling.choice(value, spelling.ROTATIONS)
    draft.set("cp_comm_strategy", meant or "allgather", entry=entry, parent=parent)
    draft.report("FSD307", f"unknown rotation {value!r}: allgather or alltoall", entry, value=True,
                 edits=draft.editor.replace(entry.node, meant) if meant else None,
                 fix=f"write {meant}")  # fmt: skip


def read_top(draft: Draft, key: str, entry: Entry) -> None:
    """Read one of the top-level keys about processes and machines."""
    value = entry.node.value if entry.node.kind == "scalar" else to_python(entry.node)
    root = draft.root
    if key in ("use_cpu", "debug"):
        if not isinstance(value, bool) and value is not None:
            meant = spelling.boolean(value)
            draft.report("FSD205", f"{key} must be true or false, not {value!r}", entry, value=True,
                         edits=draft.editor.replace(entry.node, meant) if meant is not None else None,
                         safe=meant == bool(value), fix=f"write {str(meant).lower()}",
                         changes={key: meant})  # fmt: skip
        draft.set(key, bool(value), entry=entry, parent=root)
    elif key == "gpu_ids":
        _gpu_ids(draft, value, entry)
    elif key == "main_process_ip":
        draft.set(key, None if value is None else str(value), entry=entry, parent=root)
    elif key == "num_processes" and value in ("gpu", "auto", "cpu"):
        draft.set(key, value, entry=entry, parent=root)
    elif value is None:
        draft.set(key, {"num_machines": 1, "machine_rank": 0}.get(key), entry=entry, parent=root)
    else:
        low = {"machine_rank": 0, "main_process_port": 0, "num_processes": -1}.get(key, 1)
        if isinstance(value, int) and not isinstance(value, bool) and value >= low:
            draft.set(key, None if value == -1 else value, entry=entry, parent=root)
            return
        meant = spelling.integer(value)
        good = meant if meant is not None and meant >= low else None
        draft.set(key, good if good is not None else {"num_machines": 1, "machine_rank": 0}.get(key),
                  entry=entry, parent=root)  # fmt: skip
        draft.report("FSD205", f"{key} must be a whole number, not {value!r}", entry, value=True,
                     edits=draft.editor.replace(entry.node, good) if good is not None else None, safe=True,
                     fix=f"write {good}")  # fmt: skip


def _gpu_ids(draft: Draft, value: Any, entry: Entry) -> None:
    if value is None or isinstance(value, str):
        draft.set("gpu_ids", value, entry=entry, parent=draft.root)
        return
    if isinstance(value, list):
        text: str | None = ",".join(str(item) for item in value)
    elif isinstance(value, int) and not isinstance(value, bool):
        # PyYAML reads 0,1 as text but 4,567 never as a number; a bare number may be a sexagesimal.
        text = entry.node.raw if entry.node.raw.isdigit() else str(value)
    else:
        text = None
    draft.set("gpu_ids", text, entry=entry, parent=draft.root)
    draft.report("FSD219", f"gpu_ids {value!r} is not text; the launcher crashes", entry, value=True,
                 edits=replace_any(draft, entry, text) if text is not None else None,
                 fix=f"write '{text}'")  # fmt: skip


def read_precision(draft: Draft, entry: Entry) -> None:
    """Read ``mixed_precision``: no, fp16, bf16 or fp8 in any case; unquoted no is a boolean."""
    value = entry.node.value if entry.node.kind == "scalar" else to_python(entry.node)
    if isinstance(value, str) and value.lower() in ("no", "fp16", "bf16", "fp8"):
        draft.set("mixed_precision", value.lower(), entry=entry, parent=draft.root)
        if value != value.lower():
            draft.report("FSD217", f"mixed_precision {value!r} means {value.lower()}", entry, value=True,
                         edits=draft.editor.replace(entry.node, value.lower()),
                         fix=f"write {value.lower()}")  # fmt: skip
        return
    if value is False:
        draft.set("mixed_precision", "no", entry=entry, parent=draft.root)
        draft.report("FSD208", f"mixed_precision: {entry.node.raw} is the boolean false to YAML 1.1", entry,
                     value=True, edits=draft.editor.replace(entry.node, "no"), fix="write 'no'")  # fmt: skip
        return
    meant = spelling.choice(value, spelling.PRECISIONS)
    draft.set("mixed_precision", meant or "no", entry=entry, parent=draft.root)
    draft.report("FSD206", f"mixed_precision {value!r} is not one of 'no', fp16, bf16, fp8", entry, value=True,
                 edits=draft.editor.replace(entry.node, meant) if meant else None,
                 fix=f"write {meant}")  # fmt: skip
