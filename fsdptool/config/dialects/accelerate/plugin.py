"""How accelerate 1.15's plugin reads its settings: as text, whoever writes it.

The launcher makes text of a file's values and of flags and exports them; a person may export them too. Null
exists in files only: of some keys (:data:`_ENVIRONMENT`) nothing is exported then, of the others the text
``None``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from fsdptool import spelling
from fsdptool.config.canonical import (
    BOOLEANS,
    LEGACY_DEFAULTS,
    STRATEGIES,
    STRATEGY_NAMES,
    WRITTEN,
    hybrid_mesh,
)
from fsdptool.config.dialects.accelerate.keys import FSDP_KEYS
from fsdptool.config.dialects.protocol import LintContext
from fsdptool.files.tree import Entry, Node, to_python
from fsdptool.records.sharding import FsdpSettings

TRUE_WORDS = frozenset({"y", "yes", "t", "true", "on", "1"})
FALSE_WORDS = frozenset({"n", "no", "f", "false", "off", "0"})


def word_of_truth(value: Any) -> bool | None:
    """Return what accelerate's ``str_to_bool(str(value).lower())`` makes of a value; None: it raises."""
    word = str(value).lower()
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def read_boolean(lint: LintContext, key: str, name: str, entry: Entry) -> None:
    """Read a boolean that travels as text: ``y yes t true on 1`` and their opposites, any case."""
    value = to_python(entry.node)
    truth = word_of_truth(value)
    if truth is None:
        meant = spelling.boolean(value)
        lint.set(name, meant if meant is not None else False, entry=entry)
        lint.report_value("FSD206", f"{key} must be true or false, not {value!r}", entry, meant)
        return
    accept_truth(lint, key, name, entry, value, truth)


def accept_truth(lint: LintContext, key: str, name: str, entry: Entry, value: Any, truth: bool) -> None:
    """Record what a value is read as; a value that is not a boolean itself is a note."""
    lint.set(name, truth, entry=entry)
    if not isinstance(value, bool) and lint.document.language not in ("env", "flags"):
        kind = "text" if isinstance(value, str) else "number"
        lint.report_value(
            "FSD207", f"{key} is the {kind} {value!r}, read as {str(truth).lower()}", entry, truth
        )


DISTRIBUTED_TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU",
    "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM",
)  # fmt: skip

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


def default(lint: LintContext, name: str, version: int) -> None:
    """Record what is in effect where neither the file nor the command line says it."""
    variable = _ENVIRONMENT.get(name)
    if variable and lint.environment.get(variable) is not None:
        _from_environment(lint, lint.name(name), name, variable)
        return
    if name in LEGACY_DEFAULTS or (name == "reshard_after_forward" and version == 1):
        if name in LEGACY_DEFAULTS and version == 1:
            lint.set(name, LEGACY_DEFAULTS[name])
        return
    defaults: dict[str, Any] = {
        "reshard_after_forward": True,
        "wrap_policy": "none",
        "wrap_classes": (),
        "min_num_params": 100_000_000 if lint.get("wrap_policy") == "size" else None,
        "state_dict_type": "full" if version == 1 else "sharded",
        "cpu_offload": False,
        "cpu_ram_efficient_loading": True,
        "activation_checkpointing": False,
        "activation_checkpointing_offload": False,
        "ignored_modules": None,
    }
    lint.set(name, defaults[name] if name in defaults else getattr(FsdpSettings(), name))


def _from_environment(lint: LintContext, key: str, name: str, variable: str) -> None:
    text = lint.environment[variable]
    value: Any = text
    if name == "wrap_policy":
        value = POLICIES.get(text.upper(), "none")
    elif name == "state_dict_type":
        value = STATE_DICTS.get(text.upper(), "sharded")
    elif name == "wrap_classes":
        value = tuple(text.split(","))
    lint.set(name, value, origin=f"environment variable {variable}")
    lint.report("FSD341", f"{key} is not written; {variable}={text} in the environment decides")


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
    read_version(lint, chosen.get("fsdp_version"))
    version = lint.get("fsdp_version")
    for name in FSDP_KEYS.values():
        if name == "fsdp_version":
            continue
        if name not in chosen:
            default(lint, name, version)
        elif name in LEGACY_DEFAULTS:
            if version == 2:
                lint.ignore(chosen[name], "FSDP1 only; not read under version 2")
            FSDP1[name][version - 1](lint, lint.name(name), chosen[name], parent)
        else:
            read_block_key(lint, name, chosen, parent, version)
    synchronise(lint)


