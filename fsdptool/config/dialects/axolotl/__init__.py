"""axolotl's YAML: ``fsdp_version`` and ``fsdp_config`` among the training settings.

axolotl 0.19.0 was run for the rules: its own validation (``utils/schemas``), ``setup_fsdp_envs``, and the
TrainingArguments they feed. Its schema drops the keys of ``fsdp_config`` that it does not know, strips
the ``fsdp_`` prefix with a warning, lifts a version inside the block, and compares choices exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import (
    ACCELERATE_ONLY,
    LAUNCH,
    LEGACY_DEFAULTS,
    MESH,
    WRITTEN,
    check_expressible,
    values_written,
)
from fsdptool.config.dialects.accelerate import plugin
from fsdptool.config.dialects.accelerate.launch import report_size
from fsdptool.config.dialects.axolotl.refusals import report_refusals
from fsdptool.config.dialects.protocol import Dialect, LintContext
from fsdptool.config.dialects.trainer.fsdp_config import DEFAULTS, read_threshold
from fsdptool.config.dialects.trainer.switch import strategy_under_1
from fsdptool.config.edits import block_lines
from fsdptool.errors import ConfigError
from fsdptool.files.tree import Entry, Node, effective_entries, to_python
from fsdptool.records.mesh import ParallelDims

if TYPE_CHECKING:
    from fsdptool.config.dialects.protocol import LintContext, Rewriter, Target
    from fsdptool.config.dialects.run_reader import RunFile
    from fsdptool.config.dialects.run_writer import RunWriter
    from fsdptool.files.tree import Node
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.sharding import FsdpSettings

NAME = "axolotl"

KEYS = {
    "reshard_after_forward": "reshard_after_forward",
    "auto_wrap_policy": "wrap_policy",
    "transformer_layer_cls_to_wrap": "wrap_classes",
    "min_num_params": "min_num_params",
    "state_dict_type": "state_dict_type",
    "offload_params": "cpu_offload",
    "cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "activation_checkpointing": "activation_checkpointing",
}
OTHER = frozenset(
    {"cpu_offload_pin_memory", "final_state_dict_type", "mixed_precision_policy", "version", "fsdp_version"}
)
CHOICES = {
    "wrap_policy": {"TRANSFORMER_BASED_WRAP": "transformer", "SIZE_BASED_WRAP": "size"},
    "state_dict_type": {
        "FULL_STATE_DICT": "full",
        "SHARDED_STATE_DICT": "sharded",
        "LOCAL_STATE_DICT": "local",
    },
}
"""The texts that axolotl's schema accepts, with what they mean; the first is its default."""

SIZES = {
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
    "tensor_parallel_size": "tp",
    "context_parallel_size": "cp",
}
CANNOT = (
    *ACCELERATE_ONLY, "cp_comm_strategy", *(name for name in MESH if name not in SIZES.values()), *LAUNCH,
)  # fmt: skip


