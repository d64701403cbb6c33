"""axolotl's older FSDP settings, and what its own validation refuses: rules seen with axolotl 0.19.0."""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.context import LintContext
from fsdptool.config.dialects.accelerate import values
from fsdptool.config.dialects.trainer.values import strategy_under_1
from fsdptool.files.tree import Entry, Node, to_python

_LIST_WORDS = frozenset({"full_shard", "shard_grad_op", "offload", "auto_wrap"})
_NO_FSDP2 = frozenset({"adamw_8bit", "adamw_bnb_8bit"})


def read_list(
    lint: LintContext, entry: Entry, block: Node | None, chosen: dict[str, Entry], version: int
) -> None:
    """Read the legacy ``fsdp`` list, which transformers translates into settings of ``fsdp_config``."""
    value = to_python(entry.node)
    listed = isinstance(value, list)
    items = [str(item) for item in value] if isinstance(value, list) else str(value).split()
    strategies = [spelling.choice(item, spelling.STRATEGIES) for item in items]
    strategy = next((item for item in strategies if item is not None), None)
    bad = next((item for item in items if item not in _LIST_WORDS and (version == 2 or item == "true")), None)
    extra: dict[str, Any] = {}
    if version == 1:
        strategy_under_1(lint, strategy, entry)
    elif "reshard_after_forward" not in chosen and strategy in ("full_shard", "shard_grad_op"):
        lint.set("reshard_after_forward", strategy == "full_shard", entry=entry)
        if strategy == "shard_grad_op":
            extra["reshard_after_forward"] = False
    if "offload" in items:
        lint.set("cpu_offload", True, entry=entry)
        extra["offload_params"] = True
    if bad is not None:
        _refuse_word(lint, entry, bad)
        return
    lint.report(
        "FSD339" if listed else "FSD205",
        f"the fsdp list ({','.join(items)}) is the legacy form"
        if listed
        else f"fsdp must be a list, not {value!r}; axolotl refuses the file",
        entry,
        help="remove it; fsdp_config alone enables FSDP",
        edits=_without_list(lint, entry, block, chosen, extra) if version == 2 else None,
        safe=True,
        fix="remove fsdp",
    )


def _without_list(
    lint: LintContext, entry: Entry, block: Node | None, chosen: dict[str, Entry], extra: dict[str, Any]
) -> Any:
    if block is None or any(key in chosen for key in extra):
        return None
    removed = lint.editor.remove(lint.root, entry)
    if not extra or removed is None:
        return removed
    added = lint.editor.add(block, lint.root.get("fsdp_config"), extra)
    return (*removed, *added) if added is not None else None


def _refuse_word(lint: LintContext, entry: Entry, word: str) -> None:
    strategy = spelling.choice(word, spelling.STRATEGIES)
    if strategy == "no_shard":
        code, why = "FSD332", "has no FSDP2 equivalent; transformers raises an error"
    elif strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        code, why = "FSD334", "is available with FSDP1 only; transformers raises an error"
    else:
        code, why = "FSD206", "is not understood; transformers raises an error"
    lint.report(
        code,
        f"fsdp: {word} {why}",
        entry,
        help="remove the list; write dp_replicate_size and dp_shard_size for hybrid sharding"
        if code == "FSD334"
        else "remove the list; fsdp_config alone enables FSDP",
    )


def read_fsdp1(lint: LintContext, key: str, entry: Entry | None, block: Node | None, version: int) -> None:
    """Read a key of FSDP1; None is its absence."""
    if version == 1:
        _under_1(lint, key, entry, block)
    elif entry is not None:
        _under_2(lint, key, entry, block)


def _under_1(lint: LintContext, key: str, entry: Entry | None, block: Node | None) -> None:
    if key in ("use_orig_params", "sync_module_states"):
        if entry is None or to_python(entry.node) is None:
            lint.set(key, True)
        else:
            values.read_boolean(lint, key, key, entry)
        if key == "sync_module_states" and lint.get("cpu_ram_efficient_loading"):
            lint.set(key, True)  # the plugin sets it, with a warning
        return
    if key in ("forward_prefetch", "backward_prefetch"):
        lint.set(key, False if key == "forward_prefetch" else None)
    if entry is None:
        return
    strategy = spelling.choice(entry.node.value, spelling.STRATEGIES) if key == "sharding_strategy" else None
    if strategy not in (None, "full_shard"):
        strategy_under_1(lint, strategy, entry)
        return
    lint.ignore(entry, "axolotl's schema has no such field and drops it")
    lint.report_removable(
        "FSD202", f"{entry.key} is not read: axolotl drops it", entry, block, help="remove it", safe=True
    )