def read_version(lint: LintContext, entry: Entry | None) -> None:
    """Read ``fsdp_version``: text that must be 1 or 2 (3 fails in the plugin with KeyError 'TRUE')."""
    if entry is None:
        lint.set("fsdp_version", 1)
        return
    value = entry.node.value
    number = whole(value)
    if number in (1, 2):
        lint.set("fsdp_version", number, entry=entry)
        return
    meant = spelling.integer(value)
    fix = meant if meant in (1, 2) else None
    lint.set("fsdp_version", fix or 2, entry=entry)
    key = lint.name("fsdp_version")
    lint.report_value("FSD206", f"{key} must be 1 or 2, not {value!r}", entry, fix)


def whole(value: Any) -> int | None:
    """Return what ``int(str(value))`` makes of a value, or None where it raises."""
    try:
        return int(str(value))
    except ValueError:
        return None


def read_block_key(
    lint: LintContext, name: str, chosen: Mapping[str, Entry], block: Node | None, version: int
) -> None:
    """Read one setting of the plugin that exists under version 2; ``chosen`` are the entries of all."""
    key, entry = lint.name(name), chosen[name]
    if name == "reshard_after_forward":
        _reshard(lint, key, chosen, version)
    elif name == "wrap_classes":
        read_classes(lint, entry, block)
    elif name == "min_num_params":
        _threshold(lint, key, entry, block, version)
    elif name == "ignored_modules":
        _ignored_modules(lint, key, entry)
    elif name in BOOLEANS:
        read_boolean(lint, key, name, entry)
    else:
        table = POLICIES if name == "wrap_policy" else STATE_DICTS
        read_choice(lint, key, name, entry, table, version)


def read_choice(
    lint: LintContext, key: str, name: str, entry: Entry, table: dict[str, str], version: int
) -> None:
    """Read an enumeration: any case, and for state dicts torch's enum numbers."""
    value = to_python(entry.node)
    if value is None:
        # The launcher exports nothing for null, so the default (or the environment) decides.
        default(lint, name, version)
        return
    canonical = table.get(str(value).upper())
    written = WRITTEN[name]
    if canonical is None:
        meant = spelling.near_choice(
            value, spelling.WRAP_POLICIES if name == "wrap_policy" else spelling.STATE_DICT_TYPES
        )
        lint.set(name, meant or ("none" if name == "wrap_policy" else "sharded"), entry=entry)
        if name == "wrap_policy" and meant is None and "." in str(value):
            lint.report_value(
                "FSD348", f"{key} {value!r} is a dotted path, which programs do not import", entry
            )
            return
        choices = ", ".join(written.values())
        lint.report_value(
            "FSD206", f"{key} {value!r} is not one of {choices}", entry, written[meant] if meant else None
        )
        return
    lint.set(name, canonical, entry=entry)
    if str(value) != written[canonical] and canonical != "local":
        lint.report_value("FSD217", f"{key} {value!r} means {written[canonical]}", entry, written[canonical])


def _ignored_modules(lint: LintContext, key: str, entry: Entry) -> None:
    value = entry.node.value if entry.node.kind == "scalar" else str(to_python(entry.node))
    lint.set("ignored_modules", None if value is None else str(value), entry=entry)
    try:
        re.compile(str(value))
    except re.error as error:
        lint.report_value("FSD206", f"{key} is not a valid regular expression: {error}", entry)


def _reshard(lint: LintContext, key: str, chosen: Mapping[str, Entry], version: int) -> None:
    entry = chosen["reshard_after_forward"]
    value = to_python(entry.node)
    strategy = spelling.choice(value, spelling.STRATEGIES) if not isinstance(value, bool) else None
    # Of numbers 1 and 0 are truths as well; only names are strategies beyond doubt.
    strategy = None if str(value).isdigit() else strategy
    if version == 1:
        lint.ignore(entry, f"not read under version 1: {lint.name('sharding_strategy')} decides")
        if strategy is not None and "sharding_strategy" not in chosen:
            lint.report_value(
                "FSD336",
                f"{value} is written under {key}, which version 1 does not read: the run is FULL_SHARD",
                entry,
                severity="info" if strategy == "full_shard" else None,
            )
        return
    read_reshard(lint, entry, key)


