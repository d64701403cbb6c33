"""The rules on meaning: what the settings do together, for the consumer of the file.

Each function looks at the facts of a file and reports; the dialects have reported keys and values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import WRITTEN
from fsdptool.config.checks.mesh import check_mesh, check_processes, launched_by_accelerate
from fsdptool.config.context import LintContext

if TYPE_CHECKING:
    from fsdptool.config.checks.hardware import Hardware
    from fsdptool.records.anatomy import Anatomy

_LEAVES = frozenset([
    "Linear", "Conv1d", "Conv2d", "Conv3d", "LayerNorm", "RMSNorm", "GroupNorm", "Dropout", "Embedding",
    "Identity", "SiLU", "GELU",
])  # fmt: skip
_ONCE = ("Pooler", "Pooling", "Head")
_WHOLE = (
    "ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification", "ForMaskedLM",
    "ForTokenClassification", "ForQuestionAnswering", "LMHeadModel", "Pipeline",
)  # fmt: skip


def check_meaning(
    lint: LintContext, *, model: Anatomy | None = None, hardware: Hardware | None = None
) -> None:
    """Report what the facts of a file mean together.

    Args:
        lint: A file whose dialect has been read.
        model: The model, for the family ``model``.
        hardware: GPUs and hosts, for the family ``hardware``.
    """
    if not lint.consumer.checked:
        lint.report("FSD354", f"checked for {lint.consumer}; the rules were verified with another version")
    if not lint.configures_fsdp:
        return
    _conflicts(lint)
    if not lint.runs_fsdp:
        return
    _target(lint)
    _version(lint)
    check_mesh(lint)
    _wrapping(lint)
    _checkpointing(lint)
    _loading(lint)
    _compilation(lint)
    check_processes(lint)
    _defaults(lint)
    lint.withhold_dependent_fixes()
    if model is not None:
        from fsdptool.config.checks.model import check_model

        check_model(lint, model)
    if hardware is not None:
        from fsdptool.config.checks.hardware import check_hardware

        check_hardware(lint, hardware)


def _conflicts(lint: LintContext) -> None:
    kind, block = lint.distributed_type, lint.fsdp_block
    filled = block is not None and bool(block.entries)
    if lint.deepspeed and (lint.runs_fsdp or (filled and kind in ("FSDP", "DEEPSPEED", None))):
        lint.report(
            "FSD304",
            "FSDP and DeepSpeed cannot be enabled simultaneously.",
            lint.root.get("deepspeed_config") or lint.root.get("deepspeed"),
        )
    elif filled and kind not in ("FSDP", None):
        entry = lint.root.get("distributed_type")
        edits = None
        if entry is not None and kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
            edits = lint.editor.replace(entry.node, "FSDP")
        lint.report_value(
            "FSD330",
            f"the FSDP settings have no effect: distributed_type is {kind}",
            entry,
            edits=edits,
            safe=False,
            fix="write FSDP",
            changes={"*": "FSDP"},
        )


def _target(lint: LintContext) -> None:
    consumer = lint.consumer
    if consumer.name == "accelerate":
        # accelerate release notes: FSDP2 in 1.6.0, ParallelismConfig in 1.10.0; activation offload is
        # newer than 1.14 (absent from its plugin, present in 1.15.0's).
        if lint.get("fsdp_version") == 2 and consumer.before(1, 6):
            lint.report("FSD344", f"fsdp_version 2 does not exist in {consumer}", "fsdp_version")
        if lint.parallelism_block is not None and consumer.before(1, 10):
            lint.report(
                "FSD344",
                f"parallelism_config does not exist in {consumer}",
                lint.root.get("parallelism_config"),
            )
        if lint.get("activation_checkpointing_offload") and consumer.before(1, 15):
            lint.report(
                "FSD344",
                f"activation offload does not exist in {consumer}",
                "activation_checkpointing_offload",
            )


def _version(lint: LintContext) -> None:
    if lint.get("fsdp_version") != 1:
        if lint.get("state_dict_type") == "local":
            lint.report_value("FSD333", "LOCAL_STATE_DICT is not supported by FSDP2", "state_dict_type")
        return
    from fsdptool.config.fsdp1 import Migration, migration

    migrated = Migration(None) if lint.trial else migration(lint)
    written = lint.written("fsdp_version")
    what = f"{lint.name('fsdp_version')} is 1" if written else f"{lint.name('fsdp_version')} is not written"
    severity: Any = "error" if lint.consumer.name in ("fsdptool", "simpletuner") else "warning"
    if lint.consumer.name == "fsdptool":
        what += "; fsdptool supports FSDP2 only"
    place = lint.at("fsdp_version") or lint.fsdp_entry or lint.root.get("fsdp_config")
    lint.report(
        "FSD301",
        f"{what}: the run uses FSDP1",
        place,
        severity=severity,
        help=migrated.refusal or "fsdptool migrate FILE writes the equivalent FSDP2 settings",
        edits=migrated.edits,
        safe=False,
        fix="migrate to FSDP2",
        changes=migrated.changes,
    )
    if lint.get("sharding_strategy") == "no_shard":
        lint.report_value(
            "FSD332", "NO_SHARD has no FSDP2 equivalent", "sharding_strategy", severity="warning"
        )
    if lint.get("state_dict_type") == "local":
        lint.report_value(
            "FSD333", "LOCAL_STATE_DICT is not supported by FSDP2", "state_dict_type", severity="warning"
        )


def wraps_nothing(lint: LintContext) -> bool:
    """Whether no module is wrapped: by the policy, or by a size threshold of 0."""
    policy = lint.get("wrap_policy")
    return bool(policy == "none" or (policy == "size" and lint.get("min_num_params") == 0))


def _wrapping(lint: LintContext) -> None:
    policy = lint.get("wrap_policy")
    if policy == "none" and not lint.written("wrap_policy") and launched_by_accelerate(lint):
        origin = lint.facts["wrap_policy"].origin if "wrap_policy" in lint.facts else ""
        if not origin.startswith("environment"):
            block = lint.root.get("fsdp_config")
            edits = lint.editor.add(
                block.node if block else None, block, {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
            )
            lint.report(
                "FSD315",
                "fsdp_auto_wrap_policy is not written: the whole model is one unit",
                block,
                edits=edits,
                safe=False,
                fix="write TRANSFORMER_BASED_WRAP",
                changes={"wrap_policy": "transformer"},
            )
    if policy == "size" and wraps_nothing(lint) and lint.consumer.name != "fsdptool":
        # accelerate 1.15 set_auto_wrap_policy: "If zero, we silently ignore it."
        lint.report_value(
            "FSD315",
            f"{lint.name('min_num_params')} is 0: no module is wrapped, and the whole model is one unit",
            lint.at("min_num_params", "wrap_policy"),
            help="write a threshold, or wrap by class",
        )
    elif policy == "size":
        # torch's FSDP1 policy passes containers by; accelerate's FSDP2 policy counts parameters only.
        first = lint.get("fsdp_version") == 1
        lint.report_value(
            "FSD324",
            f"size-based wrapping fails {'under version 2 ' if first else ''}on models whose layer list "
            "exceeds the threshold",
            "wrap_policy",
            severity="info" if first else None,
        )
    classes = lint.at("wrap_classes")
    if policy != "transformer" and classes is not None:
        lint.ignore(classes, "read with TRANSFORMER_BASED_WRAP only")
        lint.overridden["wrap_classes"] = []
    for class_name in lint.get("wrap_classes") or ():
        if policy != "transformer":
            break
        what = None
        if class_name in _LEAVES:
            what = "a layer inside the blocks, not a block"
        elif class_name.endswith(("Embedding", "Embeddings")):
            what = "an embedding, judging by its name"
        elif class_name.endswith(_ONCE):
            what = "a part that the model has once, judging by its name"
        elif class_name.endswith(_WHOLE) or (class_name.endswith("Model") and len(class_name) > 5):
            what = "a whole model, judging by its name"
        if what is not None:
            lint.report_value("FSD335", f"{class_name} is {what}", "wrap_classes")


def _checkpointing(lint: LintContext) -> None:
    on = bool(lint.get("activation_checkpointing"))
    offload = bool(lint.get("activation_checkpointing_offload"))
    if on and wraps_nothing(lint) and lint.consumer.name != "fsdptool":
        # FSDP1 passes no policy to torch's apply_activation_checkpointing, which then takes every module.
        first = lint.get("fsdp_version") == 1
        lint.report(
            "FSD316",
            "without wrapped blocks activation checkpointing takes every module, and crashes under version 2"
            if first
            else "activation checkpointing crashes without wrapped blocks",
            "activation_checkpointing",
            severity="warning" if first else None,
        )
    if offload and (not on or lint.get("fsdp_version") != 2):
        need = "activation checkpointing" if not on else "fsdp_version 2"
        lint.report("FSD318", f"activation offload requires {need}", "activation_checkpointing_offload")
    entry = lint.gradient_checkpointing
    if on and entry is not None:
        lint.report(
            "FSD317",
            f"{entry.key} and FSDP's activation checkpointing are both enabled",
            entry,
            edits=lint.editor.replace(entry.node, False),
            safe=False,
            fix=f"write {entry.key}: false",
            changes={"gradient_checkpointing": False},
        )
    only = lint.save_only_model
    sharded = lint.get("state_dict_type") == "sharded"
    if only is not None and (sharded or lint.loads_best_model):
        other = "SHARDED_STATE_DICT" if sharded else "load_best_model_at_end under FSDP"
        lint.report("FSD340", f"save_only_model cannot be combined with {other}", only)


def _loading(lint: LintContext) -> None:
    consumer = lint.consumer
    if (
        consumer.name == "accelerate"
        and lint.get("fsdp_version") == 2
        and lint.get("cpu_ram_efficient_loading")
        and lint.get("cpu_offload")
        and not consumer.before(1, 7)
        and consumer.before(1, 13)
    ):
        # fsdp2_load_full_state_dict has its argument cpu_offload since accelerate 1.13.0; 1.12.0 leaves the
        # shards on the GPU, and torch's FSDPParamGroup._validate_cpu_offload_params refuses them.
        entry = lint.at("cpu_offload", "cpu_ram_efficient_loading")
        lint.report(
            "FSD358", f"{consumer} loads the shards to the GPU, where CPU offload refuses them", entry
        )
    # Where no policy is written at all, FSD315 names the cause, and mending that mends this.
    if not lint.get("cpu_ram_efficient_loading") or lint.get("wrap_policy") != "none":
        return
    if lint.written("wrap_policy"):
        entry = lint.at("cpu_ram_efficient_loading") or lint.at("wrap_policy")
        lint.report("FSD319", "RAM-efficient loading without wrapped modules", entry)


def _compilation(lint: LintContext) -> None:
    """Judge ``dynamo_config`` as accelerate 1.15's ``Accelerator._prepare_fsdp2`` applies it."""
    block = lint.root.get("dynamo_config")
    if block is None or block.node.kind != "map" or lint.consumer.name != "accelerate":
        return
    # The launcher adds the prefix dynamo_ where it is missing (commands/launch.py).
    entries = {f"dynamo_{str(item.key).removeprefix('dynamo_')}": item for item in block.node.entries}
    backend, regional = entries.get("dynamo_backend"), entries.get("dynamo_use_regional_compilation")
    if backend is None or str(backend.node.value).lower() in ("no", "none", "false"):
        return
    if lint.get("fsdp_version") != 2:
        return
    if regional is not None and spelling.boolean(regional.node.value):
        if lint.consumer.before(1, 14):
            lint.report(
                "FSD357",
                f"{lint.consumer} compiles the blocks so that FSDP2's hooks on them never run",
                regional,
                severity="error",
                help="use accelerate 1.14 or newer, or write dynamo_use_regional_compilation: false",
            )
        return
    key = "dynamo_use_regional_compilation"
    edits = (
        lint.editor.add(block.node, block, {key: True})
        if regional is None
        else lint.editor.replace(regional.node, True)
    )
    lint.report(
        "FSD357",
        "the whole model is compiled at once, not block by block",
        backend,
        edits=edits,
        fix=f"write {key}: true",
    )