def _under_2(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    remove = lint.editor.remove(block, entry)
    strategy = spelling.choice(entry.node.value, spelling.STRATEGIES) if key == "sharding_strategy" else None
    lint.ignore(entry, "FSDP1 only; axolotl drops it under version 2")
    judged = key in ("use_orig_params", "sync_module_states") and to_python(entry.node) is not None
    if judged and values.word_of_truth(to_python(entry.node)) is None:
        lint.report_value(
            "FSD206",
            f"{entry.key} must be true or false, not {entry.node.value!r}; axolotl refuses the file",
            entry,
            help="remove it: it has no effect under version 2",
            edits=remove,
            fix=f"remove {entry.key}",
        )
        return
    shown = f"{entry.key} {entry.node.value!r}"
    if strategy == "shard_grad_op" and lint.get("reshard_after_forward") is not False:
        lint.report_value("FSD303", f"{shown} is dropped: parameters are freed after forward", entry)
    elif strategy in ("hybrid_shard", "hybrid_shard_zero2") and lint.get("dp_replicate") == 1:
        lint.report_value("FSD334", f"{shown} is dropped: write dp_replicate_size and dp_shard_size", entry)
    elif strategy == "no_shard":
        lint.report_value("FSD332", f"{shown} has no FSDP2 equivalent", entry)
    else:
        lint.report_removable("FSD302", f"{entry.key} has no effect under version 2", entry, block)


def refuse(lint: LintContext, block: Node | None, chosen: dict[str, Entry], version: int) -> None:
    """Report what axolotl's validation refuses about FSDP together with other settings."""
    if block is None:
        lint.report(
            "FSD212",
            "fsdp without fsdp_config: axolotl 0.19 stops with an AttributeError",
            lint.root.get("fsdp"),
            help="write fsdp_version: 2 and the settings under fsdp_config",
        )
    _optimizer(lint, version)
    ram = lint.facts["cpu_ram_efficient_loading"].entry
    four = lint.root.get("load_in_4bit")
    quantised = four is not None and four.node.value is True
    lint.load_in_4bit = quantised
    if quantised and version == 2 and lint.get("cpu_ram_efficient_loading") and ram is not None:
        lint.report_value(
            "FSD346",
            "axolotl refuses cpu_ram_efficient_loading with load_in_4bit under FSDP2",
            ram,
            False,
            help="write cpu_ram_efficient_loading: false",
            safe=False,
            changes={"cpu_ram_efficient_loading": False},
        )
    pin = block.get("cpu_offload_pin_memory") or block.get("fsdp_cpu_offload_pin_memory") if block else None
    if pin is not None and pin.node.value is False and (version == 1 or not lint.get("cpu_offload")):
        need = "fsdp_version 2" if version == 1 else "offload_params: true"
        lint.report("FSD206", f"cpu_offload_pin_memory: false requires {need}; axolotl refuses the file", pin)


def _optimizer(lint: LintContext, version: int) -> None:
    entry = lint.root.get("optimizer")
    name = str(entry.node.value) if entry is not None else ""
    if entry is None:
        return
    if name in _NO_FSDP2 and version == 1:
        lint.migration_refusal = f"axolotl refuses {name} under FSDP2: use adamw_torch_8bit"
    if name in _NO_FSDP2 and version == 2:
        lint.report_value(
            "FSD345",
            f"axolotl refuses {name} under FSDP2",
            entry,
            "adamw_torch_8bit",
            severity="error",
            help="use adamw_torch_8bit",
            safe=False,
        )
    elif version == 1 and "8bit" in name and lint.get("cpu_offload"):
        lint.report_value("FSD350", f"axolotl refuses {name} with offload_params under FSDP1", entry)
    elif version == 1 and name == "muon":
        lint.report_value(
            "FSD345",
            "axolotl refuses muon under FSDP1",
            entry,
            severity="error",
            help="write fsdp_version: 2",
        )