def read_reshard(lint: LintContext, entry: Entry, key: str) -> None:
    """Read FSDP2's boolean; a strategy name or number is refused, with what it means where that is sure."""
    value = to_python(entry.node)
    strategy = spelling.choice(value, spelling.STRATEGIES) if not isinstance(value, bool) else None
    truth = word_of_truth(value)
    if truth is not None:
        accept_truth(lint, key, "reshard_after_forward", entry, value, truth)
        return
    meant = {"full_shard": True, "shard_grad_op": False}.get(strategy or "")
    if meant is None:
        meant = spelling.boolean(value)
    lint.set("reshard_after_forward", meant if meant is not None else True, entry=entry)
    if strategy == "no_shard":
        lint.report_value("FSD332", f"{key} is {value!r}: NO_SHARD has no FSDP2 equivalent", entry)
        return
    if strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        lint.report_value("FSD334", f"{key} is {value!r}: hybrid sharding is a mesh under FSDP2", entry)
        return
    lint.report_value("FSD322", f"{key} must be true or false under version 2, not {value!r}", entry, meant)


def read_classes(lint: LintContext, entry: Entry, parent: Node | None) -> None:
    """Read the class list: one text, split at commas, nothing trimmed."""
    value = to_python(entry.node)
    if value is None:
        default(lint, "wrap_classes", lint.get("fsdp_version") or 1)
        return
    exact = isinstance(value, str) and all(is_class_name(part) for part in value.split(","))
    names = spelling.classes(value)
    lint.set("wrap_classes", names or (), entry=entry)
    if exact:
        return
    severity: Any = None if lint.get("wrap_policy") == "transformer" else "info"  # not read
    if names and not isinstance(value, bool) and all(map(is_class_name, names)):
        lint.report_value(
            "FSD214",
            f"{entry.key} {value!r} is not split into class names",
            entry,
            severity=severity,
            edits=lint.editor.replace_entry(entry, ",".join(names)),
            fix=f"write {','.join(names)}",
        )
    elif names == ():
        edits = lint.editor.remove(parent, entry)
        what = "is empty: accelerate looks for a class with an empty name"
        if value:
            what = f"{value!r} is text: accelerate looks for a class of this name"
        lint.report(
            "FSD214",
            f"{entry.key} {what}",
            entry,
            severity=severity,
            help="remove the key, or name the classes",
            edits=edits,
            fix="remove the key",
        )
    else:
        message = f"{entry.key} {value!r} does not contain class names"
        lint.report_value("FSD214", message, entry, severity=severity)


def is_class_name(text: str) -> bool:
    """Whether text can be the name of a class: no word that other languages have for nothing or a truth."""
    return text.isidentifier() and text.lower() not in ("none", "null", "true", "false")


def _threshold(lint: LintContext, key: str, entry: Entry, block: Node | None, version: int) -> None:
    value = to_python(entry.node)
    if lint.get("wrap_policy") != "size":
        lint.set("min_num_params", None)
        lint.ignore(entry, "read with SIZE_BASED_WRAP only")
        if version == 2 or value not in (0, None):
            lint.report_removable(
                "FSD325", f"{key} is not read: the policy is not SIZE_BASED_WRAP", entry, block, key=key
            )
        return
    number = whole(value)
    if number is None:
        meant = spelling.integer(value)
        lint.set("min_num_params", meant or 100_000_000, entry=entry)
        where = " in YAML 1.1" if lint.document.language == "yaml" else ""
        lint.report_value("FSD213", f"{key} {value!r} is not an integer{where}", entry, meant)
        return
    lint.set("min_num_params", number, entry=entry)


LegacyReader = Callable[[LintContext, str, Entry, Node | None], None]
"""Reads a key of FSDP1: the key as messages call it, its entry, and the mapping that holds it."""

