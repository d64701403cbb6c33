"""How accelerate 1.15 reads each value: text of the YAML value, exported, parsed again by the plugin."""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.dialects.accelerate_legacy import read_legacy
from fsdptool.config.dialects.accelerate_scalars import (
    accept_truth,
    read_boolean,
    replace_any,
    word_of_truth,
)
from fsdptool.config.draft import Draft
from fsdptool.config.facts import BOOLEANS, LEGACY_DEFAULTS, WRITTEN
from fsdptool.files.tree import Entry, Node, to_python

DISTRIBUTED_TYPES = (
    "NO",
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
    "DEEPSPEED",
    "FSDP",
    "XLA",
    "MEGATRON_LM",
)

STATE_DICTS = {
    "FULL_STATE_DICT": "full",
    "LOCAL_STATE_DICT": "local",
    "SHARDED_STATE_DICT": "sharded",
    "1": "full",
    "2": "local",
    "3": "sharded",
}
POLICIES = {"TRANSFORMER_BASED_WRAP": "transformer", "SIZE_BASED_WRAP": "size", "NO_WRAP": "none"}
_ENVIRONMENT = {
    "wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "wrap_classes": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "state_dict_type": "FSDP_STATE_DICT_TYPE",
    "backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "ignored_modules": "FSDP_IGNORED_MODULES",
}
"""Variables the launcher does not export when the file is silent, so that an inherited one decides."""


def default(draft: Draft, key: str, name: str, version: int) -> None:
    """Record what the consumer does when ``key`` is not written."""
    variable = _ENVIRONMENT.get(name)
    if variable and draft.environment.get(variable) is not None:
        _from_environment(draft, key, name, variable)
        return
    if name in LEGACY_DEFAULTS or (name == "reshard_after_forward" and version == 1):
        if name in LEGACY_DEFAULTS and version == 1:
            draft.set(name, LEGACY_DEFAULTS[name])
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


def read_version(draft: Draft, entry: Entry | None) -> None:
    """Read ``fsdp_version``: text that must be 1 or 2 (3 fails in the plugin with KeyError 'TRUE')."""
    if entry is None:
        draft.set("fsdp_version", 1)
        return
    value = entry.node.value
    text = str(value).strip()
    if text in ("1", "2"):
        draft.set("fsdp_version", int(text), entry=entry)
        return
    meant = spelling.integer(value)
    fix = meant if meant in (1, 2) else None
    draft.set("fsdp_version", fix or 2, entry=entry)
    draft.report_value("FSD206", f"fsdp_version must be 1 or 2, not {value!r}", entry, fix)


def read_block_key(draft: Draft, key: str, name: str, entry: Entry, block: Node | None, version: int) -> None:
    """Read one known key of ``fsdp_config``; keys of the other version become findings."""
    if name in LEGACY_DEFAULTS:
        read_legacy(draft, key, name, entry, block, version)
    elif name == "reshard_after_forward":
        _reshard(draft, entry, block, version)
    elif name == "wrap_classes":
        read_classes(draft, entry, block)
    elif name == "min_num_params":
        _threshold(draft, key, entry, block, version)
    elif name == "ignored_modules":
        value = entry.node.value if entry.node.kind == "scalar" else str(to_python(entry.node))
        draft.set(name, None if value is None else str(value), entry=entry)
    elif name in BOOLEANS:
        read_boolean(draft, key, name, entry)
    else:
        table = POLICIES if name == "wrap_policy" else STATE_DICTS
        read_choice(draft, key, name, entry, table, version)


def read_choice(draft: Draft, key: str, name: str, entry: Entry, table: dict[str, str], version: int) -> None:
    """Read an enumeration: any case, and for state dicts torch's enum numbers."""
    value = to_python(entry.node)
    if value is None:
        # The launcher exports nothing for null, so the default (or the environment) decides.
        default(draft, key, name, version)
        return
    found = table.get(str(value).upper())
    written = WRITTEN[name]
    if found is None:
        meant = spelling.choice(
            value, spelling.WRAP_POLICIES if name == "wrap_policy" else spelling.STATE_DICT_TYPES
        )
        draft.set(name, meant or ("none" if name == "wrap_policy" else "sharded"), entry=entry)
        if name == "wrap_policy" and meant is None and "." in str(value):
            draft.report(
                "FSD348", f"{key} {value!r} is a dotted path; no program imports it", entry, value=True
            )
            return
        choices = ", ".join(written.values())
        draft.report_value(
            "FSD206", f"{key} {value!r} is not one of {choices}", entry, written[meant] if meant else None
        )
        return
    draft.set(name, found, entry=entry)
    if str(value) != written[found] and found != "local":
        draft.report_value("FSD217", f"{key} {value!r} means {written[found]}", entry, written[found])


