"""How transformers 5.23 reads each value of ``fsdp_config``."""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.canonical import LEGACY_DEFAULTS, STRATEGIES, STRATEGY_NAMES, WRITTEN
from fsdptool.config.context import LintContext
from fsdptool.config.dialects.accelerate import values
from fsdptool.config.dialects.accelerate.fsdp1 import PREFETCHES
from fsdptool.files.tree import Entry, Node, to_python

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
        found = tuple(text.split(",")) if name == "wrap_classes" else bool(values.word_of_truth(text))
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
        values.read_boolean(lint, key, name, entry)
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
        values.read_choice(lint, key, name, entry, values.STATE_DICTS, version)
    elif name == "wrap_classes":
        _classes(lint, entry, value)
    elif name == "min_num_params":
        read_threshold(lint, entry, block, value)


def _state_dict_number(lint: LintContext, key: str, name: str, entry: Entry, value: Any) -> None:
    """The plugin makes a type of text only: anything else stays as it is, and equals no type."""
    meant = None if isinstance(value, bool) else values.STATE_DICTS.get(str(value))
    lint.set(name, meant or "sharded", entry=entry)
    lint.report_value(
        "FSD205",
        f"{key} {value!r} is not text: accelerate's plugin keeps it, and no state dict is of this type",
        entry,
        WRITTEN[name][meant] if meant else None,
        safe=False,
    )


def strategy_under_1(lint: LintContext, written: str | None, entry: Entry | None = None) -> None:
    """Record the strategy that runs under version 1, which is never the one TrainingArguments pass.

    accelerate 1.15's plugin fills an unset ``sharding_strategy`` from FSDP_SHARDING_STRATEGY or with
    FULL_SHARD, and ``Accelerator.prepare_model`` takes it before ``reshard_after_forward``, the only one
    of the two that transformers 5.23 passes.

    Args:
        lint: The lint.
        written: The strategy that the file asks for, or None.
        entry: Where it does.
    """
    variable = lint.environment.get("FSDP_SHARDING_STRATEGY")
    runs = spelling.choice(variable, spelling.STRATEGIES) if variable is not None else None
    if runs is not None:
        lint.set("sharding_strategy", runs, origin="environment variable FSDP_SHARDING_STRATEGY")
    else:
        runs = "full_shard"
        lint.set("sharding_strategy", runs)
    if entry is None or written is None:
        return
    lint.ignore(entry, "accelerate's plugin takes FSDP_SHARDING_STRATEGY or FULL_SHARD before it")
    if written != runs:
        decides = (
            "unless FSDP_SHARDING_STRATEGY is set" if variable is None else "from FSDP_SHARDING_STRATEGY"
        )
        lint.report_value(
            "FSD336", f"{written.upper()} does not run: version 1 uses {runs.upper()} {decides}", entry
        )


def _reshard(lint: LintContext, entry: Entry, value: Any, version: int) -> None:
    if version == 1:
        word = str(value).upper()
        strategy = STRATEGIES.get(word)
        strategy_under_1(lint, strategy, entry)
        if strategy is None:
            lint.report_value(
                "FSD206",
                f"under version 1 reshard_after_forward is one of {', '.join(STRATEGY_NAMES)}, not {value!r}",
                entry,
            )
        return
    values.read_reshard(lint, entry, "reshard_after_forward")


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
    meant = spelling.choice(value, spelling.WRAP_POLICIES)
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
    if isinstance(value, str | list) and all(map(values.is_class_name, pieces)):
        return
    severity: Any = None if lint.get("wrap_policy") == "transformer" else "info"  # not read
    if not names or not all(map(values.is_class_name, names)):
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


def read_fsdp1_key(
    lint: LintContext, key: str, entry: Entry | None, block: Node | None, version: int
) -> None:
    """Read a key that only version 1 knows; None is its absence."""
    if entry is None:
        if version == 1 and key in LEGACY_DEFAULTS:
            lint.set(key, LEGACY_DEFAULTS[key])
        return
    if version == 2:
        lint.ignore(entry, "FSDP1 only; not read under version 2")
        truth = spelling.boolean(entry.node.value)
        if key == "forward_prefetch" and truth:
            lint.report_removable(
                "FSD303",
                f"{entry.key}: true has no effect: transformers drops it under version 2",
                entry,
                block,
                severity="warning",
                safe=True,
                help="remove it",
            )
            return
        lint.report_removable("FSD302", f"{entry.key} has no effect under version 2", entry, block)
        return
    if key == "backward_prefetch":
        text = entry.node.value.upper() if isinstance(entry.node.value, str) else None
        lint.set(key, PREFETCHES.get(text or ""), entry=entry)
        if text not in PREFETCHES:
            lint.report_value(
                "FSD206",
                f"{entry.key} {entry.node.value!r} is not BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH",
                entry,
            )
        return
    values.read_boolean(lint, str(entry.key), key, entry)


def read_strategy(
    lint: LintContext, entry: Entry | None, chosen: dict[str, Entry], block: Node | None, version: int
) -> None:
    """``sharding_strategy`` is never read by TrainingArguments, under either version."""
    if entry is None or block is None:
        return
    lint.ignore(entry, "TrainingArguments do not read it; reshard_after_forward decides")
    strategy = spelling.choice(entry.node.value, spelling.STRATEGIES)
    if version == 1 or strategy == "full_shard" or (strategy is None and not entry.node.value):
        lint.report_removable("FSD302", f"{entry.key} is not read by TrainingArguments", entry, block)
        return
    if strategy == "shard_grad_op" and lint.get("reshard_after_forward") is not False:
        edits = None
        if "reshard_after_forward" not in chosen:
            renamed = lint.editor.rename(entry, "reshard_after_forward")
            replaced = lint.editor.replace(entry.node, False)
            edits = (*renamed, *replaced) if renamed is not None and replaced is not None else None
        lint.report_value(
            "FSD303",
            f"{entry.key} {entry.node.value!r} is ignored: parameters are freed after forward",
            entry,
            edits=edits,
            safe=False,
            fix="write reshard_after_forward: false",
            changes={"reshard_after_forward": False},
        )
        return
    if strategy == "no_shard":
        lint.report_value(
            "FSD332", f"{entry.key} {entry.node.value!r} is ignored; NO_SHARD has no FSDP2 equivalent", entry
        )
        return
    if strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        lint.report_value(
            "FSD334", f"{entry.key} {entry.node.value!r} is ignored: the run shards over all ranks", entry
        )
        return
    lint.report_removable("FSD302", f"{entry.key} is not read by TrainingArguments", entry, block)