PREFETCHES = {
    "BACKWARD_PRE": "BACKWARD_PRE",
    "BACKWARD_POST": "BACKWARD_POST",
    "NO_PREFETCH": None,
    "1": "BACKWARD_PRE",
    "2": "BACKWARD_POST",
}
"""torch's names (in upper case) and numbers, which the plugin accepts as text."""


def no_effect(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    """Report a key of FSDP1 that changes nothing under version 2."""
    lint.report_removable("FSD302", f"{key} has no effect under version 2", entry, block, key=key)


def boolean(name: str) -> LegacyReader:
    """Return what reads a boolean setting of FSDP1."""
    return lambda lint, key, entry, block: read_boolean(lint, key, name, entry)


def _strategy_under_1(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    value = to_python(entry.node)
    strategy = STRATEGIES.get(str(value).upper())
    lint.set("sharding_strategy", strategy or "full_shard", entry=entry)
    if strategy is None:
        meant = spelling.choice(value, spelling.STRATEGIES)
        lint.report_value(
            "FSD206",
            f"{key} {value!r} is not one of {', '.join(STRATEGY_NAMES)}",
            entry,
            meant.upper() if meant else None,
            safe=False,
            changes={"sharding_strategy": meant},
        )
    elif str(value).isdigit():
        lint.report_value(
            "FSD323", f"{key} {value} is {strategy.upper()}", entry, strategy.upper(), safe=True
        )


def _prefetch_under_1(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    value = to_python(entry.node)
    text = "NO_PREFETCH" if value is None else str(value).upper()
    lint.set("backward_prefetch", PREFETCHES.get(text), entry=entry)
    if text not in PREFETCHES:
        off = spelling.normal(value) in ("none", "no", "off", "null", "false")
        lint.report_value(
            "FSD206",
            f"{key} {value!r} is not BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH",
            entry,
            edits=lint.editor.replace(entry.node, "NO_PREFETCH") if off else None,
            fix="write NO_PREFETCH",
        )


def _prefetch_under_2(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    value = to_python(entry.node)
    if value is None or str(value).upper() in PREFETCHES:
        no_effect(lint, key, entry, block)
        return
    message = f"{key} {value!r} is ignored under version 2, but the plugin still fails on it: KeyError"
    lint.report_removable("FSD206", message, entry, block, key=key, value=True, safe=True)


def _forward_under_2(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    if not word_of_truth(to_python(entry.node)):
        no_effect(lint, key, entry, block)
        return
    lint.report_removable(
        "FSD303",
        f"{key}: true has no effect: accelerate's FSDP2 does not support explicit forward prefetch",
        entry,
        block,
        key=key,
        severity="warning",
        safe=True,
        help="remove it; fsdptool's own trainer prefetches with `sharding.prefetch`",
    )


def _synchronisation_under_1(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    read_boolean(lint, key, "sync_module_states", entry)
    value = to_python(entry.node)
    if _launcher_refuses(lint, value):
        lint.report_value(
            "FSD321",
            f"{key}: {shown(value)} makes accelerate launch refuse it while RAM-efficient loading is on",
            entry,
            True,
            help=f"set it to true, or {lint.name('cpu_ram_efficient_loading')} to false",
            safe=False,
            changes={"sync_module_states": True},
        )


def _synchronisation_under_2(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    value = to_python(entry.node)
    if _launcher_refuses(lint, value):
        message = f"{key}: {shown(value)} makes accelerate launch refuse the file"
        lint.report_removable("FSD321", message, entry, block, key=key)
    else:
        no_effect(lint, key, entry, block)


def _strategy_under_2(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    value, remove = to_python(entry.node), lint.editor.remove(block, entry)
    strategy = spelling.choice(value, spelling.STRATEGIES)
    own = lint.at("reshard_after_forward")
    runs = word_of_truth(own.node.value) if own is not None else True
    if strategy == "no_shard":
        lint.report_value("FSD332", f"{key} {value!r} is ignored; NO_SHARD has no FSDP2 equivalent", entry)
    elif strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        _hybrid_under_2(lint, key, value, strategy, entry, block, own, remove)
    elif strategy == "shard_grad_op" and runs is not False:
        edits = None
        if block is not None and remove is not None and own is None:
            edits = lint.editor.rename(entry, lint.name("reshard_after_forward"))
            replaced = lint.editor.replace(entry.node, False)
            edits = (*edits, *replaced) if edits is not None and replaced is not None else None
        elif block is not None and remove is not None and own is not None:
            replaced = lint.editor.replace(own.node, False)
            edits = (*remove, *replaced) if replaced is not None else None
        lint.report_value(
            "FSD303",
            f"{key} {value!r} is ignored: parameters are freed after forward",
            entry,
            edits=edits,
            safe=False,
            fix=f"write {lint.name('reshard_after_forward')}: false",
            changes={"reshard_after_forward": False},
        )
    else:
        no_effect(lint, key, entry, block)


def _launcher_refuses(lint: LintContext, value: Any) -> bool:
    """Whether the launcher refuses an untrue ``sync_module_states``.

    It tests the truth of both values before the plugin parses them, so that any text but an empty one
    passes. Where variables are exported no launcher looks.
    """
    if value or lint.document.language == "env":
        return False
    entry = lint.at("cpu_ram_efficient_loading")
    return entry is None or bool(to_python(entry.node))


FSDP1: Mapping[str, tuple[LegacyReader, LegacyReader]] = {
    "sharding_strategy": (_strategy_under_1, _strategy_under_2),
    "backward_prefetch": (_prefetch_under_1, _prefetch_under_2),
    "forward_prefetch": (boolean("forward_prefetch"), _forward_under_2),
    "use_orig_params": (boolean("use_orig_params"), no_effect),
    "sync_module_states": (_synchronisation_under_1, _synchronisation_under_2),
}
"""Setting of FSDP1 to what the plugin makes of it under version 1, and what is reported under version 2."""


def shown(value: Any) -> str:
    """Return a value as a file or a command line writes it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _hybrid_under_2(
    lint: LintContext,
    key: str,
    value: Any,
    strategy: str,
    entry: Entry,
    block: Node | None,
    own: Entry | None,
    remove: Any,
) -> None:
    machines = lint.get("num_machines")
    mesh = hybrid_mesh(lint.get("num_processes"), machines)
    has_block = lint.root.get("parallelism_config") is not None
    reshard = strategy == "hybrid_shard"
    single = machines == 1 and (lint.written("num_machines") or lint.get("num_processes") is not None)
    if has_block or single:
        severity: Any = "warning"
        message = f"{key} {value!r} is ignored under version 2"
        if machines == 1 and not has_block:
            message += "; on one machine it would replicate nothing"
        runs = word_of_truth(own.node.value) if own is not None else True
        if runs == reshard:
            lint.report("FSD302", message, entry, edits=remove, fix=f"remove {key}")
            return
        lint.report_value("FSD303", message, entry, severity=severity)
        return
    edits = None
    changes: dict[str, Any] = {}
    if mesh and remove is not None and reshard:
        added = lint.editor.add(
            lint.root,
            None,
            {
                "parallelism_config": {
                    "parallelism_config_dp_replicate_size": mesh["dp_replicate"],
                    "parallelism_config_dp_shard_size": mesh["dp_shard"],
                }
            },
        )
        edits = (*remove, *added) if added is not None else None
        changes = dict(mesh)
    counted = isinstance(lint.get("num_processes"), int) and lint.written("num_machines")
    lint.report_value(
        "FSD334",
        f"{key} {value!r} is ignored under version 2: the run shards over all ranks",
        entry,
        help=None
        if counted
        else "write num_processes and num_machines: the mesh follows from them "
        "(replicate over machines, shard within)",
        edits=edits,
        safe=False,
        fix="write the mesh in parallelism_config",
        changes=changes,
    )


def synchronise(lint: LintContext) -> None:
    """Set ``sync_module_states`` where version 1 loads efficiently: the plugin does so with a warning."""
    loading = lint.get("cpu_ram_efficient_loading")
    if lint.get("fsdp_version") != 1 or not loading or lint.get("sync_module_states") is not False:
        return
    entry = lint.at("sync_module_states")
    if entry is not None:
        lint.ignore(entry, "RAM-efficient loading needs it: the plugin sets it to true")
    lint.set("sync_module_states", True, origin="RAM-efficient loading needs it")
