"""transformers' TrainingArguments: ``fsdp`` and ``fsdp_config``, alone in a file or among other arguments.

Source: transformers 5.23.0 ``training_args.py:_process_fsdp_args``. Two forms are read: the file
given as ``fsdp_config`` (its keys at the top), and a file of TrainingArguments with both keys.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fsdptool.config import spelling
from fsdptool.config.dialects import accelerate_values as values
from fsdptool.config.draft import Draft
from fsdptool.config.edits import block_list_to_scalar
from fsdptool.config.expressible import check_expressible
from fsdptool.config.facts import WRITTEN
from fsdptool.config.tree import Entry, Node, effective_entries, to_python
from fsdptool.records.settings import FsdpSettings

if TYPE_CHECKING:
    from fsdptool.config.migrate import Rewriter, Target

NAME = "trainer"

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
FSDP1_KEYS = (
    "forward_prefetch",
    "backward_prefetch",
    "use_orig_params",
    "sync_module_states",
    "limit_all_gathers",
)
XLA_KEYS = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
ELSEWHERE = {
    "offload_params": "cpu_offload",
    "offload": "cpu_offload",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "fsdp_version": "version",
}
"""Other programs' words for keys read here."""

ARGUMENTS = frozenset(
    """output_dir per_device_train_batch_size num_train_epochs learning_rate gradient_accumulation_steps
    lr_scheduler_type save_strategy logging_steps report_to bf16 fp16 gradient_checkpointing max_steps
    save_only_model deepspeed optim activation_checkpointing""".split()
)
CANNOT = (
    "activation_checkpointing_offload", "ignored_modules", "dp_replicate", "dp_shard", "cp", "cp_comm_strategy",
    "tp", "sp", "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port",
    "rdzv_backend", "use_cpu", "gpu_ids", "debug",
)  # fmt: skip


def matches(root: Node) -> float:
    """Return how surely the mapping is TrainingArguments' or their ``fsdp_config``."""
    keys = {str(entry.key) for entry in root.entries}
    switch = root.get("fsdp")
    if switch is not None and switch.node.kind == "map":
        return 0.0
    if keys & {"fsdp", "fsdp_config"} and not keys & {"base_model", "stage", "model_family"}:
        return 0.95 if keys & ARGUMENTS or keys <= {"fsdp", "fsdp_config"} | _notes(keys) else 0.5
    bare = {key.removeprefix("fsdp_") for key in keys}
    known = bare & (set(KEYS) | set(FSDP1_KEYS) | set(ELSEWHERE) | {"sharding_strategy"} | set(XLA_KEYS))
    if known and len(known) * 2 >= len(bare - {"xla_fsdp_settings"}):
        return 0.85
    return 0.3 if known and len(keys) < 12 else 0.0


def _notes(keys: set[str]) -> set[str]:
    return {key for key in keys if key.startswith("_")}


def read(draft: Draft) -> None:
    """Read either form into facts."""
    draft.extras["names"] = {canonical: key for key, canonical in KEYS.items()}
    root = draft.root
    arguments = root.get("fsdp") is not None or root.get("fsdp_config") is not None
    block: Node | None = root
    if arguments:
        block = read_arguments(draft)
    if not draft.extras.get("configures", True):
        return
    read_config(draft, block)


def read_arguments(draft: Draft) -> Node | None:
    """Read the arguments around ``fsdp_config``; return the block, or None when it lies in another file."""
    root = draft.root
    _precision(draft)
    for key in ("gradient_checkpointing", "activation_checkpointing"):
        entry = root.get(key)
        if entry is not None and entry.node.value is True:
            draft.extras["gradient_checkpointing"] = (root, entry)
    deepspeed = root.get("deepspeed")
    if deepspeed is not None and to_python(deepspeed.node):
        draft.extras["deepspeed"] = True
    for old in ("fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"):
        entry = root.get(old)
        if entry is not None:
            draft.ignore(entry, "no argument of transformers 5")
            draft.report("FSD211", f"{old} is no argument of transformers 5: it belongs into fsdp_config", entry,
                         severity="error", help=f"write it in fsdp_config as {old.removeprefix('fsdp_')}",
                         edits=_move_old(draft, entry), safe=False, fix="move it into fsdp_config",
                         changes={"wrap_classes": entry.node.value})  # fmt: skip
    entry = root.get("fsdp_config")
    draft.extras["fsdp_entry"] = entry or root.get("fsdp")
    block: Node | None = None
    if entry is not None and entry.node.kind == "map":
        block = entry.node
    elif entry is not None and isinstance(entry.node.value, str):
        draft.extras["elsewhere"] = entry.node.value
    elif entry is not None and entry.node.value is not None:
        draft.report("FSD205", "fsdp_config must be a mapping or the path of one", entry, value=True)
    switch = root.get("fsdp")
    if switch is None or not to_python(switch.node):
        return _off(draft, switch, block)
    return block