def _defaults(lint: LintContext) -> None:
    """Write out what another program or version would fill in differently."""
    if lint.dialect.name != "accelerate":
        return
    pending = lint.pending()
    unwritten = not lint.written("mixed_precision") and "mixed_precision" not in pending
    if lint.consumer.name == "accelerate" and unwritten:
        lint.report(
            "FSD352",
            "mixed_precision is not written; the default is 'no'",
            edits=lint.editor.add(lint.root, None, {"mixed_precision": "no"}),
            fix="write mixed_precision: 'no'",
        )
    block = lint.root.get("fsdp_config")
    keys = [("fsdp_state_dict_type", "state_dict_type")]
    if lint.get("fsdp_version") == 2:
        keys.append(("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading"))
    for key, canonical in keys:
        fact = lint.facts.get(canonical)
        if fact is None or fact.entry is not None or fact.origin.startswith("environment"):
            continue
        if canonical in pending:
            continue
        value = WRITTEN.get(canonical, {}).get(fact.value, fact.value)
        edits = lint.editor.add(block.node if block else None, block, {key: value})
        lint.report(
            "FSD320",
            f"{key} is not written; the default is {str(value).lower() if value is True else value}",
            block,
            edits=edits,
            fix=f"write {key}: {str(value).lower() if value is True else value}",
        )