def _reshard(draft: Draft, entry: Entry, block: Node | None, version: int) -> None:
    value = to_python(entry.node)
    key = "fsdp_reshard_after_forward"
    strategy = spelling.choice(value, spelling.STRATEGIES) if not isinstance(value, bool) else None
    if version == 1:
        draft.ignore(entry, "not read under version 1: fsdp_sharding_strategy decides")
        own = block.get("fsdp_sharding_strategy") or block.get("sharding_strategy") if block else None
        if strategy is not None and block is not None and own is None:
            draft.report(
                "FSD336",
                f"{value} is written under {key}, which version 1 does not read: the run is FULL_SHARD",
                entry,
                value=True,
                severity="info" if strategy == "full_shard" else None,
            )
        return
    read_reshard(draft, entry, key)


def read_reshard(draft: Draft, entry: Entry, key: str) -> None:
    """Read FSDP2's boolean; a strategy name or number is refused, with what it means where that is sure."""
    value = to_python(entry.node)
    strategy = spelling.choice(value, spelling.STRATEGIES) if not isinstance(value, bool) else None
    truth = word_of_truth(value)
    if truth is not None:
        accept_truth(draft, key, "reshard_after_forward", entry, value, truth)
        return
    meant = {"full_shard": True, "shard_grad_op": False}.get(strategy or "")
    if meant is None:
        meant = spelling.boolean(value)
    draft.set("reshard_after_forward", meant if meant is not None else True, entry=entry)
    if strategy == "no_shard":
        draft.report("FSD332", f"{key} is {value!r}: NO_SHARD has no FSDP2 equivalent", entry, value=True)
        return
    if strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        draft.report(
            "FSD334", f"{key} is {value!r}: hybrid sharding is a mesh under FSDP2", entry, value=True
        )
        return
    draft.report_value("FSD322", f"{key} must be true or false under version 2, not {value!r}", entry, meant)


def read_classes(draft: Draft, entry: Entry, parent: Node | None) -> None:
    """Read the class list: one text, split at commas, nothing trimmed."""
    value = to_python(entry.node)
    if value is None:
        default(draft, str(entry.key), "wrap_classes", draft.get("fsdp_version") or 1)
        return
    exact = isinstance(value, str) and all(part.isidentifier() for part in value.split(","))
    names = spelling.classes(value)
    draft.set("wrap_classes", names or (), entry=entry)
    if exact:
        return
    if names:
        draft.report(
            "FSD214",
            f"{entry.key} {value!r} is not split into class names",
            entry,
            value=True,
            edits=replace_any(draft, entry, ",".join(names)),
            fix=f"write {','.join(names)}",
        )
    elif names == ():
        edits = draft.editor.remove(parent, entry)
        draft.report(
            "FSD214",
            f"{entry.key} is empty: accelerate looks for a class without a name",
            entry,
            help="remove the key, or name the classes",
            edits=edits,
            fix="remove the key",
        )
    else:
        draft.report("FSD214", f"{entry.key} {value!r} holds no class names", entry, value=True)


def _threshold(draft: Draft, key: str, entry: Entry, block: Node | None, version: int) -> None:
    value = to_python(entry.node)
    policy = block.get("fsdp_auto_wrap_policy") or block.get("auto_wrap_policy") if block else None
    chosen = spelling.choice(policy.node.value, spelling.WRAP_POLICIES) if policy else "none"
    if chosen != "size":
        draft.set("min_num_params", None)
        draft.ignore(entry, "read with SIZE_BASED_WRAP only")
        if version == 2 or value not in (0, None):
            draft.report(
                "FSD325",
                f"{key} is not read: the policy is not SIZE_BASED_WRAP",
                entry,
                edits=draft.editor.remove(block, entry),
                fix=f"remove {key}",
            )
        return
    try:
        number = int(str(value))
    except ValueError:
        meant = spelling.integer(value)
        draft.set("min_num_params", meant or 100_000_000, entry=entry)
        draft.report_value("FSD213", f"{key} {value!r} is not an integer to YAML 1.1", entry, meant)
        return
    draft.set("min_num_params", number, entry=entry)


__all__ = [
    "DISTRIBUTED_TYPES",
    "POLICIES",
    "STATE_DICTS",
    "default",
    "read_block_key",
    "read_boolean",
    "read_choice",
    "read_classes",
    "read_reshard",
    "read_version",
    "replace_any",
    "word_of_truth",
]
