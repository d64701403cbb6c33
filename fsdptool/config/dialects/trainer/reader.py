"""transformers' TrainingArguments: ``fsdp`` and ``fsdp_config``, alone in a file or among other arguments.

Source: transformers 5.23.0 ``training_args.py:_process_fsdp_args``. Two forms are read: the file
given as ``fsdp_config`` (its keys at the top), and a file of TrainingArguments with both keys.
"""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.canonical import begins
from fsdptool.config.context import LintContext
from fsdptool.config.dialects.accelerate.fsdp1 import synchronise
from fsdptool.config.dialects.trainer import ELSEWHERE, FSDP1_KEYS, KEYS, XLA_KEYS
from fsdptool.config.dialects.trainer.switch import read_switch
from fsdptool.config.dialects.trainer.values import (
    default,
    judge_truth,
    read_fsdp1_key,
    read_key,
    read_strategy,
)
from fsdptool.files.tree import Entry, Node, effective_entries, to_python


def read(lint: LintContext) -> None:
    """Read either form into facts."""
    lint.names = {canonical: key for key, canonical in KEYS.items()}
    root = lint.root
    arguments = root.get("fsdp") is not None or root.get("fsdp_config") is not None
    block: Node | None = root
    if arguments:
        block = read_arguments(lint)
        _alone(lint)
    if not lint.configures_fsdp:
        return
    read_config(lint, block)


def _alone(lint: LintContext) -> None:
    """Nothing but ``fsdp`` and ``fsdp_config``: perhaps meant as the file that ``fsdp_config`` names."""
    keys = {str(entry.key) for entry in lint.root.entries if not str(entry.key).startswith("_")}
    entry = lint.root.get("fsdp_config")
    if lint.document.language == "flags":
        return
    if keys == {"fsdp", "fsdp_config"} and entry is not None and entry.node.kind == "map":
        lint.report(
            "FSD355",
            "valid as TrainingArguments only: given as --fsdp_config, no key of this file is read",
            entry,
            help="for --fsdp_config, keep what is inside fsdp_config and pass --fsdp on the command line",
        )


def read_arguments(lint: LintContext) -> Node | None:
    """Read the arguments around ``fsdp_config``; return the block, or None when it lies in another file."""
    root = lint.root
    _precision(lint)
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        entry = root.get(key)
        if entry is not None and entry.node.value is True:
            lint.gradient_checkpointing = entry
    only = root.get("save_only_model")
    if only is not None and only.node.value is True:
        best = root.get("load_best_model_at_end")
        lint.save_only_model = only
        lint.loads_best_model = best is not None and best.node.value is True
    deepspeed = root.get("deepspeed")
    if deepspeed is not None and to_python(deepspeed.node):
        lint.deepspeed = True
    for old in _OLD:
        entry = root.get(old)
        if entry is not None and not _has_old(lint):
            lint.ignore(entry, "not an argument of transformers 5")
            lint.report(
                "FSD211",
                f"{old} is not an argument of transformers 5: it belongs in fsdp_config",
                entry,
                severity="error",
                help=f"write it in fsdp_config as {old.removeprefix('fsdp_')}",
                edits=_move_old(lint, entry),
                safe=False,
                fix="move it into fsdp_config",
                changes={"wrap_classes": entry.node.value},
            )
    entry = root.get("fsdp_config")
    lint.fsdp_entry = entry or root.get("fsdp")
    block: Node | None = None
    if entry is not None and entry.node.kind == "map":
        block = entry.node
    elif entry is not None and isinstance(entry.node.value, str):
        lint.config_path = entry.node.value
    elif entry is not None and entry.node.value is not None:
        lint.report_value("FSD205", "fsdp_config must be a mapping or the path of one", entry)
    switch = root.get("fsdp")
    if switch is None or not to_python(switch.node):
        return _off(lint, switch, block)
    return block


_OLD = ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")


def _has_old(lint: LintContext) -> bool:
    """Whether the two keys are arguments still, as they were before transformers 5."""
    return lint.consumer.name == "trainer" and lint.consumer.before(5)


def _move_old(lint: LintContext, entry: Entry) -> Any:
    removed = lint.editor.remove(lint.root, entry)
    target = lint.root.get("fsdp_config")
    key = str(entry.key).removeprefix("fsdp_")
    values_ = {key: to_python(entry.node)}
    added = (
        lint.editor.add(target.node, target, values_)
        if target
        else lint.editor.add(lint.root, None, {"fsdp_config": values_})
    )
    return (*removed, *added) if removed is not None and added is not None else None


