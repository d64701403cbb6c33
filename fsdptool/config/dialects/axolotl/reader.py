"""axolotl's YAML: ``fsdp_version`` and ``fsdp_config`` among the training settings.

axolotl 0.19.0 was run for the rules: its own validation (``utils/schemas``), ``setup_fsdp_envs``, and the
TrainingArguments they feed. Its schema drops the keys of ``fsdp_config`` that it does not know, strips
the ``fsdp_`` prefix with a warning, lifts a version inside the block, and compares choices exactly.
"""

from __future__ import annotations

from fsdptool import spelling
from fsdptool.config.canonical import LEGACY_DEFAULTS
from fsdptool.config.context import LintContext
from fsdptool.config.dialects.accelerate import values
from fsdptool.config.dialects.accelerate.launch import report_size
from fsdptool.config.dialects.axolotl import CHOICES, FSDP1_KEYS, KEYS, OTHER, SIZES
from fsdptool.config.dialects.axolotl.fsdp1 import read_fsdp1, read_list, refuse
from fsdptool.config.dialects.axolotl.refusals import report_refusals
from fsdptool.config.dialects.trainer.values import DEFAULTS, read_threshold, strategy_under_1
from fsdptool.files.tree import Entry, Node, effective_entries, to_python


def read(lint: LintContext) -> None:
    """Read axolotl's keys into facts."""
    root = lint.root
    lint.names = {canonical: key for key, canonical in (*KEYS.items(), *SIZES.items())} | {
        "fsdp_version": "fsdp_version"
    }
    entry = root.get("fsdp_config")
    block = entry.node if entry is not None and entry.node.kind == "map" and entry.node.entries else None
    lint.fsdp_entry = entry
    _around(lint)
    report_refusals(lint)
    legacy = root.get("fsdp")
    has_legacy = legacy is not None and bool(to_python(legacy.node))
    deepspeed = root.get("deepspeed")
    if deepspeed is not None and to_python(deepspeed.node):
        lint.deepspeed = True
    if block is None and not has_legacy:
        lint.runs_fsdp = False
        lint.configures_fsdp = False
        lint.report("FSD113", "the file does not configure FSDP", entry)
        if (lint.get("cp") or 1) > 1 and not lint.deepspeed:
            # axolotl patches accelerate for this case and sets ACCELERATE_ALLOW_CP_STANDALONE.
            lint.report(
                "FSD305",
                "context parallelism without FSDP: axolotl supports it, but every rank holds the whole model",
                root.get("context_parallel_size"),
                severity="info",
                help="no action is needed; fsdp_version and fsdp_config would also shard the model",
            )
        return
    version = _version(lint, block)
    chosen = _chosen(lint, block)
    _keys(lint, block, chosen, version)
    for key in FSDP1_KEYS:
        read_fsdp1(lint, key, chosen.get(key), block, version)
    if legacy is not None and has_legacy:
        read_list(lint, legacy, block, chosen, version)
    if version == 1 and lint.get("sharding_strategy") is None:
        strategy_under_1(lint, None)
    refuse(lint, block, chosen, version)


def _around(lint: LintContext) -> None:
    root = lint.root
    for key in ("fp8", "bf16", "bfloat16", "fp16", "float16"):
        entry = root.get(key)
        if entry is not None and (
            entry.node.value is True or str(entry.node.value).lower() in ("auto", "full", "true")
        ):
            name = {"bfloat16": "bf16", "float16": "fp16"}.get(key, key)
            lint.set("mixed_precision", name, entry=entry)
            break
    else:
        lint.set("mixed_precision", "no")
    checkpointing = root.get("gradient_checkpointing")
    offloading = root.get("activation_offloading")
    own = offloading is not None and offloading.node.value not in (None, False, "hidden_states")
    # With activation_offloading axolotl passes gradient_checkpointing on as false and offloads by itself.
    if checkpointing is not None and checkpointing.node.value is True and not own:
        lint.gradient_checkpointing = checkpointing
    for key, name in SIZES.items():
        entry = root.get(key)
        if entry is None or entry.node.value is None:
            lint.set(name, None if name == "dp_shard" else 1)
            continue
        size = spelling.integer(entry.node.value)
        if size is None or size < 1:
            report_size(lint, key, name, entry)
            size = 1
        # axolotl exports sizes above 1 only: a written dp_shard_size of 1 leaves the dimension to the rest.
        lint.set(name, None if name == "dp_shard" and size == 1 else size, entry=entry)