def _move_old(draft: Draft, entry: Entry) -> Any:
    removed = draft.editor.remove(draft.root, entry)
    target = draft.root.get("fsdp_config")
    key = str(entry.key).removeprefix("fsdp_")
    values_ = {key: to_python(entry.node)}
    added = draft.editor.add(target.node, target, values_) if target else draft.editor.add(
        draft.root, None, {"fsdp_config": values_})  # fmt: skip
    return (*removed, *added) if removed is not None and added is not None else None


def _off(draft: Draft, switch: Entry | None, block: Node | None) -> Node | None:
    """``fsdp`` missing or false: transformers never looks at ``fsdp_config``."""
    draft.runs_fsdp = False
    draft.extras["configures"] = False
    if block is not None and block.entries:
        for entry in effective_entries(block):
            draft.ignore(entry, "fsdp is not switched on")
        if switch is None:
            edits = draft.editor.add(draft.root, None, {"fsdp": True})
        else:
            edits = draft.editor.replace(switch.node, True)
        draft.report("FSD330", "fsdp_config does nothing: fsdp is not switched on", draft.root.get("fsdp_config"),
                     edits=edits, safe=False, fix="write fsdp: true", changes={"*": True})  # fmt: skip
    else:
        draft.report("FSD113", "the arguments do not switch FSDP on")
    return block


def _precision(draft: Draft) -> None:
    for key in ("bf16", "fp16"):
        entry = draft.root.get(key)
        if entry is not None and spelling.boolean(entry.node.value):
            draft.set("mixed_precision", key, entry=entry, parent=draft.root)
            return
    draft.set("mixed_precision", "no")


def read_config(draft: Draft, block: Node | None) -> None:
    """Read the keys of ``fsdp_config`` as ``_process_fsdp_args`` does: prefix stripped, prefixed wins."""
    chosen = _choose(draft, block)
    version = _version(draft, chosen.get("version"), block)
    _legacy_switch(draft, version, chosen)
    for key, name in KEYS.items():
        entry = chosen.get(key)
        if key == "version" or draft.facts.get(name) is not None and entry is None:
            continue
        if entry is None:
            _default(draft, name, version)
        else:
            _read_key(draft, key, name, entry, block, version)
    for key in FSDP1_KEYS:
        _fsdp1_key(draft, key, chosen.get(key), block, version)
    _strategy(draft, chosen.get("sharding_strategy"), chosen, block, version)


def _choose(draft: Draft, block: Node | None) -> dict[str, Entry]:
    chosen: dict[str, Entry] = {}
    if block is None:
        return chosen
    read_here = {*KEYS, *FSDP1_KEYS, *XLA_KEYS, "sharding_strategy"}
    top = block is draft.root
    for entry in effective_entries(block):
        key = str(entry.key)
        bare = key.removeprefix("fsdp_")
        if bare in read_here:
            twin = chosen.get(bare)
            if twin is not None:
                loser = twin if key.startswith("fsdp_") else entry
                winner = entry if loser is twin else twin
                chosen[bare] = winner
                draft.ignore(loser, f"{winner.key} is the same setting and wins")
                draft.report("FSD215", f"{loser.key} and {winner.key} are one setting; {winner.key} counts", loser,
                             edits=draft.editor.remove(block, loser), fix=f"remove {loser.key}")  # fmt: skip
            else:
                chosen[bare] = entry
            if bare in XLA_KEYS:
                draft.ignore(entry, "for XLA devices")
        elif not (top and key in ("fsdp", "fsdp_config")):
            _unread(draft, block, entry, bare)
    return chosen


