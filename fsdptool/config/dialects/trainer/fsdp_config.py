"""The keys of ``fsdp_config``, as transformers reads them.

Source: transformers 5.23.0 ``training_args.py:_process_fsdp_args``: it strips the prefix ``fsdp_``, and a key
with it wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import (
    LEGACY_DEFAULTS,
    STRATEGIES,
    STRATEGY_NAMES,
    WRITTEN,
    begins,
)
from fsdptool.config.dialects.accelerate import plugin
from fsdptool.config.dialects.protocol import LintContext
from fsdptool.config.dialects.trainer.switch import (
    OLD_ARGUMENTS,
    has_old_arguments,
    is_older,
    read_switch,
    reader_name,
    strategy_under_1,
    words_of,
)
from fsdptool.files.tree import Entry, Node, effective_entries, to_python

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext
    from fsdptool.files.tree import Node

KEYS = {
    "version": "fsdp_version",
    "reshard_after_forward": "reshard_after_forward",
    "auto_wrap_policy": "wrap_policy",
    "transformer_layer_cls_to_wrap": "wrap_classes",
    "min_num_params": "min_num_params",
    "state_dict_type": "state_dict_type",
    "cpu_offload": "cpu_offload",
    "cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "activation_checkpointing": "activation_checkpointing",
}
XLA_KEYS = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
ELSEWHERE = {
    "offload_params": "cpu_offload",
    "offload": "cpu_offload",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "fsdp_version": "version",
}
"""Other programs' words for keys read here."""


def read_config(lint: LintContext, block: Node | None) -> None:
    """Read the keys of ``fsdp_config`` as ``_process_fsdp_args`` does: prefix stripped, prefixed wins."""
    chosen = _choose(lint, block)
    if _runs_xla(lint, chosen.get("xla")):
        return
    version = _version(lint, chosen.get("version"), block)
    if is_older(lint, 5, 10):
        _drop_unread(lint, chosen)
    read_switch(lint, version, chosen)
    for key, name in KEYS.items():
        entry = chosen.get(key)
        if key == "version" or (lint.facts.get(name) is not None and entry is None):
            continue
        if entry is None:
            default(lint, name, version)
        else:
            read_key(lint, key, name, entry, block, version)
    _read_fsdp1(lint, chosen, block, version)
    plugin.synchronise(lint)
    if version == 2:
        _judge_optimizer(lint, lint.root.get("optim"))


def _drop_unread(lint: LintContext, chosen: dict[str, Entry]) -> None:
    """Take out what transformers before 5.10 does not read, and set what it passes instead.

    Source: ``training_args.py`` of 4.57.6 (``__post_init__``) and of 5.0.0 to 5.9.0
    (``_process_fsdp_args``). The words of ``fsdp`` decide on wrapping; the plugin's own defaults count for
    the rest. Under version 2, 5.0 to 5.3 pass ``reshard_after_forward`` as false where it is not written.
    """
    unread = ["auto_wrap_policy", "state_dict_type", "cpu_offload"]
    unread += ["reshard_after_forward"] if is_older(lint, 5) else []
    for key in unread:
        entry = chosen.pop(key, None)
        if entry is not None:
            lint.ignore(entry, f"{reader_name(lint)} does not read it")
    version = lint.get("fsdp_version")
    lint.set("state_dict_type", "full" if version == 1 else "sharded")
    lint.set("cpu_offload", False)
    if version == 2 and "reshard_after_forward" not in chosen:
        lint.set("reshard_after_forward", not is_older(lint, 5, 4))
    switch = lint.root.get("fsdp")
    threshold = chosen.get("min_num_params")
    size = threshold is not None and (spelling.integer(threshold.node.value) or 0) > 0
    if switch is None or "auto_wrap" in words_of(switch):  # a file of --fsdp_config does not show the words
        lint.set("wrap_policy", "size" if size else "transformer", entry=switch)
        return
    lint.set("wrap_policy", "none")
    lint.report(
        "FSD315",
        f"fsdp has no auto_wrap, without which {reader_name(lint)} wraps nothing",
        switch,
        help="write fsdp: full_shard auto_wrap",
    )


_BITSANDBYTES = frozenset([
    "adamw_bnb_8bit", "adamw_8bit", "ademamix", "ademamix_8bit", "lion_8bit", "lion_32bit",
    "paged_adamw_32bit", "paged_adamw_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit",
    "paged_lion_32bit", "paged_lion_8bit", "rmsprop_bnb", "rmsprop_bnb_8bit", "rmsprop_bnb_32bit",
])  # fmt: skip
"""Optimizers that bitsandbytes computes (``OptimizerNames`` of transformers 5.23)."""


