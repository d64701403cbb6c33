"""axolotl's older FSDP settings, and what its own validation refuses: rules seen with axolotl 0.19.0."""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.dialects import accelerate_values as values
from fsdptool.config.dialects.trainer_values import strategy_under_1
from fsdptool.config.draft import Draft
from fsdptool.files.tree import Entry, Node, to_python

_LIST_WORDS = frozenset({"full_shard", "shard_grad_op", "offload", "auto_wrap"})
_NO_FSDP2 = frozenset({"adamw_8bit", "adamw_bnb_8bit"})


def read_list(draft: Draft, entry: Entry, block: Node | None, chosen: dict[str, Entry], version: int) -> None:
    """Read the legacy ``fsdp`` list, which transformers translates into settings of ``fsdp_config``."""
    value = to_python(entry.node)
    listed = isinstance(value, list)
    items = [str(item) for item in value] if isinstance(value, list) else str(value).split()
    asked = [spelling.choice(item, spelling.STRATEGIES) for item in items]
    strategy = next((item for item in asked if item is not None), None)
    bad = next((item for item in items if item not in _LIST_WORDS and (version == 2 or item == "true")), None)
    extra: dict[str, Any] = {}
    if version == 1:
        strategy_under_1(draft, strategy, entry)
    elif "reshard_after_forward" not in chosen and strategy in ("full_shard", "shard_grad_op"):
        draft.set("reshard_after_forward", strategy == "full_shard", entry=entry)
        if strategy == "shard_grad_op":
            extra["reshard_after_forward"] = False
    if "offload" in items:
        draft.set("cpu_offload", True, entry=entry)
        extra["offload_params"] = True
    if bad is not None:
        _refuse_word(draft, entry, bad)
        return
    draft.report(
        "FSD339" if listed else "FSD205",
        f"the fsdp list ({','.join(items)}) is the legacy form"
        if listed
        else f"fsdp must be a list, not {value!r}; axolotl refuses the file",
        entry,
        help="remove it; fsdp_config alone switches FSDP on",
        edits=_without_list(draft, entry, block, chosen, extra) if version == 2 else None,
        safe=True,
        fix="remove fsdp",
    )


def _without_list(
    draft: Draft, entry: Entry, block: Node | None, chosen: dict[str, Entry], extra: dict[str, Any]
) -> Any:
    if block is None or any(key in chosen for key in extra):
        return None
    removed = draft.editor.remove(draft.root, entry)
    if not extra or removed is None:
        return removed
    added = draft.editor.add(block, draft.root.get("fsdp_config"), extra)
    return (*removed, *added) if added is not None else None


def _refuse_word(draft: Draft, entry: Entry, word: str) -> None:
    strategy = spelling.choice(word, spelling.STRATEGIES)
    if strategy == "no_shard":
        code, why = "FSD332", "has no FSDP2 equivalent; transformers raises"
    elif strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        code, why = "FSD334", "is available with FSDP1 only; transformers raises"
    else:
        code, why = "FSD206", "is not understood; transformers raises"
    draft.report(
        code,
        f"fsdp: {word} {why}",
        entry,
        help="remove the list; write dp_replicate_size and dp_shard_size for hybrid sharding"
        if code == "FSD334"
        else "remove the list; fsdp_config alone switches FSDP on",
    )


def read_fsdp1(draft: Draft, key: str, entry: Entry | None, block: Node | None, version: int) -> None:
    """Read a key of FSDP1; None is its absence."""
    if version == 1:
        _under_1(draft, key, entry, block)
    elif entry is not None:
        _under_2(draft, key, entry, block)


def _under_1(draft: Draft, key: str, entry: Entry | None, block: Node | None) -> None:
    if key in ("use_orig_params", "sync_module_states"):
        if entry is None or to_python(entry.node) is None:
            draft.set(key, True)
        else:
            values.read_boolean(draft, key, key, entry)
        if key == "sync_module_states" and draft.get("cpu_ram_efficient_loading"):
            draft.set(key, True)  # the plugin sets it, with a warning
        return
    if key in ("forward_prefetch", "backward_prefetch"):
        draft.set(key, False if key == "forward_prefetch" else None)
    if entry is None:
        return
    strategy = spelling.choice(entry.node.value, spelling.STRATEGIES) if key == "sharding_strategy" else None
    if strategy not in (None, "full_shard"):
        strategy_under_1(draft, strategy, entry)
        return
    draft.ignore(entry, "axolotl's schema has no such field and drops it")
    draft.report_removable(
        "FSD202", f"{entry.key} is not read: axolotl drops it", entry, block, help="remove it", safe=True
    )