class Axolotl(Dialect):
    """axolotl's YAML."""

    name = "axolotl"
    consumers = ("axolotl",)
    cannot = CANNOT

    def matches(self, root: Node) -> float:
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

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        read(lint)

    def describe(self, file: RunFile) -> DescribedRun:
        """Return the run of a file."""
        from fsdptool.config.dialects.axolotl.run import describe

        return describe(file)

    def write_run(self, to: RunWriter) -> None:
        """Set the keys of a file."""
        from fsdptool.config.dialects.axolotl.write import write

        write(to, KEYS)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the FSDP part of an axolotl file.

        Raises:
            ConfigError: axolotl cannot express a setting.
        """
        check_expressible(settings, NAME, CANNOT)
        if settings.wrap_policy == "none":
            raise ConfigError("axolotl cannot express wrap_policy = 'none'", help="wrap by class")
        mesh = settings.mesh
        if mesh.dp_shard == 1:
            raise ConfigError("axolotl cannot express dp_shard = 1", help="leave dp_shard open")
        top: dict[str, Any] = {"fsdp_version": 2}
        for key, name in SIZES.items():
            if getattr(mesh, name) != getattr(ParallelDims(), name):
                top[key] = getattr(mesh, name)
        top["fsdp_config"] = values_written(settings, KEYS)
        top["bf16"] = settings.mixed_precision == "bf16"
        top["fp16"] = settings.mixed_precision == "fp16"
        if settings.mixed_precision == "fp8":
            top["fp8"] = True
        return "\n".join([*(f"# {line}" if line else "#" for line in header), *block_lines(top)]) + "\n"

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> dict[str, Any]:
        """Turn FSDP1 settings into FSDP2, in place; return what else changes."""
        block = "fsdp_config"
        entry = steps.root.get(block)
        if entry is None or entry.node.kind != "map":
            values_ = {"reshard_after_forward": target.reshard}
            edits = (
                steps.editor.add(entry.node, entry, values_)
                if entry is not None
                else steps.editor.add(steps.root, None, {block: values_})
            )
            steps.apply(edits, block)
        for key in (*KEYS, *FSDP1):
            parent, _ = steps.block(block)
            if parent.get(key) is not None:
                steps.drop(block, f"fsdp_{key}")
            steps.rename(block, f"fsdp_{key}", key)
        steps.put(block, "reshard_after_forward", target.reshard, synonyms=("sharding_strategy",))
        steps.put(block, "state_dict_type", WRITTEN["state_dict_type"][target.state_dict])
        steps.drop(block, *FSDP1, "fsdp_version", "version")
        steps.drop(None, "fsdp")
        for name, size in target.mesh.items():
            steps.put(None, f"{name}_size", size)
        steps.put(None, "fsdp_version", 2)
        if lint.load_in_4bit and lint.get("cpu_ram_efficient_loading"):
            # axolotl 0.19 refuses the pair under FSDP2: the quantised load on rank 0 deadlocks the scatter.
            steps.put(block, "cpu_ram_efficient_loading", False)
            return {"cpu_ram_efficient_loading": False}
        return {}


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
    _read_fsdp1(lint, chosen, block, version)
    if legacy is not None and has_legacy:
        read_list(lint, legacy, block, chosen, version)
    if version == 1 and lint.get("sharding_strategy") is None:
        strategy_under_1(lint, None)
    refuse(lint, block, version)


def _around(lint: LintContext) -> None:
    root = lint.root
    precision, decides = _precision(root)
    lint.set("mixed_precision", precision, entry=decides)
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


def _precision(root: Node) -> tuple[str, Entry | None]:
    """Return the mixed precision and the entry that decides it, as ``resolve_dtype`` does.

    ``bf16`` is ``auto`` unless the file says otherwise (null does), which is bf16 on every GPU since Ampere;
    ``fp16`` counts before ``auto``.
    """
    written = {key: root.get(key) for key in ("fp8", "bf16", "bfloat16", "fp16", "float16")}
    values = {key: entry.node.value for key, entry in written.items() if entry is not None}
    on = {key for key, value in values.items() if value is True or str(value).lower() in ("full", "true")}
    automatic = str(values.get("bf16", "auto")).lower() == "auto"
    if "fp8" in on:
        return "fp8", written["fp8"]
    if "bf16" in on or (automatic and "fp16" not in on):
        return "bf16", written["bf16"]
    names = {"bfloat16": "bf16", "fp16": "fp16", "float16": "fp16"}
    return next(((names[key], written[key]) for key in names if key in on), ("no", written["bf16"]))


def _version(lint: LintContext, block: Node | None) -> int:
    root = lint.root
    # 0.10 and 0.11 read the version inside fsdp_config only, and drop the key at top level.
    inside = lint.consumer.before(0, 12)
    top = None if inside else root.get("fsdp_version")
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
    if top is None and inner is not None and block is not None and not inside:
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
        if bare in KEYS or bare in OTHER or bare in FSDP1:
            if bare in chosen and block is not None:
                lint.report_removable(
                    "FSD215", f"{chosen[bare].key} and {key} are the same setting", chosen[bare], block
                )
            chosen[bare] = entry
            if key != bare and bare not in FSDP1:
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
            plugin.read_classes(lint, entry, block)
        elif name == "min_num_params":
            _threshold(lint, entry, block)
        elif name in CHOICES:
            _choice(lint, key, name, entry)
        elif name == "reshard_after_forward" and version == 1:
            _reshard_under_1(lint, entry)
        else:
            plugin.read_boolean(lint, key, name, entry)
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
    meant = spelling.near_choice(value, table)
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


def refuse(lint: LintContext, block: Node | None, version: int) -> None:
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
    eight = lint.root.get("load_in_8bit")
    lint.load_in_8bit = eight if eight is not None and eight.node.value is True else None
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


def _dropped(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    lint.ignore(entry, "axolotl's schema has no such field and drops it")
    lint.report_removable(
        "FSD202", f"{key} is not read: axolotl drops it", entry, block, help="remove it", safe=True
    )


def _strategy_under_1(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    strategy = spelling.choice(entry.node.value, spelling.STRATEGIES)
    if strategy in (None, "full_shard"):
        _dropped(lint, key, entry, block)
    else:
        strategy_under_1(lint, strategy, entry)


def _strategy_under_2(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    strategy = spelling.choice(entry.node.value, spelling.STRATEGIES)
    shown = f"{key} {entry.node.value!r}"
    if strategy == "shard_grad_op" and lint.get("reshard_after_forward") is not False:
        lint.report_value("FSD303", f"{shown} is dropped: parameters are freed after forward", entry)
    elif strategy in ("hybrid_shard", "hybrid_shard_zero2") and lint.get("dp_replicate") == 1:
        lint.report_value("FSD334", f"{shown} is dropped: write dp_replicate_size and dp_shard_size", entry)
    elif strategy == "no_shard":
        lint.report_value("FSD332", f"{shown} has no FSDP2 equivalent", entry)
    else:
        plugin.no_effect(lint, key, entry, block)


def _truth_under_1(name: str) -> plugin.LegacyReader:
    def read(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
        if to_python(entry.node) is not None:
            plugin.read_boolean(lint, name, name, entry)

    return read


def _truth_under_2(lint: LintContext, key: str, entry: Entry, block: Node | None) -> None:
    value = to_python(entry.node)
    if value is None or plugin.word_of_truth(value) is not None:
        plugin.no_effect(lint, key, entry, block)
        return
    lint.report_value(
        "FSD206",
        f"{key} must be true or false, not {entry.node.value!r}; axolotl refuses the file",
        entry,
        help="remove it: it has no effect under version 2",
        edits=lint.editor.remove(block, entry),
        fix=f"remove {key}",
    )


FSDP1: Mapping[str, tuple[plugin.LegacyReader, plugin.LegacyReader]] = {
    "sharding_strategy": (_strategy_under_1, _strategy_under_2),
    "backward_prefetch": (_dropped, plugin.no_effect),
    "backward_prefetch_policy": (_dropped, plugin.no_effect),
    "forward_prefetch": (_dropped, plugin.no_effect),
    "use_orig_params": (_truth_under_1("use_orig_params"), _truth_under_2),
    "sync_module_states": (_truth_under_1("sync_module_states"), _truth_under_2),
    "limit_all_gathers": (_dropped, plugin.no_effect),
}
"""Key of FSDP1 to what is made of it under version 1, and what is reported under version 2."""

_UNDER_1 = {
    "backward_prefetch": None,
    "forward_prefetch": False,
    "use_orig_params": True,
    "sync_module_states": True,
}
"""What runs under version 1 where axolotl passes nothing on."""


def _read_fsdp1(lint: LintContext, chosen: Mapping[str, Entry], block: Node | None, version: int) -> None:
    for key, readers in FSDP1.items():
        entry = chosen.get(key)
        if version == 1 and key in _UNDER_1:
            lint.set(key, _UNDER_1[key])
        if entry is not None and version == 2:
            lint.ignore(entry, "FSDP1 only; axolotl drops it under version 2")
        unwritten = (
            version == 1 and _UNDER_1.get(key) is True and entry is not None and to_python(entry.node) is None
        )
        if entry is not None and not unwritten:
            readers[version - 1](lint, str(entry.key), entry, block)
    if version == 1 and lint.get("cpu_ram_efficient_loading"):
        lint.set("sync_module_states", True)  # the plugin sets it, with a warning
