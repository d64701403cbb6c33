"""axolotl's YAML: ``fsdp_version`` and ``fsdp_config`` among the training settings.

Source, read and not run: axolotl ``utils/schemas/fsdp.py`` and ``utils/trainer.py:setup_fsdp_envs``.
Unknown keys of ``fsdp_config`` are dropped by its schema; the ``fsdp_`` prefix and a version inside
the block are accepted with a warning.
"""

from __future__ import annotations

from typing import Any

from fsdptool.config import spelling
from fsdptool.config.dialects import accelerate_values as values
from fsdptool.config.dialects.axolotl_keys import FSDP1_KEYS, KEYS, NAME, OTHER, SIZES
from fsdptool.config.dialects.axolotl_write import migrate, write
from fsdptool.config.draft import Draft
from fsdptool.config.tree import Entry, Node, effective_entries, to_python


def matches(root: Node) -> float:
    """Return how surely the mapping is axolotl's."""
    keys = {str(entry.key) for entry in root.entries}
    if "base_model" in keys and keys & {
        "datasets",
        "micro_batch_size",
        "sequence_len",
        "adapter",
        "fsdp_config",
        "output_dir",
        "fsdp_version",
        "chat_template",
    }:
        return 1.0
    if {"fsdp_version", "fsdp_config"} <= keys and "fsdp" not in keys:
        return 0.96
    own = keys & {
        "sequence_len",
        "sample_packing",
        "micro_batch_size",
        "dp_shard_size",
        "tensor_parallel_size",
    }
    return 0.95 if len(own) >= 2 or (own and "fsdp_config" in keys) else 0.0


def read(draft: Draft) -> None:
    """Read axolotl's keys into facts."""
    root = draft.root
    draft.extras["names"] = {canonical: key for key, canonical in (*KEYS.items(), *SIZES.items())} | {
        "fsdp_version": "fsdp_version"
    }
    entry = root.get("fsdp_config")
    block = entry.node if entry is not None and entry.node.kind == "map" and entry.node.entries else None
    draft.extras["fsdp_entry"] = entry
    _around(draft)
    legacy = root.get("fsdp")
    has_legacy = legacy is not None and bool(to_python(legacy.node))
    deepspeed = root.get("deepspeed")
    if deepspeed is not None and to_python(deepspeed.node):
        draft.extras["deepspeed"] = True
    if block is None and not has_legacy:
        draft.runs_fsdp = False
        draft.extras["configures"] = False
        draft.report("FSD113", "the file does not configure FSDP", entry)
        if (draft.get("cp") or 1) > 1 and not draft.extras.get("deepspeed"):
            # accelerate would refuse; axolotl sets ACCELERATE_ALLOW_CP_STANDALONE and goes on with replicas.
            draft.report(
                "FSD305",
                "Context parallelism requires FSDP2.",
                root.get("context_parallel_size"),
                severity="warning",
                help="axolotl runs replicas instead; configure FSDP2 to shard",
            )
        return
    version = _version(draft, block)
    if has_legacy:
        _legacy_list(draft, legacy, version)
    _block(draft, block, version)


def _around(draft: Draft) -> None:
    root = draft.root
    for key in ("fp8", "bf16", "bfloat16", "fp16", "float16"):
        entry = root.get(key)
        if entry is not None and (
            entry.node.value is True or str(entry.node.value).lower() in ("auto", "full", "true")
        ):
            name = {"bfloat16": "bf16", "float16": "fp16"}.get(key, key)
            draft.set("mixed_precision", name, entry=entry, parent=root)
            break
    else:
        draft.set("mixed_precision", "no")
    checkpointing = root.get("gradient_checkpointing")
    if checkpointing is not None and checkpointing.node.value is True:
        draft.extras["gradient_checkpointing"] = (root, checkpointing)
    for key, name in SIZES.items():
        entry = root.get(key)
        if entry is None or entry.node.value is None:
            draft.set(name, None if name == "dp_shard" else 1)
            continue
        size = spelling.integer(entry.node.value)
        if size is None or size < 1:
            draft.report(
                "FSD306" if name == "cp" else "FSD205",
                f"{key} must be a whole number of at least 1, not {entry.node.value!r}",
                entry,
                value=True,
            )
            size = 1
        # axolotl exports sizes above 1 only: a written dp_shard_size of 1 leaves the dimension to the rest.
        draft.set(name, None if name == "dp_shard" and size == 1 else size, entry=entry, parent=root)