def _version(lint: LintContext, block: Node | None) -> int:
    root = lint.root
    top = root.get("fsdp_version")
    inner = None
    if block is not None:
        inner = block.get("fsdp_version") or block.get("version")
    entry = top if top is not None else inner
    if entry is None:
        lint.set("fsdp_version", 1)
        return 1
    value = entry.node.value
    meant = spelling.integer(value)
    if meant not in (1, 2) or not (isinstance(value, int) or str(value).strip().isdecimal()):
        lint.report_value(
            "FSD206", f"fsdp_version must be 1 or 2, not {value!r}", entry, meant if meant in (1, 2) else None
        )
        meant = meant if meant in (1, 2) else 2
    lint.set("fsdp_version", meant, entry=entry)
    both = block.get("fsdp_version") if block is not None and top is not None else None
    if both is not None:
        _twice(lint, block, both, meant)
    if top is None and inner is not None and block is not None:
        removed = lint.editor.remove(block, inner)
        added = lint.editor.add(root, None, {"fsdp_version": meant}) if len(block.entries) > 1 else None
        edits = (*removed, *added) if removed is not None and added is not None else None
        lint.report(
            "FSD210",
            "fsdp_version is inside fsdp_config; axolotl moves it to the top level",
            inner,
            severity="info",
            help="no action is needed; axolotl's documentation writes it at top level",
            edits=edits,
            safe=True,
            fix="move fsdp_version to the top level",
        )
    return meant


def _twice(lint: LintContext, block: Node | None, inner: Entry, outer: int) -> None:
    same = spelling.integer(inner.node.value) == outer
    lint.report(
        "FSD215",
        "fsdp_version is written twice"
        + ("" if same else ": axolotl follows the one at top level, transformers the one in fsdp_config"),
        inner,
        severity=None if same else "error",
        help=None if same else "keep one of them",
        edits=lint.editor.remove(block, inner) if same and block is not None else None,
        fix="remove the one inside fsdp_config",
    )


def _chosen(lint: LintContext, block: Node | None) -> dict[str, Entry]:
    """Return the entries that count, by their names without prefix; report the others."""
    chosen: dict[str, Entry] = {}
    for entry in effective_entries(block) if block is not None else ():
        key = str(entry.key)
        bare = key.removeprefix("fsdp_")
        if key in OTHER:
            continue
        if bare in KEYS or bare in OTHER or bare in FSDP1_KEYS:
            if bare in chosen and block is not None:
                lint.report_removable(
                    "FSD215", f"{chosen[bare].key} and {key} are the same setting", chosen[bare], block
                )
            chosen[bare] = entry
            if key != bare and bare not in FSDP1_KEYS:
                lint.report(
                    "FSD204",
                    f"{key} has the old prefix; axolotl strips it",
                    entry,
                    edits=lint.editor.rename(entry, bare),
                    fix=f"write {bare}",
                    help="no action is needed; axolotl's documentation writes it without fsdp_",
                )
        elif block is not None:
            _unknown(lint, block, entry, bare)
    return chosen