def _unread(draft: Draft, block: Node, entry: Entry, bare: str) -> None:
    key = str(entry.key)
    if key.startswith("_"):
        draft.report("FSD220", f"{key} is a note", entry)
        return
    if "activation" in bare and "offload" in bare:
        draft.ignore(entry, "TrainingArguments do not read it")
        draft.report("FSD353", f"{key} is not read by TrainingArguments", entry,
                     edits=draft.editor.remove(block, entry), safe=True, fix=f"remove {key}")  # fmt: skip
        return
    meant = ELSEWHERE.get(bare)
    if meant is not None and block.get(meant) is None and block.get(f"fsdp_{meant}") is None:
        draft.ignore(entry, f"another program's word for {meant}")
        value = entry.node.value
        truth = spelling.boolean(value) if meant == "cpu_offload" else None
        edits = draft.editor.rename(entry, meant)
        if truth is not None and truth is not value and edits is not None:
            replaced = draft.editor.replace(entry.node, truth)
            edits = (*edits, *replaced) if replaced is not None else None
        same = meant == "cpu_offload" and truth is False
        if same:
            edits = draft.editor.remove(block, entry)
        draft.report("FSD216", f"{key} is not read: TrainingArguments call it {meant}", entry, edits=edits,
                     safe=same, fix=f"remove {key}" if same else f"write {meant}",
                     changes={} if same else {KEYS[meant]: truth if truth is not None else value})  # fmt: skip
        return
    near = spelling.nearest(bare, KEYS, cutoff=0.8)
    draft.ignore(entry, "unknown in fsdp_config")
    if near is not None and block.get(near) is None and block.get(f"fsdp_{near}") is None:
        draft.report("FSD202", f"{key} is not read: did you mean {near}?", entry,
                     edits=draft.editor.rename(entry, near), safe=False, fix=f"rename {key} to {near}",
                     changes={KEYS[near]: entry.node.value})  # fmt: skip
        return
    draft.report("FSD202", f"{key} is not read by TrainingArguments", entry, help="remove it",
                 edits=draft.editor.remove(block, entry), safe=True, fix=f"remove {key}")  # fmt: skip


def _version(draft: Draft, entry: Entry | None, block: Node | None) -> int:
    # Older transformers read a missing version as 1; axolotl's source names 5.10 as the change.
    fallback = 1 if draft.consumer.name == "trainer" and draft.consumer.before(5, 10) else 2
    if entry is None:
        draft.set("fsdp_version", fallback)
        holder = draft.root.get("fsdp_config") if block is not draft.root else None
        edits = draft.editor.add(block, holder, {"version": fallback}) if block is not None else None
        if block is not None:
            draft.report("FSD338", f"no version is written: {draft.consumer} runs FSDP{fallback}", holder or 0,
                         edits=edits, fix=f'write "version": {fallback}')  # fmt: skip
        return fallback
    meant = spelling.integer(entry.node.value)
    if meant not in (1, 2):
        draft.set("fsdp_version", 2, entry=entry, parent=block)
        draft.report("FSD206", f"version must be 1 or 2, not {entry.node.value!r}", entry, value=True)
        return 2
    draft.set("fsdp_version", meant, entry=entry, parent=block)
    if not isinstance(entry.node.value, int):
        try:
            readable = int(entry.node.value) == meant
        except (TypeError, ValueError):
            readable = False
        draft.report("FSD217" if readable else "FSD206", f"version {entry.node.value!r} means {meant}", entry,
                     value=True, edits=draft.editor.replace(entry.node, meant), fix=f"write {meant}")  # fmt: skip
    return meant