def _version(draft: Draft, block: Node | None) -> int:
    root = draft.root
    top = root.get("fsdp_version")
    inner = None
    if block is not None:
        inner = block.get("fsdp_version") or block.get("version")
    entry, parent = (top, root) if top is not None else (inner, block)
    if entry is None:
        draft.set("fsdp_version", 1)
        return 1
    meant = spelling.integer(entry.node.value)
    if meant not in (1, 2):
        draft.report("FSD206", f"fsdp_version must be 1 or 2, not {entry.node.value!r}", entry, value=True)
        meant = 2
    draft.set("fsdp_version", meant, entry=entry, parent=parent)
    if top is None and inner is not None and block is not None:
        removed = draft.editor.remove(block, inner)
        added = draft.editor.add(root, None, {"fsdp_version": meant}) if len(block.entries) > 1 else None
        edits = (*removed, *added) if removed is not None and added is not None else None
        draft.report(
            "FSD210",
            "fsdp_version belongs at top level; axolotl lifts it",
            inner,
            severity="warning",
            edits=edits,
            safe=True,
            fix="move fsdp_version to the top level",
        )
    return meant


def _legacy_list(draft: Draft, entry: Entry | None, version: int) -> None:
    if entry is None:
        return
    value = to_python(entry.node)
    items = (
        value.split()
        if isinstance(value, str)
        else [str(item) for item in value]
        if isinstance(value, list)
        else []
    )
    for item in items:
        strategy = spelling.choice(item, spelling.STRATEGIES)
        if strategy is not None and version == 1:
            draft.set("sharding_strategy", strategy, entry=entry, parent=draft.root)
    removable = version == 2 and set(items) <= {"full_shard", "auto_wrap"}
    draft.report(
        "FSD339",
        "fsdp: is the legacy list; axolotl reads fsdp_version and fsdp_config",
        entry,
        help="remove it; fsdp_config alone switches FSDP on",
        edits=draft.editor.remove(draft.root, entry)
        if removable and draft.root.get("fsdp_config") is not None
        else None,
        fix="remove fsdp",
    )


def _block(draft: Draft, block: Node | None, version: int) -> None:
    chosen: dict[str, Entry] = {}
    for entry in effective_entries(block) if block is not None else ():
        key = str(entry.key)
        bare = key.removeprefix("fsdp_")
        if key in OTHER:
            continue
        if bare in KEYS or bare in OTHER or bare in FSDP1_KEYS:
            if bare in chosen and block is not None:
                draft.report(
                    "FSD215",
                    f"{chosen[bare].key} and {key} are one setting",
                    chosen[bare],
                    edits=draft.editor.remove(block, chosen[bare]),
                    fix=f"remove {chosen[bare].key}",
                )
            chosen[bare] = entry
            if key != bare and bare not in FSDP1_KEYS:
                draft.report(
                    "FSD204",
                    f"{key} carries the old prefix; axolotl strips it",
                    entry,
                    edits=draft.editor.rename(entry, bare),
                    fix=f"write {bare}",
                    help="write it without fsdp_ (--fix: the run stays the same)",
                )
        elif block is not None:
            _unknown(draft, block, entry, bare)
    _keys(draft, block, chosen, version)
    for key in FSDP1_KEYS:
        if key in chosen:
            _fsdp1(draft, key, chosen[key], block, version)
    if version == 1 and draft.get("sharding_strategy") is None:
        draft.set("sharding_strategy", "full_shard")


