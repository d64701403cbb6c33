"""axolotl's YAML: ``fsdp_version`` and ``fsdp_config`` among the training settings.

axolotl 0.19.0 was run for the rules: its own validation (``utils/schemas``), ``setup_fsdp_envs``, and the
TrainingArguments they feed. Its schema drops the keys of ``fsdp_config`` that it does not know, strips
the ``fsdp_`` prefix with a warning, lifts a version inside the block, and compares choices exactly.
"""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.dialects import accelerate_values as values
from fsdptool.config.dialects.accelerate_mesh import report_size
from fsdptool.config.dialects.axolotl_keys import CANNOT, CHOICES, FSDP1_KEYS, KEYS, NAME, OTHER, SIZES
from fsdptool.config.dialects.axolotl_legacy import read_fsdp1, read_list, refuse
from fsdptool.config.dialects.axolotl_write import migrate, write
from fsdptool.config.dialects.trainer_values import read_threshold, strategy_under_1
from fsdptool.config.draft import Draft
from fsdptool.config.facts import LEGACY_DEFAULTS
from fsdptool.files.tree import Entry, Node, effective_entries, to_python


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
            # axolotl patches accelerate for this case and sets ACCELERATE_ALLOW_CP_STANDALONE.
            draft.report(
                "FSD305",
                "context parallelism without FSDP: axolotl runs it, and every rank holds the whole model",
                root.get("context_parallel_size"),
                severity="info",
                help="nothing needs to be done; fsdp_version and fsdp_config would shard the model, too",
            )
        return
    version = _version(draft, block)
    chosen = _chosen(draft, block)
    _keys(draft, block, chosen, version)
    for key in FSDP1_KEYS:
        read_fsdp1(draft, key, chosen.get(key), block, version)
    if legacy is not None and has_legacy:
        read_list(draft, legacy, block, chosen, version)
    if version == 1 and draft.get("sharding_strategy") is None:
        strategy_under_1(draft, None)
    refuse(draft, block, chosen, version)


def _around(draft: Draft) -> None:
    root = draft.root
    for key in ("fp8", "bf16", "bfloat16", "fp16", "float16"):
        entry = root.get(key)
        if entry is not None and (
            entry.node.value is True or str(entry.node.value).lower() in ("auto", "full", "true")
        ):
            name = {"bfloat16": "bf16", "float16": "fp16"}.get(key, key)
            draft.set("mixed_precision", name, entry=entry)
            break
    else:
        draft.set("mixed_precision", "no")
    checkpointing = root.get("gradient_checkpointing")
    offloading = root.get("activation_offloading")
    own = offloading is not None and offloading.node.value not in (None, False, "hidden_states")
    # With activation_offloading axolotl passes gradient_checkpointing on as false and offloads by itself.
    if checkpointing is not None and checkpointing.node.value is True and not own:
        draft.extras["gradient_checkpointing"] = checkpointing
    for key, name in SIZES.items():
        entry = root.get(key)
        if entry is None or entry.node.value is None:
            draft.set(name, None if name == "dp_shard" else 1)
            continue
        size = spelling.integer(entry.node.value)
        if size is None or size < 1:
            report_size(draft, key, name, entry)
            size = 1
        # axolotl exports sizes above 1 only: a written dp_shard_size of 1 leaves the dimension to the rest.
        draft.set(name, None if name == "dp_shard" and size == 1 else size, entry=entry)


def _version(draft: Draft, block: Node | None) -> int:
    root = draft.root
    top = root.get("fsdp_version")
    inner = None
    if block is not None:
        inner = block.get("fsdp_version") or block.get("version")
    entry = top if top is not None else inner
    if entry is None:
        draft.set("fsdp_version", 1)
        return 1
    value = entry.node.value
    meant = spelling.integer(value)
    if meant not in (1, 2) or not (isinstance(value, int) or str(value).strip().isdecimal()):
        draft.report_value(
            "FSD206", f"fsdp_version must be 1 or 2, not {value!r}", entry, meant if meant in (1, 2) else None
        )
        meant = meant if meant in (1, 2) else 2
    draft.set("fsdp_version", meant, entry=entry)
    both = block.get("fsdp_version") if block is not None and top is not None else None
    if both is not None:
        _twice(draft, block, both, meant)
    if top is None and inner is not None and block is not None:
        removed = draft.editor.remove(block, inner)
        added = draft.editor.add(root, None, {"fsdp_version": meant}) if len(block.entries) > 1 else None
        edits = (*removed, *added) if removed is not None and added is not None else None
        draft.report(
            "FSD210",
            "fsdp_version stands inside fsdp_config; axolotl lifts it",
            inner,
            severity="info",
            help="nothing needs to be done; axolotl's own pages write it at top level (--fix moves it)",
            edits=edits,
            safe=True,
            fix="move fsdp_version to the top level",
        )
    return meant


def _twice(draft: Draft, block: Node | None, inner: Entry, outer: int) -> None:
    same = spelling.integer(inner.node.value) == outer
    draft.report(
        "FSD215",
        "fsdp_version is written twice"
        + ("" if same else ": axolotl follows the one at top level, transformers the one in fsdp_config"),
        inner,
        severity=None if same else "error",
        help=None if same else "keep one of them",
        edits=draft.editor.remove(block, inner) if same and block is not None else None,
        fix="remove the one inside fsdp_config",
    )