def _legacy_switch(draft: Draft, version: int, chosen: dict[str, Entry]) -> None:
    """``fsdp`` as text or list: translated by transformers as long as the words are exactly its own."""
    switch = draft.root.get("fsdp")
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
        strategy = next((item for item in items if spelling.choice(item, spelling.STRATEGIES)), None)
        if strategy is not None:
            draft.set("sharding_strategy", spelling.choice(strategy, spelling.STRATEGIES), entry=switch,
                      parent=draft.root)  # fmt: skip
        bad = [item for item in bad if spelling.choice(item, spelling.STRATEGIES) is None]
    if bad:
        _bad_words(draft, switch, items, bad)
        return
    written = "reshard_after_forward" in chosen
    if version == 2 and reshard is not None and not written:
        draft.set("reshard_after_forward", reshard, entry=switch, parent=draft.root)
    if offload and "cpu_offload" not in chosen:
        draft.set("cpu_offload", True, entry=switch, parent=draft.root)
    draft.report("FSD339", f"fsdp: {_shown(value)} is the legacy form", switch, value=True,
                 edits=_modern(draft, switch, version, reshard if not written else None,
                               offload and "cpu_offload" not in chosen),
                 fix="write fsdp: true and the options in fsdp_config")  # fmt: skip


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else ",".join(map(str, value))


def _bad_words(draft: Draft, switch: Entry, items: list[str], bad: list[str]) -> None:
    word = bad[0]
    strategy = spelling.choice(word, spelling.STRATEGIES)
    if strategy == "no_shard":
        draft.report(
            "FSD332", f"fsdp: {word} has no FSDP2 equivalent; transformers 5.23 raises", switch, value=True
        )
    elif strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        draft.report("FSD334", f"fsdp: {word} is available with FSDP1 only; transformers 5.23 raises", switch,
                     value=True, help="hybrid sharding is a mesh under FSDP2, which TrainingArguments cannot "
                     "express: migrate --to accelerate")  # fmt: skip
    elif len(items) == 1 and spelling.boolean(word) is not None:
        truth = spelling.boolean(word)
        draft.report("FSD206", f"fsdp: {word!r} is text, and transformers 5.23 raises: Unknown `fsdp` option", switch,
                     value=True, edits=draft.editor.replace(switch.node, truth),
                     fix=f"write {str(truth).lower()}")  # fmt: skip
    else:
        fixed = [spelling.normal(part) for item in items for part in item.replace(",", " ").split()]
        known = all(part in ("full_shard", "shard_grad_op", "offload", "auto_wrap") for part in fixed)
        edits = draft.editor.replace(switch.node, " ".join(fixed)) if known and isinstance(
            switch.node.value, str) else None  # fmt: skip
        draft.report("FSD206", f"fsdp: {word!r} is not understood; transformers 5.23 raises", switch, value=True,
                     edits=edits, fix=f"write {' '.join(fixed)}")  # fmt: skip


def _modern(draft: Draft, switch: Entry, version: int, reshard: bool | None, offload: bool) -> Any:
    if version != 2:
        return None
    first = values.replace_any(draft, switch, True)
    extra: dict[str, Any] = {}
    if reshard is not None:
        extra["reshard_after_forward"] = reshard
    if offload:
        extra["cpu_offload"] = True
    if not extra:
        return first
    holder = draft.root.get("fsdp_config")
    if holder is not None:
        second = draft.editor.add(holder.node, holder, extra)
    else:
        second = draft.editor.add(draft.root, None, {"fsdp_config": extra})
    return (*first, *second) if first is not None and second is not None else None


def _default(draft: Draft, name: str, version: int) -> None:
    defaults: dict[str, Any] = {
        "reshard_after_forward": True if version == 2 else None,
        "wrap_policy": "transformer",
        "wrap_classes": (),
        "min_num_params": None,
        "state_dict_type": "full",
        "cpu_offload": False,
        "cpu_ram_efficient_loading": False,
        "activation_checkpointing": False,
    }
    if name == "reshard_after_forward" and version == 1:
        if draft.get("sharding_strategy") is None:
            draft.set("sharding_strategy", "full_shard")
        return
    if name == "cpu_offload" and draft.environment.get("FSDP_OFFLOAD_PARAMS") is not None:
        # The plugin falls back to the variable when TrainingArguments pass nothing.
        text = draft.environment["FSDP_OFFLOAD_PARAMS"]
        draft.set(name, bool(values.word_of_truth(text)), origin="environment variable FSDP_OFFLOAD_PARAMS")
        draft.report(
            "FSD341", f"cpu_offload is not written; FSDP_OFFLOAD_PARAMS={text} in the environment decides"
        )
        return
    draft.set(name, defaults[name])