def _keys(lint: LintContext, block: Node | None, chosen: dict[str, Entry], version: int) -> None:
    for key, name in KEYS.items():
        entry = chosen.get(key)
        if entry is None or to_python(entry.node) is None:
            if name != "reshard_after_forward" or version == 2:
                lint.set(name, DEFAULTS[name])
        elif name == "wrap_classes":
            values.read_classes(lint, entry, block)
        elif name == "min_num_params":
            _threshold(lint, entry, block)
        elif name in CHOICES:
            _choice(lint, key, name, entry)
        elif name == "reshard_after_forward" and version == 1:
            _reshard_under_1(lint, entry)
        else:
            values.read_boolean(lint, key, name, entry)
    size = lint.get("wrap_policy") == "size"
    if size and (lint.get("min_num_params") or 0) < 1 and not lint.has("FSD213"):
        lint.report(
            "FSD212",
            "SIZE_BASED_WRAP requires min_num_params of at least 1; axolotl refuses the file",
            chosen.get("auto_wrap_policy"),
            help="write min_num_params, or wrap by class",
        )


def _threshold(lint: LintContext, entry: Entry, block: Node | None) -> None:
    """axolotl's schema looks at the number under every policy: whole, and at least 1."""
    written = str(entry.node.value)
    if (written.isdecimal() and (spelling.integer(written) or 0) >= 1) or lint.get("wrap_policy") == "size":
        read_threshold(lint, entry, block, to_python(entry.node))
        return
    lint.set("min_num_params", None)
    lint.report_value(
        "FSD206",
        f"{entry.key} must be a whole number above 0, not {entry.node.value!r}; axolotl refuses the file",
        entry,
        help="remove it: it is read with SIZE_BASED_WRAP only",
        edits=lint.editor.remove(block, entry),
        safe=True,
        fix=f"remove {entry.key}",
    )


def _choice(lint: LintContext, key: str, name: str, entry: Entry) -> None:
    """A choice that axolotl's schema compares exactly."""
    allowed = CHOICES[name]
    value = to_python(entry.node)
    if isinstance(value, str) and value in allowed:
        lint.set(name, allowed[value], entry=entry)
        return
    table = spelling.WRAP_POLICIES if name == "wrap_policy" else spelling.STATE_DICT_TYPES
    meant = spelling.choice(value, table)
    written = next((text for text, canonical in allowed.items() if canonical == meant), None)
    lint.set(name, meant or next(iter(allowed.values())), entry=entry)
    lint.report_value(
        "FSD206",
        f"{key} {value!r} is not one of {', '.join(allowed)}; axolotl refuses the file",
        entry,
        written,
    )


def _reshard_under_1(lint: LintContext, entry: Entry) -> None:
    """A boolean that transformers hands to FSDP1 as the name of a strategy."""
    meant = spelling.boolean(entry.node.value)
    top = lint.root.get("fsdp_version")
    inner = lint.facts["fsdp_version"].entry if top is None else top
    edits = (
        lint.editor.replace(inner.node, 2)
        if inner is not None
        else lint.editor.add(lint.root, None, {"fsdp_version": 2})
    )
    lint.set("sharding_strategy", "shard_grad_op" if meant is False else "full_shard", entry=entry)
    lint.report(
        "FSD206",
        f"reshard_after_forward belongs to FSDP2; version 1 fails on it: KeyError '{str(meant).upper()}'",
        entry,
        help="write fsdp_version: 2, or remove the key",
        edits=edits,
        safe=False,
        fix="write fsdp_version: 2",
        changes={"fsdp_version": 2, "*": True, **dict.fromkeys(LEGACY_DEFAULTS)},
    )


def _unknown(lint: LintContext, block: Node, entry: Entry, bare: str) -> None:
    near = spelling.nearest(bare, KEYS, cutoff=0.8)
    lint.ignore(entry, "axolotl's schema has no such field and drops it")
    if near is not None and block.get(near) is None and block.get(f"fsdp_{near}") is None:
        lint.report_renamed(
            "FSD202",
            f"{entry.key} is not read: did you mean {near}?",
            entry,
            near,
            fix=f"rename it to {near}",
            changes={KEYS[near]: entry.node.value},
        )
    else:
        lint.report_removable(
            "FSD202", f"{entry.key} is not read by axolotl", entry, block, help="remove it", safe=True
        )