def _off(lint: LintContext, switch: Entry | None, block: Node | None) -> Node | None:
    """``fsdp`` missing or false: transformers never looks at ``fsdp_config``."""
    lint.runs_fsdp = False
    lint.configures_fsdp = False
    if block is not None and block.entries:
        for entry in effective_entries(block):
            lint.ignore(entry, "fsdp is not enabled")
        if switch is None:
            edits = lint.editor.add(lint.root, None, {"fsdp": True})
        else:
            edits = lint.editor.replace(switch.node, True)
        lint.report(
            "FSD330",
            "fsdp_config has no effect: fsdp is not enabled",
            lint.root.get("fsdp_config"),
            edits=edits,
            safe=False,
            fix="write fsdp: true",
            changes={"*": True},
        )
    else:
        lint.report("FSD113", "the arguments do not enable FSDP")
    return block


def _precision(lint: LintContext) -> None:
    """Read ``fp16`` and ``bf16``; a file's values go into TrainingArguments as they are (TRL parses text)."""
    lint.set("mixed_precision", "no")
    on: list[Entry] = []
    for key in ("fp16", "bf16"):  # in the order in which transformers 5.23 looks
        entry = lint.root.get(key)
        if entry is None:
            continue
        value = to_python(entry.node)
        parsed = lint.consumer.name == "trl" and isinstance(value, str)
        if not parsed:
            judge_truth(lint, key, "mixed_precision", entry, value)
        if spelling.boolean(value) if parsed else value:
            on.append(entry)
    if on:
        lint.set("mixed_precision", str(on[0].key), entry=on[0])
    if len(on) > 1:
        message = "fp16 and bf16 are both true; TrainingArguments take at most one"
        lint.report_value("FSD206", message, on[-1], help="keep the one that the GPU supports")


def read_config(lint: LintContext, block: Node | None) -> None:
    """Read the keys of ``fsdp_config`` as ``_process_fsdp_args`` does: prefix stripped, prefixed wins."""
    chosen = _choose(lint, block)
    if _runs_xla(lint, chosen.get("xla")):
        return
    version = _version(lint, chosen.get("version"), block)
    read_switch(lint, version, chosen)
    for key, name in KEYS.items():
        entry = chosen.get(key)
        if key == "version" or (lint.facts.get(name) is not None and entry is None):
            continue
        if entry is None:
            default(lint, name, version)
        else:
            read_key(lint, key, name, entry, block, version)
    for key in FSDP1_KEYS:
        read_fsdp1_key(lint, key, chosen.get(key), block, version)
    read_strategy(lint, chosen.get("sharding_strategy"), chosen, block, version)
    synchronise(lint)


def _runs_xla(lint: LintContext, entry: Entry | None) -> bool:
    """Whether ``xla`` is true in any spelling: TrainingArguments then build no plugin for accelerate."""
    value = None if entry is None else to_python(entry.node)
    if entry is None or not value:
        return False
    lint.runs_fsdp = lint.configures_fsdp = False
    if spelling.boolean(value) is False:
        judge_truth(lint, str(entry.key), "*", entry, value)
    else:
        message = f"{entry.key} is {value!r}: transformers uses torch_xla's FSDP, not FSDP2"
        lint.report_value("FSD110", message, entry)
    return True


def _choose(lint: LintContext, block: Node | None) -> dict[str, Entry]:
    chosen: dict[str, Entry] = {}
    if _has_old(lint):
        old = {key.removeprefix("fsdp_"): lint.root.get(key) for key in _OLD}
        chosen = {key: entry for key, entry in old.items() if entry is not None and block is not lint.root}
    if block is None:
        return chosen
    read_here = {*KEYS, *FSDP1_KEYS, *XLA_KEYS, "sharding_strategy"}
    top = block is lint.root
    for entry in effective_entries(block):
        key = str(entry.key)
        bare = key.removeprefix("fsdp_")
        if bare in read_here:
            twin = chosen.get(bare)
            if twin is not None:
                loser = twin if key.startswith("fsdp_") else entry
                winner = entry if loser is twin else twin
                chosen[bare] = winner
                lint.ignore(loser, f"{winner.key} is the same setting and wins")
                lint.report_removable(
                    "FSD215",
                    f"{loser.key} and {winner.key} are the same setting; {winner.key} takes effect",
                    loser,
                    block,
                )
            else:
                chosen[bare] = entry
            if bare in XLA_KEYS:
                lint.ignore(entry, "for XLA devices")
        elif not (top and key in ("fsdp", "fsdp_config")):
            _unread(lint, block, entry, bare)
    return chosen