def _read_key(draft: Draft, key: str, name: str, entry: Entry, block: Node | None, version: int) -> None:
    value = to_python(entry.node)
    if name == "reshard_after_forward":
        _reshard(draft, entry, block, value, version)
    elif name == "cpu_offload":
        _offload(draft, entry, block, value)
    elif name in ("cpu_ram_efficient_loading", "activation_checkpointing"):
        values.read_boolean(draft, key, name, entry, block)
    elif name == "wrap_policy":
        _policy(draft, entry, block, value)
    elif name == "state_dict_type":
        if value is None:
            draft.set(name, "sharded", entry=entry, parent=block)
            return
        values.read_choice(draft, key, name, entry, block, values.STATE_DICTS, version)
    elif name == "wrap_classes":
        _classes(draft, entry, block, value)
    elif name == "min_num_params":
        _threshold(draft, entry, block, value)


def _reshard(draft: Draft, entry: Entry, block: Node | None, value: Any, version: int) -> None:
    if version == 1:
        strategy = spelling.choice(value, spelling.STRATEGIES) if not isinstance(value, bool) else None
        draft.set("sharding_strategy", strategy or "full_shard", entry=entry, parent=block)
        if strategy is None:
            draft.report("FSD206", f"under version 1 reshard_after_forward is a strategy name, not {value!r}",
                         entry, value=True)  # fmt: skip
        return
    values.read_reshard(draft, entry, block, "reshard_after_forward")


def _offload(draft: Draft, entry: Entry, block: Node | None, value: Any) -> None:
    """transformers tests the value's truth without parsing it."""
    draft.set("cpu_offload", bool(value), entry=entry, parent=block)
    if isinstance(value, bool):
        return
    meant = spelling.boolean(value)
    if meant is None and isinstance(value, dict):
        meant = True
    if meant is None or meant != bool(value):
        draft.report("FSD337", f"cpu_offload is the text {value!r}, which counts as true", entry, value=True,
                     edits=draft.editor.replace(entry.node, meant) if meant is not None else None, safe=False,
                     fix=f"write {str(meant).lower()}", changes={"cpu_offload": meant})  # fmt: skip
    else:
        draft.report("FSD207", f"cpu_offload {value!r} counts as {str(meant).lower()}", entry, value=True,
                     edits=draft.editor.replace(entry.node, meant), fix=f"write {str(meant).lower()}")  # fmt: skip


def _policy(draft: Draft, entry: Entry, block: Node | None, value: Any) -> None:
    written = WRITTEN["wrap_policy"]
    exact = {text: name for name, text in written.items()}
    if value in exact if isinstance(value, str) else False:
        draft.set("wrap_policy", exact[value], entry=entry, parent=block)
        return
    meant = spelling.choice(value, spelling.WRAP_POLICIES)
    draft.set("wrap_policy", meant or "transformer", entry=entry, parent=block)
    if meant is None and "." in str(value):
        draft.report("FSD348", f"auto_wrap_policy {value!r} is a dotted path; no program imports it", entry,
                     value=True)  # fmt: skip
        return
    draft.report("FSD206", f"auto_wrap_policy {value!r} is not one of {', '.join(exact)} (upper case only)", entry,
                 value=True, edits=draft.editor.replace(entry.node, written[meant]) if meant else None,
                 fix=f"write {written[meant]}" if meant else None)  # fmt: skip


def _classes(draft: Draft, entry: Entry, block: Node | None, value: Any) -> None:
    names = spelling.classes(value)
    draft.set("wrap_classes", names or (), entry=entry, parent=block)
    if value is None:
        return
    pieces = ",".join(value).split(",") if isinstance(value, list) and all(
        isinstance(item, str) for item in value) else str(value).split(",")  # fmt: skip
    if isinstance(value, str | list) and all(piece.isidentifier() for piece in pieces):
        return
    if not names:
        draft.report("FSD214", f"{entry.key} {value!r} holds no class names", entry, value=True)
        return
    draft.report("FSD214", f"{entry.key} {value!r} is not split into class names", entry, value=True,
                 edits=values.replace_any(draft, entry, ",".join(names)), fix=f"write {','.join(names)}")  # fmt: skip