def _under_2(draft: Draft, key: str, entry: Entry, block: Node | None) -> None:
    remove = draft.editor.remove(block, entry)
    strategy = spelling.choice(entry.node.value, spelling.STRATEGIES) if key == "sharding_strategy" else None
    draft.ignore(entry, "FSDP1 only; axolotl drops it under version 2")
    judged = key in ("use_orig_params", "sync_module_states") and to_python(entry.node) is not None
    if judged and values.word_of_truth(to_python(entry.node)) is None:
        draft.report(
            "FSD206",
            f"{entry.key} must be true or false, not {entry.node.value!r}; axolotl refuses the file",
            entry,
            value=True,
            help="remove it: it has no meaning under version 2",
            edits=remove,
            fix=f"remove {entry.key}",
        )
        return
    shown = f"{entry.key} {entry.node.value!r}"
    if strategy == "shard_grad_op" and draft.get("reshard_after_forward") is not False:
        draft.report("FSD303", f"{shown} is dropped: parameters are freed after forward", entry, value=True)
    elif strategy in ("hybrid_shard", "hybrid_shard_zero2") and draft.get("dp_replicate") == 1:
        draft.report(
            "FSD334", f"{shown} is dropped: write dp_replicate_size and dp_shard_size", entry, value=True
        )
    elif strategy == "no_shard":
        draft.report("FSD332", f"{shown} has no FSDP2 equivalent", entry, value=True)
    else:
        draft.report(
            "FSD302",
            f"{entry.key} has no meaning under version 2",
            entry,
            edits=remove,
            fix=f"remove {entry.key}",
        )


def refuse(draft: Draft, block: Node | None, chosen: dict[str, Entry], version: int) -> None:
    """Report what axolotl's validation refuses about FSDP together with other settings."""
    if block is None:
        draft.report(
            "FSD212",
            "fsdp without fsdp_config: axolotl 0.19 stops with an AttributeError",
            draft.root.get("fsdp"),
            help="write fsdp_version: 2 and the settings under fsdp_config",
        )
    _optimizer(draft, version)
    ram = draft.facts["cpu_ram_efficient_loading"].entry
    four = draft.root.get("load_in_4bit")
    quantised = four is not None and four.node.value is True
    draft.extras["four_bit"] = quantised
    if quantised and version == 2 and draft.get("cpu_ram_efficient_loading") and ram is not None:
        draft.report_value(
            "FSD346",
            "axolotl refuses cpu_ram_efficient_loading with load_in_4bit under FSDP2",
            ram,
            False,
            help="write cpu_ram_efficient_loading: false (--unsafe-fixes)",
            safe=False,
            changes={"cpu_ram_efficient_loading": False},
        )
    pin = block.get("cpu_offload_pin_memory") or block.get("fsdp_cpu_offload_pin_memory") if block else None
    if pin is not None and pin.node.value is False and (version == 1 or not draft.get("cpu_offload")):
        need = "fsdp_version 2" if version == 1 else "offload_params: true"
        draft.report("FSD206", f"cpu_offload_pin_memory: false needs {need}; axolotl refuses the file", pin)


def _optimizer(draft: Draft, version: int) -> None:
    entry = draft.root.get("optimizer")
    name = str(entry.node.value) if entry is not None else ""
    if entry is None:
        return
    if name in _NO_FSDP2 and version == 1:
        draft.extras["no_migration"] = f"axolotl refuses {name} under FSDP2: use adamw_torch_8bit"
    if name in _NO_FSDP2 and version == 2:
        draft.report_value(
            "FSD345",
            f"axolotl refuses {name} under FSDP2",
            entry,
            "adamw_torch_8bit",
            severity="error",
            help="use adamw_torch_8bit (--unsafe-fixes)",
            safe=False,
        )
    elif version == 1 and "8bit" in name and draft.get("cpu_offload"):
        draft.report("FSD350", f"axolotl refuses {name} with offload_params under FSDP1", entry, value=True)
    elif version == 1 and name == "muon":
        draft.report(
            "FSD345",
            "axolotl refuses muon under FSDP1",
            entry,
            value=True,
            severity="error",
            help="write fsdp_version: 2",
        )