def _keys(draft: Draft, block: Node | None, chosen: dict[str, Entry], version: int) -> None:
    for key, name in KEYS.items():
        found = chosen.get(key)
        if found is None or to_python(found.node) is None:
            _default(draft, name, version)
        elif name == "wrap_classes":
            values.read_classes(draft, found, block)
        elif name == "min_num_params":
            meant = spelling.integer(found.node.value)
            draft.set(name, meant, entry=found, parent=block)
            if meant != found.node.value:
                draft.report(
                    "FSD213",
                    f"min_num_params {found.node.value!r} is not a whole number",
                    found,
                    value=True,
                    edits=draft.editor.replace(found.node, meant) if meant else None,
                    fix=f"write {meant}",
                )
        elif name in ("wrap_policy", "state_dict_type"):
            table = values.POLICIES if name == "wrap_policy" else values.STATE_DICTS
            values.read_choice(draft, key, name, found, block, table, version)
        else:
            values.read_boolean(draft, key, name, found, block)


def _unknown(draft: Draft, block: Node, entry: Entry, bare: str) -> None:
    near = spelling.nearest(bare, KEYS, cutoff=0.8)
    draft.ignore(entry, "axolotl's schema has no such field and drops it")
    if near is not None and block.get(near) is None and block.get(f"fsdp_{near}") is None:
        draft.report(
            "FSD202",
            f"{entry.key} is not read: did you mean {near}?",
            entry,
            edits=draft.editor.rename(entry, near),
            safe=False,
            fix=f"rename it to {near}",
            changes={KEYS[near]: entry.node.value},
        )
    else:
        draft.report(
            "FSD202",
            f"{entry.key} is not read by axolotl",
            entry,
            help="remove it",
            edits=draft.editor.remove(block, entry),
            safe=True,
            fix=f"remove {entry.key}",
        )


def _default(draft: Draft, name: str, version: int) -> None:
    defaults: dict[str, Any] = {
        "reshard_after_forward": True if version == 2 else None,
        "wrap_policy": "transformer",
        "wrap_classes": (),
        "min_num_params": None,
        "state_dict_type": "full" if version == 1 else "sharded",
        "cpu_offload": False,
        "cpu_ram_efficient_loading": False,
        "activation_checkpointing": False,
    }
    if name != "reshard_after_forward" or version == 2:
        draft.set(name, defaults[name])


def _fsdp1(draft: Draft, key: str, entry: Entry, block: Node | None, version: int) -> None:
    remove = draft.editor.remove(block, entry) if block is not None else None
    strategy = spelling.choice(entry.node.value, spelling.STRATEGIES) if key == "sharding_strategy" else None
    if version == 1 and key != "backward_prefetch_policy":
        if strategy is not None:
            draft.set("sharding_strategy", strategy, entry=entry, parent=block)
        elif key in ("use_orig_params", "sync_module_states", "forward_prefetch"):
            draft.set(key, bool(spelling.boolean(entry.node.value)), entry=entry, parent=block)
        return
    draft.ignore(entry, "FSDP1 only; axolotl drops it under version 2")
    if strategy == "shard_grad_op" and draft.get("reshard_after_forward") is not False:
        draft.report(
            "FSD303",
            f"{entry.key} {entry.node.value!r} is dropped: parameters are freed after forward",
            entry,
            value=True,
        )
    elif strategy in ("hybrid_shard", "hybrid_shard_zero2") and draft.get("dp_replicate") == 1:
        draft.report(
            "FSD334",
            f"{entry.key} {entry.node.value!r} is dropped: write dp_replicate_size and dp_shard_size",
            entry,
            value=True,
        )
    elif strategy == "no_shard":
        draft.report("FSD332", f"{entry.key} {entry.node.value!r} has no FSDP2 equivalent", entry, value=True)
    else:
        draft.report(
            "FSD302",
            f"{entry.key} has no meaning under version 2",
            entry,
            edits=remove,
            fix=f"remove {entry.key}",
        )


__all__ = ["NAME", "matches", "migrate", "read", "write"]