def _threshold(draft: Draft, entry: Entry, block: Node | None, value: Any) -> None:
    policy = draft.get("wrap_policy")
    if policy != "size":
        draft.ignore(entry, "read with SIZE_BASED_WRAP only")
        if value not in (0, None):
            draft.report("FSD325", f"{entry.key} is not read: the policy is not SIZE_BASED_WRAP", entry,
                         edits=draft.editor.remove(block, entry) if block else None,
                         fix=f"remove {entry.key}")  # fmt: skip
        return
    if isinstance(value, int) and not isinstance(value, bool):
        draft.set("min_num_params", value, entry=entry, parent=block)
        return
    meant = spelling.integer(value)
    draft.set("min_num_params", meant or 0, entry=entry, parent=block)
    draft.report("FSD213", f"{entry.key} {value!r} is not a whole number", entry, value=True,
                 edits=draft.editor.replace(entry.node, meant) if meant is not None else None,
                 fix=f"write {meant}")  # fmt: skip


def _fsdp1_key(draft: Draft, key: str, entry: Entry | None, block: Node | None, version: int) -> None:
    defaults: dict[str, Any] = {"forward_prefetch": False, "backward_prefetch": None, "use_orig_params": True,
                                "sync_module_states": True}  # fmt: skip
    if entry is None:
        if version == 1 and key in defaults:
            draft.set(key, defaults[key])
        return
    if version == 2:
        draft.ignore(entry, "FSDP1 only; not read under version 2")
        truth = spelling.boolean(entry.node.value)
        if key == "forward_prefetch" and truth:
            draft.report("FSD303", f"{entry.key}: true is lost: transformers drops it under version 2", entry,
                         severity="warning", edits=draft.editor.remove(block, entry) if block else None,
                         safe=True, fix=f"remove {entry.key}", help="remove it")  # fmt: skip
            return
        draft.report("FSD302", f"{entry.key} has no meaning under version 2", entry,
                     edits=draft.editor.remove(block, entry) if block else None,
                     fix=f"remove {entry.key}")  # fmt: skip
        return
    if key == "backward_prefetch":
        text = str(entry.node.value).upper()
        known = {"BACKWARD_PRE": "BACKWARD_PRE", "BACKWARD_POST": "BACKWARD_POST", "NO_PREFETCH": None}
        draft.set(key, known.get(text), entry=entry, parent=block)
        if text not in known:
            draft.report("FSD206", f"{entry.key} {entry.node.value!r} is not BACKWARD_PRE, BACKWARD_POST or "
                         "NO_PREFETCH", entry, value=True)  # fmt: skip
        return
    values.read_boolean(draft, str(entry.key), key, entry, block)


def _strategy(draft: Draft, entry: Entry | None, chosen: dict[str, Entry], block: Node | None,
              version: int) -> None:  # fmt: skip
    """``sharding_strategy`` is never read by TrainingArguments, under either version."""
    if entry is None or block is None:
        return
    draft.ignore(entry, "TrainingArguments never read it; reshard_after_forward decides")
    strategy = spelling.choice(entry.node.value, spelling.STRATEGIES)
    remove = draft.editor.remove(block, entry)
    if version == 1 or strategy == "full_shard" or strategy is None and not entry.node.value:
        draft.report("FSD302", f"{entry.key} is not read by TrainingArguments", entry, edits=remove,
                     fix=f"remove {entry.key}")  # fmt: skip
        return
    if strategy == "shard_grad_op" and draft.get("reshard_after_forward") is not False:
        edits = None
        if "reshard_after_forward" not in chosen:
            renamed = draft.editor.rename(entry, "reshard_after_forward")
            replaced = draft.editor.replace(entry.node, False)
            edits = (*renamed, *replaced) if renamed is not None and replaced is not None else None
        draft.report("FSD303", f"{entry.key} {entry.node.value!r} is ignored: parameters are freed after forward "
                     "all the same", entry, value=True, edits=edits, safe=False,
                     fix="write reshard_after_forward: false",
                     changes={"reshard_after_forward": False})  # fmt: skip
        return
    if strategy == "no_shard":
        draft.report("FSD332", f"{entry.key} {entry.node.value!r} is ignored; NO_SHARD has no FSDP2 equivalent",
                     entry, value=True)  # fmt: skip
        return
    if strategy in ("hybrid_shard", "hybrid_shard_zero2"):
        draft.report("FSD334", f"{entry.key} {entry.node.value!r} is ignored: the run shards over all ranks",
                     entry, value=True)  # fmt: skip
        return
    draft.report("FSD302", f"{entry.key} is not read by TrainingArguments", entry, edits=remove,
                 fix=f"remove {entry.key}")  # fmt: skip


