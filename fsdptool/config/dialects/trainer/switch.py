"""The ``fsdp`` argument as text or a list: the legacy form of sharding, offload and wrapping."""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.canonical import STRATEGY_NAMES
from fsdptool.config.context import LintContext
from fsdptool.config.dialects.trainer.values import strategy_under_1
from fsdptool.files.tree import Entry, to_python
from fsdptool.records.diagnostic import Edit

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
    items = value.split() if isinstance(value, str) else [str(item) for item in value]
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
        strategies = [STRATEGY_NAMES.get(item.upper()) for item in items]
        strategy = next((item for item in strategies if item is not None), None)
        if strategy is not None and "reshard_after_forward" not in chosen:
            strategy_under_1(lint, strategy, switch)
        bad = [item for item in bad if STRATEGY_NAMES.get(item.upper()) is None]
    if bad:
        _bad_words(lint, switch, items, bad)
        return
    written = "reshard_after_forward" in chosen
    if version == 2 and reshard is not None and not written:
        lint.set("reshard_after_forward", reshard, entry=switch)
    if offload and "cpu_offload" not in chosen:
        lint.set("cpu_offload", True, entry=switch)
    lint.report_value(
        "FSD339",
        f"fsdp: {_shown(value)} is the legacy form",
        switch,
        edits=_modern(
            lint, switch, version, reshard if not written else None, offload and "cpu_offload" not in chosen
        ),
        fix="write fsdp: true and the options in fsdp_config",
    )


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