def _judge_optimizer(lint: LintContext, entry: Entry | None) -> None:
    """Report an optimizer whose kernels do not know DTensors (bitsandbytes 0.50.2)."""
    if entry is None or entry.node.value not in _BITSANDBYTES:
        return
    lint.report_value(
        "FSD345",
        f"{entry.node.value} is bitsandbytes's, which takes sharded parameters for plain tensors",
        entry,
        help="use adamw_torch_fused, or adamw_torch_8bit of torchao",
    )


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
    if has_old_arguments(lint):
        old = {key.removeprefix("fsdp_"): lint.root.get(key) for key in OLD_ARGUMENTS}
        chosen = {key: entry for key, entry in old.items() if entry is not None and block is not lint.root}
    if block is None:
        return chosen
    read_here = {*KEYS, *FSDP1, *XLA_KEYS}
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


def _version(lint: LintContext, entry: Entry | None, block: Node | None) -> int:
    # Older transformers read a missing version as 1; axolotl's source names 5.10 as the change.
    fallback = 1 if is_older(lint, 5, 10) else 2
    if entry is None:
        lint.set("fsdp_version", fallback)
        holder = lint.root.get("fsdp_config") if block is not lint.root else None
        edits = lint.editor.add(block, holder, {"version": fallback}) if block is not None else None
        if block is None and not lint.config_path:
            edits = lint.editor.add(lint.root, None, {"fsdp_config": {"version": fallback}})
        if not is_older(lint, 5) and (edits is not None or block is not None):
            lint.report(
                "FSD338",
                f"the version is not written: {reader_name(lint)} runs FSDP{fallback}",
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
    if is_older(lint, 5):
        # training_args.py of 4.57.6 has no version; 5.0.0 passes it on.
        lint.ignore(entry, "transformers reads the version from 5.0 on")
        lint.set("fsdp_version", 1)
        lint.version_unread = True
        lint.migration_refusal = f"{reader_name(lint)} runs FSDP1 whatever the version says: upgrade to 5.0"
        return 1
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


DEFAULTS: dict[str, Any] = {
    "reshard_after_forward": True,
    "wrap_policy": "transformer",
    "wrap_classes": (),
    "min_num_params": None,
    "state_dict_type": "full",
    "cpu_offload": False,
    "cpu_ram_efficient_loading": False,
    "activation_checkpointing": False,
}
"""What TrainingArguments pass under version 2 where nothing is written."""


_UNPASSED = {
    "cpu_offload": "FSDP_OFFLOAD_PARAMS",
    "activation_checkpointing": "FSDP_ACTIVATION_CHECKPOINTING",
    "wrap_classes": "FSDP_TRANSFORMER_CLS_TO_WRAP",
}
"""What TrainingArguments do not pass when it is not written, with the variable that the plugin reads."""


def default(lint: LintContext, name: str, version: int) -> None:
    """Record what transformers does when a key is not written."""
    if name == "reshard_after_forward" and version == 1:
        if lint.get("sharding_strategy") is None:
            strategy_under_1(lint, None)
        return
    variable = _UNPASSED.get(name)
    text = lint.environment.get(variable) if variable is not None else None
    if text is not None and not (name == "wrap_classes" and lint.get("wrap_policy") != "transformer"):
        # The plugin falls back to the variable when TrainingArguments pass nothing.
        found = tuple(text.split(",")) if name == "wrap_classes" else bool(plugin.word_of_truth(text))
        lint.set(name, found, origin=f"environment variable {variable}")
        lint.report("FSD341", f"{name} is not written; {variable}={text} in the environment decides")
        return
    if name == "min_num_params" and lint.get("wrap_policy") == "size":
        # TrainingArguments pass nothing, and the plugin takes the variable or 0.
        variable = lint.environment.get("FSDP_MIN_NUM_PARAMS")
        number = 0 if variable is None else spelling.integer(variable)
        origin = None if variable is None else "environment variable FSDP_MIN_NUM_PARAMS"
        lint.set(name, number, origin=origin)
        return
    lint.set(name, DEFAULTS[name])


def read_key(lint: LintContext, key: str, name: str, entry: Entry, block: Node | None, version: int) -> None:
    """Read one known key."""
    value = to_python(entry.node)
    if name == "reshard_after_forward":
        _reshard(lint, entry, value, version)
    elif name == "cpu_offload":
        _offload(lint, entry, value)
    elif name in ("cpu_ram_efficient_loading", "activation_checkpointing"):
        plugin.read_boolean(lint, key, name, entry)
    elif name == "wrap_policy":
        _policy(lint, entry, value)
    elif name == "state_dict_type":
        if value is None:
            # The plugin is passed nothing and takes its own default, which depends on the version.
            lint.set(name, "full" if version == 1 else "sharded", entry=entry)
            return
        if not isinstance(value, str):
            _state_dict_number(lint, key, name, entry, value)
            return
        plugin.read_choice(lint, key, name, entry, plugin.STATE_DICTS, version)
    elif name == "wrap_classes":
        _classes(lint, entry, value)
    elif name == "min_num_params":
        read_threshold(lint, entry, block, value)


def _state_dict_number(lint: LintContext, key: str, name: str, entry: Entry, value: Any) -> None:
    """The plugin makes a type of text only: anything else stays as it is, and equals no type."""
    meant = None if isinstance(value, bool) else plugin.STATE_DICTS.get(str(value))
    lint.set(name, meant or "sharded", entry=entry)
    lint.report_value(
        "FSD205",
        f"{key} {value!r} is not text: accelerate's plugin keeps it, and no state dict is of this type",
        entry,
        WRITTEN[name][meant] if meant else None,
        safe=False,
    )


def _reshard(lint: LintContext, entry: Entry, value: Any, version: int) -> None:
    if version == 1:
        word = str(value).upper()
        strategy = STRATEGIES.get(word)
        if not is_older(lint, 5, 4):
            strategy_under_1(lint, strategy, entry)
        else:
            lint.ignore(entry, "the strategy that fsdp names comes before it")
        if strategy is None:
            lint.report_value(
                "FSD206",
                f"under version 1 reshard_after_forward is one of {', '.join(STRATEGY_NAMES)}, not {value!r}",
                entry,
            )
        return
    plugin.read_reshard(lint, entry, "reshard_after_forward")


def _offload(lint: LintContext, entry: Entry, value: Any) -> None:
    """transformers tests the value's truth without parsing it."""
    lint.set("cpu_offload", bool(value), entry=entry)
    judge_truth(lint, "cpu_offload", "cpu_offload", entry, value)


def judge_truth(lint: LintContext, key: str, name: str, entry: Entry, value: Any) -> None:
    """Report a value that is tested for truth and not parsed, where it is not plainly true or false.

    Args:
        lint: The lint.
        key: What the program calls the setting.
        name: Its canonical name, or ``*``.
        entry: Where it is written.
        value: The value.
    """
    if isinstance(value, bool) or value is None:
        return
    truth = bool(value)
    meant = spelling.boolean(value)
    if meant is truth or not value or isinstance(value, dict):
        shown = repr(value) if not isinstance(value, dict) else "a mapping"
        message = f"{key}: {shown} is treated as {str(truth).lower()}"
        lint.report_value("FSD207", message, entry, truth)
        return
    kind = "text" if isinstance(value, str) else "list" if isinstance(value, list) else "number"
    lint.report_value(
        "FSD337",
        f"{key} is the {kind} {value!r}, which is treated as {str(truth).lower()}",
        entry,
        meant,
        safe=False,
        changes={name: meant},
    )


def _policy(lint: LintContext, entry: Entry, value: Any) -> None:
    written = WRITTEN["wrap_policy"]
    exact = {text: name for name, text in written.items()}
    if value in exact if isinstance(value, str) else False:
        lint.set("wrap_policy", exact[value], entry=entry)
        return
    meant = spelling.near_choice(value, spelling.WRAP_POLICIES)
    lint.set("wrap_policy", meant or "transformer", entry=entry)
    if meant is None and "." in str(value):
        lint.report_value(
            "FSD348", f"auto_wrap_policy {value!r} is a dotted path, which programs do not import", entry
        )
        return
    lint.report_value(
        "FSD206",
        f"auto_wrap_policy {value!r} is not one of {', '.join(exact)} (upper case only)",
        entry,
        written[meant] if meant else None,
    )


def _classes(lint: LintContext, entry: Entry, value: Any) -> None:
    names = spelling.classes(value)
    lint.set("wrap_classes", names or (), entry=entry)
    if value is None:
        return
    pieces = (
        ",".join(value).split(",")
        if isinstance(value, list) and all(isinstance(item, str) for item in value)
        else str(value).split(",")
    )
    if isinstance(value, str | list) and all(map(plugin.is_class_name, pieces)):
        return
    severity: Any = None if lint.get("wrap_policy") == "transformer" else "info"  # not read
    if not names or not all(map(plugin.is_class_name, names)):
        message = f"{entry.key} {value!r} does not contain class names"
        lint.report_value("FSD214", message, entry, severity=severity)
        return
    lint.report_value(
        "FSD214",
        f"{entry.key} {value!r} is not split into class names",
        entry,
        severity=severity,
        edits=lint.editor.replace_entry(entry, ",".join(names)),
        fix=f"write {','.join(names)}",
    )


def read_threshold(lint: LintContext, entry: Entry, block: Node | None, value: Any) -> None:
    """Read the size threshold, which counts with SIZE_BASED_WRAP only."""
    policy = lint.get("wrap_policy")
    if policy != "size":
        lint.set("min_num_params", None)
        lint.ignore(entry, "read with SIZE_BASED_WRAP only")
        if value not in (0, None):
            lint.report_removable(
                "FSD325", f"{entry.key} is not read: the policy is not SIZE_BASED_WRAP", entry, block
            )
        return
    if isinstance(value, int | float) and value <= 0:
        # Not passed on, so that the plugin takes its variable or 0.
        default(lint, "min_num_params", lint.get("fsdp_version") or 2)
        if value:
            lint.report_value("FSD217", f"{entry.key} {value!r} means 0", entry, 0)
        return
    if isinstance(value, int):
        lint.set("min_num_params", int(value), entry=entry)
        if isinstance(value, bool):
            lint.report_value("FSD213", f"{entry.key} is true, which counts as 1", entry, severity="warning")
        return
    meant = spelling.integer(value)
    lint.set("min_num_params", meant or 0, entry=entry)
    lint.report_value("FSD213", f"{entry.key} {value!r} is not a whole number", entry, meant)


def _forward_under_2(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    if spelling.boolean(entry.node.value):
        message = f"{key}: true has no effect: transformers drops it under version 2"
        lint.report_removable(
            "FSD303", message, entry, block, severity="warning", safe=True, help="remove it"
        )
    else:
        plugin.no_effect(lint, key, entry, block)


def _prefetch_under_1(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    value = entry.node.value
    text = value.upper() if isinstance(value, str) else None
    lint.set("backward_prefetch", plugin.PREFETCHES.get(text or ""), entry=entry)
    if text not in plugin.PREFETCHES:
        message = f"{key} {value!r} is not BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH"
        lint.report_value("FSD206", message, entry)


def _strategy_unread(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    lint.report_removable("FSD302", f"{key} is not read by TrainingArguments", entry, block)


def _strategy_under_2(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    value = entry.node.value
    strategy, own = spelling.choice(value, spelling.STRATEGIES), "reshard_after_forward"
    if strategy == "shard_grad_op" and lint.get("reshard_after_forward") is not False:
        edits = None
        if block is not None and not (block.get(own) or block.get(f"fsdp_{own}")):
            renamed = lint.editor.rename(entry, "reshard_after_forward")
            replaced = lint.editor.replace(entry.node, False)
            edits = (*renamed, *replaced) if renamed is not None and replaced is not None else None
        lint.report_value(
            "FSD303",
            f"{key} {value!r} is ignored: parameters are freed after forward",
            entry,
            edits=edits,
            safe=False,
            fix="write reshard_after_forward: false",
            changes={"reshard_after_forward": False},
        )
        return
    if strategy == "no_shard":
        lint.report_value("FSD332", f"{key} {value!r} is ignored; NO_SHARD has no FSDP2 equivalent", entry)
        return
    if strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        lint.report_value("FSD334", f"{key} {value!r} is ignored: the run shards over all ranks", entry)
        return
    _strategy_unread(lint, key, entry, block)


FSDP1: Mapping[str, tuple[plugin.LegacyReader, plugin.LegacyReader]] = {
    "forward_prefetch": (plugin.boolean("forward_prefetch"), _forward_under_2),
    "backward_prefetch": (_prefetch_under_1, plugin.no_effect),
    "use_orig_params": (plugin.boolean("use_orig_params"), plugin.no_effect),
    "sync_module_states": (plugin.boolean("sync_module_states"), plugin.no_effect),
    "limit_all_gathers": (plugin.boolean("limit_all_gathers"), plugin.no_effect),
    "sharding_strategy": (_strategy_unread, _strategy_under_2),
}
"""Key of FSDP1 to what is made of it under version 1, and what is reported under version 2."""


def _read_fsdp1(lint: LintContext, chosen: Mapping[str, Entry], block: Node | None, version: int) -> None:
    for key, readers in FSDP1.items():
        entry = chosen.get(key)
        if entry is not None:
            if key == "sharding_strategy":
                lint.ignore(entry, "TrainingArguments do not read it; reshard_after_forward decides")
            elif version == 2:
                lint.ignore(entry, "FSDP1 only; not read under version 2")
            readers[version - 1](lint, str(entry.key), entry, block)
        elif version == 1 and key in LEGACY_DEFAULTS and key != "sharding_strategy":
            lint.set(key, LEGACY_DEFAULTS[key])