def mapping(settings: FsdpSettings, name: str = NAME) -> dict[str, Any]:
    """Return ``fsdp``, precision and ``fsdp_config`` as TrainingArguments hold them.

    Raises:
        ConfigError: TrainingArguments have no word for a setting.
    """
    check_expressible(settings, name, CANNOT)
    config: dict[str, Any] = {
        "version": 2,
        "reshard_after_forward": settings.reshard_after_forward,
        "auto_wrap_policy": WRITTEN["wrap_policy"][settings.wrap_policy],
    }
    if settings.wrap_classes:
        config["transformer_layer_cls_to_wrap"] = list(settings.wrap_classes)
    if settings.min_num_params is not None:
        config["min_num_params"] = settings.min_num_params
    config["state_dict_type"] = WRITTEN["state_dict_type"][settings.state_dict_type]
    config["cpu_offload"] = settings.cpu_offload
    config["cpu_ram_efficient_loading"] = settings.cpu_ram_efficient_loading
    config["activation_checkpointing"] = settings.activation_checkpointing
    precision = settings.mixed_precision
    if precision == "fp8":
        from fsdptool.errors import ConfigError

        raise ConfigError(f"{name} cannot express mixed_precision = 'fp8'", help="write accelerate instead")
    return {"fsdp": True, "bf16": precision == "bf16", "fp16": precision == "fp16", "fsdp_config": config}


def write(settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
    """Return TrainingArguments as JSON (``HfArgumentParser.parse_json_file`` reads them).

    Raises:
        ConfigError: As :func:`mapping`.
    """
    return json.dumps(mapping(settings), indent=2) + "\n"


def migrate(steps: Rewriter, draft: Draft, target: Target) -> None:
    """Turn FSDP1 settings into FSDP2, in place."""
    block = None if draft.root.get("fsdp_config") is None else "fsdp_config"
    if draft.extras.get("fsdp_entry") is not None and block is None:
        steps.apply(steps.editor.add(steps.root, None, {"fsdp_config": {"version": 2}}), "fsdp_config")
        block = "fsdp_config"
    for key in (*KEYS, "sharding_strategy", *FSDP1_KEYS):
        parent, _ = steps.block(block)
        if parent.kind == "map" and parent.get(f"fsdp_{key}") is not None:
            steps.drop(block, key)
    steps.drop(
        block,
        *FSDP1_KEYS,
        "sharding_strategy",
        *(f"fsdp_{key}" for key in (*FSDP1_KEYS, "sharding_strategy")),
    )
    steps.put(block, "reshard_after_forward", target.reshard, synonyms=("fsdp_reshard_after_forward",))
    steps.put(block, "state_dict_type", WRITTEN["state_dict_type"][target.state_dict],
              synonyms=("fsdp_state_dict_type",))  # fmt: skip
    steps.put(block, "version", 2, synonyms=("fsdp_version",))
    switch = steps.root.get("fsdp") if block is not None else None
    if switch is not None and to_python(switch.node) is not True:
        offload = "offload" in str(to_python(switch.node)).split() or "offload" in (
            to_python(switch.node) or []
        )
        if offload and draft.facts["cpu_offload"].entry is switch or draft.get("cpu_offload"):
            steps.put(block, "cpu_offload", True, synonyms=("fsdp_cpu_offload",))
        switch = steps.root.get("fsdp")
        assert switch is not None
        if switch.node.kind == "scalar" or switch.node.flow:
            steps.apply(steps.editor.replace(switch.node, True), "fsdp")
        else:
            steps.apply(block_list_to_scalar(steps.editor, switch, True), "fsdp")
