"""The argument ``fsdp``, whose words older versions of transformers take for settings.

Source: transformers 4.57.6, 5.0.0 to 5.9.0 and 5.23.0 ``training_args.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import (
    STRATEGY_NAMES,
)
from fsdptool.config.dialects.protocol import LintContext
from fsdptool.config.programs import is_before
from fsdptool.files.tree import Entry, to_python
from fsdptool.records.diagnostic import Edit

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext


OLD_ARGUMENTS = ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params")


def has_old_arguments(lint: LintContext) -> bool:
    """Whether the two keys are arguments still, as they were before transformers 5."""
    return is_older(lint, 5)


def is_older(lint: LintContext, *parts: int) -> bool:
    """Whether the transformers that reads the arguments is older than ``parts``."""
    consumer = lint.consumer
    if consumer.name in ("trainer", "llamafactory"):
        return consumer.before(*parts)
    return consumer.name == "trl" and is_before(consumer.version_of("transformers"), *parts)


def words_of(switch: Entry | None) -> list[str]:
    """Return the words of ``fsdp``, as text or list."""
    value = to_python(switch.node) if switch is not None else None
    if isinstance(value, list):
        return [str(item) for item in value]
    return value.split() if isinstance(value, str) else []


def reader_name(lint: LintContext) -> str:
    """Return the name and version of the transformers that reads the arguments."""
    if lint.consumer.name in ("trainer", "llamafactory"):
        return f"transformers {lint.consumer.version}"
    return f"the transformers of {lint.consumer}"


_WORDS = ("full_shard", "shard_grad_op", "offload", "auto_wrap")
"""The words of the legacy form that FSDP2 has a meaning for."""


def read_switch(lint: LintContext, version: int, chosen: dict[str, Entry]) -> None:
    """``fsdp`` as text or list: translated by transformers as long as the words are exactly its own."""
    switch = lint.root.get("fsdp")
    if switch is None:
        return
    value = to_python(switch.node)
    if isinstance(value, bool) or not isinstance(value, str | list):
        return
    items = words_of(switch)
    reshard: bool | None = None
    offload = False
    bad: list[str] = []
    for item in items:
        if item in ("full_shard", "shard_grad_op"):
            reshard = item == "full_shard" if reshard is None else reshard
        elif item == "offload":
            offload = True
        elif item != "auto_wrap":
            bad.append(item)
    if version == 1:
        _strategy_of_words(lint, switch, items, chosen)
    if version == 1 or is_older(lint, 5, 10):
        # Before 5.10 every name of a strategy is a word, which FSDP2 ignores.
        bad = [item for item in bad if STRATEGY_NAMES.get(item.upper()) is None]
    if bad:
        _bad_words(lint, switch, items, bad)
        return
    written = "reshard_after_forward" in chosen
    if version == 2 and reshard is not None and not written and not is_older(lint, 5, 4):
        lint.set("reshard_after_forward", reshard, entry=switch)
    if offload and "cpu_offload" not in chosen:
        lint.set("cpu_offload", True, entry=switch)
    if is_older(lint, 5, 10):
        return
    lint.report_value(
        "FSD339",
        f"fsdp: {_shown(value)} is the legacy form",
        switch,
        edits=_modern(
            lint, switch, version, reshard if not written else None, offload and "cpu_offload" not in chosen
        ),
        fix="write fsdp: true and the options in fsdp_config",
    )


def _strategy_of_words(
    lint: LintContext, switch: Entry, items: list[str], chosen: Mapping[str, Entry]
) -> None:
    strategies = [STRATEGY_NAMES.get(item.upper()) for item in items]
    strategy = next((item for item in strategies if item is not None), None)
    if is_older(lint, 5, 4):
        # Exported as FSDP_SHARDING_STRATEGY before 5.0, and passed to the plugin since: it runs.
        lint.set("sharding_strategy", strategy or "full_shard", entry=switch if strategy else None)
    elif strategy is not None and "reshard_after_forward" not in chosen:
        strategy_under_1(lint, strategy, switch)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else ",".join(map(str, value))


def _bad_words(lint: LintContext, switch: Entry, items: list[str], bad: list[str]) -> None:
    word = bad[0]
    strategy = spelling.choice(word, spelling.STRATEGIES)
    if strategy == "no_shard":
        lint.report_value(
            "FSD332", f"fsdp: {word} has no FSDP2 equivalent; transformers 5.23 raises an error", switch
        )
    elif strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        lint.report_value(
            "FSD334",
            f"fsdp: {word} is available with FSDP1 only; transformers 5.23 raises an error",
            switch,
            help="hybrid sharding is a mesh under FSDP2, which TrainingArguments cannot "
            "express: migrate --to accelerate",
        )
    elif len(items) == 1 and spelling.boolean(word) is not None:
        truth = spelling.boolean(word)
        lint.report_value(
            "FSD206",
            f"fsdp: {word!r} is text, which transformers 5.23 refuses: Unknown `fsdp` option",
            switch,
            truth,
            **({"edits": _switch_on(lint, switch) if truth else None} if _typed_on_a_line(lint) else {}),
        )
    else:
        fixed = [spelling.normal(part) for item in items for part in item.replace(",", " ").split()]
        known = all(part in _WORDS for part in fixed)
        edits = (
            lint.editor.replace(switch.node, " ".join(fixed))
            if known and isinstance(switch.node.value, str)
            else None
        )
        lint.report_value(
            "FSD206",
            f"fsdp: {word!r} is not one of {', '.join(_WORDS)}; transformers 5.23 raises an error",
            switch,
            help=None if edits is not None else "write fsdp: true, and version and options in fsdp_config",
            edits=edits,
            fix=f"write {' '.join(fixed)}",
        )


def _typed_on_a_line(lint: LintContext) -> bool:
    return lint.document.language == "flags"


def _switch_on(lint: LintContext, switch: Entry) -> tuple[Edit, ...] | None:
    """Return the edits that write true; on a command line that is the flag without a value."""
    if not _typed_on_a_line(lint):
        return lint.editor.replace_entry(switch, True)
    return None if switch.node.file else (Edit(switch.key_node.end, switch.node.end, ""),)


def _modern(lint: LintContext, switch: Entry, version: int, reshard: bool | None, offload: bool) -> Any:
    if version != 2:
        return None
    first = _switch_on(lint, switch)
    extra: dict[str, Any] = {}
    if reshard is not None and not (reshard and _typed_on_a_line(lint)):  # true by default
        extra["reshard_after_forward"] = reshard
    if offload:
        extra["cpu_offload"] = True
    if not extra:
        return first
    holder = lint.root.get("fsdp_config")
    if holder is not None:
        second = lint.editor.add(holder.node, holder, extra)
    else:
        second = lint.editor.add(lint.root, None, {"fsdp_config": extra})
    return (*first, *second) if first is not None and second is not None else None


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
