"""FSDP1's keys in an accelerate file: settings under version 1, findings under version 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdptool import spelling
from fsdptool.config.canonical import STRATEGIES, STRATEGY_NAMES, hybrid_mesh
from fsdptool.config.context import LintContext
from fsdptool.config.dialects.accelerate.values import read_boolean, word_of_truth
from fsdptool.files.tree import Entry, Node, to_python

PREFETCHES = {
    "BACKWARD_PRE": "BACKWARD_PRE",
    "BACKWARD_POST": "BACKWARD_POST",
    "NO_PREFETCH": None,
    "1": "BACKWARD_PRE",
    "2": "BACKWARD_POST",
}
"""torch's names (in upper case) and numbers, which the plugin accepts as text."""


def read_legacy(
    lint: LintContext, name: str, chosen: Mapping[str, Entry], block: Node | None, version: int
) -> None:
    """Read a setting of FSDP1: a setting under version 1, a finding under version 2."""
    key, entry = lint.name(name), chosen[name]
    value = to_python(entry.node)
    if version == 1:
        _legacy_under_1(lint, key, name, value, entry)
        return
    lint.ignore(entry, "FSDP1 only; not read under version 2")
    remove = lint.editor.remove(block, entry)
    if name == "sharding_strategy":
        _strategy_under_2(lint, key, value, entry, block, remove)
    elif name == "sync_module_states" and _launcher_refuses(lint, value):
        lint.report_removable(
            "FSD321", f"{key}: {shown(value)} makes accelerate launch refuse the file", entry, block, key=key
        )
    elif name == "forward_prefetch" and word_of_truth(value):
        lint.report(
            "FSD303",
            f"{key}: true has no effect: accelerate's FSDP2 does not support explicit forward prefetch",
            entry,
            severity="warning",
            edits=remove,
            safe=True,
            fix=f"remove {key}",
            help="remove it; fsdptool's own trainer prefetches with `sharding.prefetch`",
        )
    elif name == "backward_prefetch" and value is not None and str(value).upper() not in PREFETCHES:
        message = f"{key} {value!r} is ignored under version 2, but the plugin still fails on it: KeyError"
        lint.report_removable("FSD206", message, entry, block, key=key, value=True, safe=True)
    else:
        lint.report_removable("FSD302", f"{key} has no effect under version 2", entry, block, key=key)


def shown(value: Any) -> str:
    """Return a value as a file or a command line writes it."""
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _launcher_refuses(lint: LintContext, value: Any) -> bool:
    """Whether the launcher refuses an untrue ``sync_module_states``.

    It tests the truth of both values before the plugin parses them, so that any text but an empty one
    passes. Where variables are exported no launcher looks.
    """
    if value or lint.document.language == "env":
        return False
    entry = lint.at("cpu_ram_efficient_loading")
    return entry is None or bool(to_python(entry.node))


def _strategy_under_2(
    lint: LintContext, key: str, value: Any, entry: Entry, block: Node | None, remove: Any
) -> None:
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
        lint.report_removable("FSD302", f"{key} has no effect under version 2", entry, block, key=key)


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


def _legacy_under_1(lint: LintContext, key: str, name: str, value: Any, entry: Entry) -> None:
    if name == "sharding_strategy":
        strategy = STRATEGIES.get(str(value).upper())
        if strategy is None:
            meant = spelling.choice(value, spelling.STRATEGIES)
            lint.set(name, "full_shard", entry=entry)
            lint.report_value(
                "FSD206",
                f"{key} {value!r} is not one of {', '.join(STRATEGY_NAMES)}",
                entry,
                meant.upper() if meant else None,
                safe=False,
                changes={name: meant},
            )
            return
        lint.set(name, strategy, entry=entry)
        if str(value).isdigit():
            lint.report_value(
                "FSD323", f"{key} {value} is {strategy.upper()}", entry, strategy.upper(), safe=True
            )
        return
    if name == "backward_prefetch":
        text = "NO_PREFETCH" if value is None else str(value).upper()
        lint.set(name, PREFETCHES.get(text), entry=entry)
        if text not in PREFETCHES:
            lint.report_value(
                "FSD206",
                f"{key} {value!r} is not BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH",
                entry,
                edits=lint.editor.replace(entry.node, "NO_PREFETCH")
                if spelling.normal(value) in ("none", "no", "off", "null", "false")
                else None,
                fix="write NO_PREFETCH",
            )
        return
    read_boolean(lint, key, name, entry)
    if name == "sync_module_states" and _launcher_refuses(lint, value):
        lint.report_value(
            "FSD321",
            f"{key}: {shown(value)} makes accelerate launch refuse it while RAM-efficient loading is on",
            entry,
            True,
            help=f"set it to true, or {lint.name('cpu_ram_efficient_loading')} to false",
            safe=False,
            changes={"sync_module_states": True},
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