def _unread(lint: LintContext, block: Node, entry: Entry, bare: str) -> None:
    key = str(entry.key)
    if key.startswith("_"):
        lint.report("FSD220", f"{key} is a note", entry)
        return
    if "activation" in bare and "offload" in bare:
        lint.ignore(entry, "TrainingArguments do not read it")
        lint.report_removable("FSD353", f"{key} is not read by TrainingArguments", entry, block, safe=True)
        return
    meant = ELSEWHERE.get(bare)
    if meant is not None and block.get(meant) is None and block.get(f"fsdp_{meant}") is None:
        lint.ignore(entry, f"another program's name for {meant}")
        value = entry.node.value
        truth = spelling.boolean(value) if meant == "cpu_offload" else None
        edits = lint.editor.rename(entry, meant)
        if truth is not None and truth is not value and edits is not None:
            replaced = lint.editor.replace(entry.node, truth)
            edits = (*edits, *replaced) if replaced is not None else None
        same = meant == "cpu_offload" and truth is False
        if same:
            edits = lint.editor.remove(block, entry)
        lint.report(
            "FSD216",
            f"{key} is not read: TrainingArguments call it {meant}",
            entry,
            edits=edits,
            safe=same,
            fix=f"remove {key}" if same else f"write {meant}",
            help="remove it: the run does this without it" if same else None,
            changes={} if same else {KEYS[meant]: truth if truth is not None else value},
        )
        return
    near = spelling.nearest(bare, KEYS, cutoff=0.8)
    lint.ignore(entry, "unknown in fsdp_config")
    if near is not None and block.get(near) is None and block.get(f"fsdp_{near}") is None:
        lint.report_renamed(
            "FSD202",
            f"{key} is not read: did you mean {near}?",
            entry,
            near,
            changes=begins(KEYS[near], entry.node.value),
        )
        return
    precision = bare in ("mixed_precision", "mixed_precision_policy", "bf16", "fp16")
    lint.report_removable(
        "FSD202",
        f"{key} is not read by TrainingArguments",
        entry,
        block,
        help="remove it; TrainingArguments take the precision from bf16 or fp16; another policy"
        " exists only in Python: FullyShardedDataParallelPlugin(mixed_precision_policy=...)"
        if precision
        else "remove it",
        safe=True,
    )


def _transformers(lint: LintContext) -> str:
    if lint.consumer.name in ("trainer", "llamafactory"):
        return f"transformers {lint.consumer.version}"
    return f"the transformers of {lint.consumer}"


def _version(lint: LintContext, entry: Entry | None, block: Node | None) -> int:
    # Older transformers read a missing version as 1; axolotl's source names 5.10 as the change.
    fallback = 1 if lint.consumer.name == "trainer" and lint.consumer.before(5, 10) else 2
    if entry is None:
        lint.set("fsdp_version", fallback)
        holder = lint.root.get("fsdp_config") if block is not lint.root else None
        edits = lint.editor.add(block, holder, {"version": fallback}) if block is not None else None
        if block is None and not lint.config_path:
            edits = lint.editor.add(lint.root, None, {"fsdp_config": {"version": fallback}})
        if edits is not None or block is not None:
            lint.report(
                "FSD338",
                f"the version is not written: {_transformers(lint)} runs FSDP{fallback}",
                holder or lint.root.get("fsdp") or 0,
                edits=edits,
                fix=f'write "version": {fallback}',
            )
        return fallback
    meant = spelling.integer(entry.node.value)
    if meant not in (1, 2):
        lint.set("fsdp_version", 2, entry=entry)
        lint.report_value("FSD206", f"version must be 1 or 2, not {entry.node.value!r}", entry)
        return 2
    lint.set("fsdp_version", meant, entry=entry)
    if not isinstance(entry.node.value, int):
        try:
            readable = int(entry.node.value) == meant
        except (TypeError, ValueError):
            readable = False
        lint.report_value(
            "FSD217" if readable else "FSD206", f"version {entry.node.value!r} means {meant}", entry, meant
        )
    return meant