def _chosen(draft: Draft, block: Node | None) -> dict[str, Entry]:
    """Return the entries that count, by their names without prefix; report the others."""
    chosen: dict[str, Entry] = {}
    for entry in effective_entries(block) if block is not None else ():
        key = str(entry.key)
        bare = key.removeprefix("fsdp_")
        if key in OTHER:
            continue
        if bare in KEYS or bare in OTHER or bare in FSDP1_KEYS:
            if bare in chosen and block is not None:
                draft.report_removable(
                    "FSD215", f"{chosen[bare].key} and {key} are one setting", chosen[bare], block
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
    return chosen


def _keys(draft: Draft, block: Node | None, chosen: dict[str, Entry], version: int) -> None:
    for key, name in KEYS.items():
        found = chosen.get(key)
        if found is None or to_python(found.node) is None:
            _default(draft, name, version)
        elif name == "wrap_classes":
            values.read_classes(draft, found, block)
        elif name == "min_num_params":
            _threshold(draft, found, block)
        elif name in CHOICES:
            _choice(draft, key, name, found)
        elif name == "reshard_after_forward" and version == 1:
            _reshard_under_1(draft, found)
        else:
            values.read_boolean(draft, key, name, found)
    size = draft.get("wrap_policy") == "size"
    if size and (draft.get("min_num_params") or 0) < 1 and not draft.has("FSD213"):
        draft.report(
            "FSD212",
            "SIZE_BASED_WRAP needs min_num_params of at least 1; axolotl refuses the file",
            chosen.get("auto_wrap_policy"),
            help="write min_num_params, or wrap by class",
        )


def _threshold(draft: Draft, entry: Entry, block: Node | None) -> None:
    """axolotl's schema looks at the number under every policy: whole, and at least 1."""
    written = str(entry.node.value)
    if (written.isdecimal() and (spelling.integer(written) or 0) >= 1) or draft.get("wrap_policy") == "size":
        read_threshold(draft, entry, block, to_python(entry.node))
        return
    draft.set("min_num_params", None)
    draft.report(
        "FSD206",
        f"{entry.key} must be a whole number above 0, not {entry.node.value!r}; axolotl refuses the file",
        entry,
        value=True,
        help="remove it: it counts with SIZE_BASED_WRAP only",
        edits=draft.editor.remove(block, entry),
        safe=True,
        fix=f"remove {entry.key}",
    )


def _choice(draft: Draft, key: str, name: str, entry: Entry) -> None:
    """A choice that axolotl's schema compares exactly."""
    allowed = CHOICES[name]
    value = to_python(entry.node)
    if isinstance(value, str) and value in allowed:
        draft.set(name, allowed[value], entry=entry)
        return
    table = spelling.WRAP_POLICIES if name == "wrap_policy" else spelling.STATE_DICT_TYPES
    meant = spelling.choice(value, table)
    written = next((text for text, canonical in allowed.items() if canonical == meant), None)
    draft.set(name, meant or next(iter(allowed.values())), entry=entry)
    draft.report_value(
        "FSD206",
        f"{key} {value!r} is not one of {', '.join(allowed)}; axolotl refuses the file",
        entry,
        written,
    )


def _reshard_under_1(draft: Draft, entry: Entry) -> None:
    """A boolean that transformers hands to FSDP1 as the name of a strategy."""
    meant = spelling.boolean(entry.node.value)
    top = draft.root.get("fsdp_version")
    inner = draft.facts["fsdp_version"].entry if top is None else top
    edits = (
        draft.editor.replace(inner.node, 2)
        if inner is not None
        else draft.editor.add(draft.root, None, {"fsdp_version": 2})
    )
    draft.set("sharding_strategy", "shard_grad_op" if meant is False else "full_shard", entry=entry)
    draft.report(
        "FSD206",
        f"reshard_after_forward is FSDP2's; version 1 stops at it: KeyError '{str(meant).upper()}'",
        entry,
        help="write fsdp_version: 2 (--unsafe-fixes), or remove the key",
        edits=edits,
        safe=False,
        fix="write fsdp_version: 2",
        changes={"fsdp_version": 2, "*": True, **dict.fromkeys(LEGACY_DEFAULTS)},
    )


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
        draft.report_removable(
            "FSD202", f"{entry.key} is not read by axolotl", entry, block, help="remove it", safe=True
        )


def _default(draft: Draft, name: str, version: int) -> None:
    defaults: dict[str, Any] = {
        "reshard_after_forward": True if version == 2 else None,
        "wrap_policy": "transformer",
        "wrap_classes": (),
        "min_num_params": None,
        "state_dict_type": "full",  # what TrainingArguments pass when nothing is written
        "cpu_offload": False,
        "cpu_ram_efficient_loading": False,
        "activation_checkpointing": False,
    }
    if name != "reshard_after_forward" or version == 2:
        draft.set(name, defaults[name])


__all__ = ["CANNOT", "NAME", "matches", "migrate", "read", "write"]
