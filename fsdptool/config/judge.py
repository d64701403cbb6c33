"""The rules on meaning: what the settings do together, for the consumer of the file.

Each function looks at the facts of a draft and reports; the dialects have reported keys and values.
"""

from __future__ import annotations

from typing import Any

from fsdptool.config import mesh_rules
from fsdptool.config.draft import Draft
from fsdptool.config.facts import WRITTEN
from fsdptool.config.process_rules import judge_processes, launched_by_accelerate
from fsdptool.files.tree import Entry, Node

_LEAVES = frozenset(
    [
        "Linear",
        "Conv1d",
        "Conv2d",
        "Conv3d",
        "LayerNorm",
        "RMSNorm",
        "GroupNorm",
        "Dropout",
        "Embedding",
        "Identity",
        "SiLU",
        "GELU",
    ]
)
_WHOLE = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForSequenceClassification",
    "ForMaskedLM",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "LMHeadModel",
    "Pipeline",
)


def judge(draft: Draft, *, model: Any = None, hardware: Any = None) -> None:
    """Report what the facts of a draft mean together.

    Args:
        draft: A draft whose dialect has been read.
        model: An Anatomy for the family ``model``, or None.
        hardware: A Hardware for the family ``hardware``, or None.
    """
    if not draft.consumer.checked:
        draft.report("FSD354", f"judged for {draft.consumer}; the rules were checked against another version")
    if not draft.extras.get("configures", True):
        return
    _conflicts(draft)
    if not draft.runs_fsdp:
        return
    _target(draft)
    _version(draft)
    mesh_rules.judge_mesh(draft)
    _wrapping(draft)
    _checkpointing(draft)
    _loading(draft)
    judge_processes(draft)
    _defaults(draft)
    draft.withhold()
    if model is not None:
        from fsdptool.config.model_rules import judge_model

        judge_model(draft, model)
    if hardware is not None:
        from fsdptool.config.hardware_rules import judge_hardware

        judge_hardware(draft, hardware)


def _conflicts(draft: Draft) -> None:
    kind = draft.extras.get("distributed_type")
    block: Node | None = draft.extras.get("fsdp_block")
    filled = block is not None and bool(block.entries)
    deepspeed = draft.extras.get("deepspeed")
    if deepspeed and (draft.runs_fsdp or filled):
        draft.report(
            "FSD304",
            "FSDP and DeepSpeed cannot be enabled simultaneously.",
            draft.root.get("deepspeed_config") or draft.root.get("deepspeed"),
        )
    elif filled and kind not in ("FSDP", None):
        entry = draft.root.get("distributed_type")
        edits = None
        if entry is not None and kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
            edits = draft.editor.replace(entry.node, "FSDP")
        draft.report(
            "FSD330",
            f"the FSDP settings do nothing: distributed_type is {kind}",
            entry,
            value=True,
            edits=edits,
            safe=False,
            fix="write FSDP",
            changes={"*": "FSDP"},
        )


def _target(draft: Draft) -> None:
    consumer = draft.consumer
    if consumer.name == "accelerate":
        # accelerate release notes: FSDP2 in 1.6.0, ParallelismConfig in 1.10.0; activation offload is
        # newer than 1.14 (absent from its plugin, present in 1.15.0's).
        if draft.get("fsdp_version") == 2 and consumer.before(1, 6):
            draft.report("FSD344", f"fsdp_version 2 does not exist in {consumer}", draft.at("fsdp_version"))
        if draft.extras.get("parallelism_block") is not None and consumer.before(1, 10):
            draft.report(
                "FSD344",
                f"parallelism_config does not exist in {consumer}",
                draft.root.get("parallelism_config"),
            )
        if draft.get("activation_checkpointing_offload") and consumer.before(1, 15):
            draft.report(
                "FSD344",
                f"activation offload does not exist in {consumer}",
                draft.at("activation_checkpointing_offload"),
            )


def _version(draft: Draft) -> None:
    if draft.get("fsdp_version") != 1:
        if draft.get("state_dict_type") == "local":
            draft.report(
                "FSD333",
                "LOCAL_STATE_DICT is not supported by FSDP2",
                draft.at("state_dict_type"),
                value=True,
            )
        return
    from fsdptool.config.migrate import migration

    made = migration(draft)
    written = draft.written("fsdp_version")
    what = f"{draft.name('fsdp_version')} is 1" if written else f"{draft.name('fsdp_version')} is not written"
    severity: Any = "error" if draft.consumer.name in ("fsdptool", "simpletuner") else "warning"
    if draft.consumer.name == "fsdptool":
        what += "; fsdptool runs FSDP2 only"
    place = draft.at("fsdp_version") or draft.extras.get("fsdp_entry") or draft.root.get("fsdp_config")
    draft.report(
        "FSD301",
        f"{what}: FSDP1 runs",
        place,
        severity=severity,
        help=made.refusal or "fsdptool migrate FILE writes the same settings for FSDP2",
        edits=made.edits,
        safe=False,
        fix="migrate to FSDP2",
        changes=made.changes,
    )
    if draft.get("sharding_strategy") == "no_shard":
        draft.report(
            "FSD332",
            "NO_SHARD has no FSDP2 equivalent",
            draft.at("sharding_strategy"),
            value=True,
            severity="warning",
        )
    if draft.get("state_dict_type") == "local":
        draft.report(
            "FSD333",
            "LOCAL_STATE_DICT is not supported by FSDP2",
            draft.at("state_dict_type"),
            value=True,
            severity="warning",
        )


def wraps_nothing(draft: Draft) -> bool:
    """Whether no module is wrapped: by the policy, or by a size threshold of 0."""
    policy = draft.get("wrap_policy")
    return bool(policy == "none" or (policy == "size" and draft.get("min_num_params") == 0))


def _wrapping(draft: Draft) -> None:
    policy = draft.get("wrap_policy")
    if policy == "none" and not draft.written("wrap_policy") and launched_by_accelerate(draft):
        origin = draft.facts["wrap_policy"].origin if "wrap_policy" in draft.facts else ""
        if not origin.startswith("environment"):
            block = draft.root.get("fsdp_config")
            edits = draft.editor.add(
                block.node if block else None, block, {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
            )
            draft.report(
                "FSD315",
                "fsdp_auto_wrap_policy is not written: the whole model is one unit",
                block,
                edits=edits,
                safe=False,
                fix="write TRANSFORMER_BASED_WRAP",
                changes={"wrap_policy": "transformer"},
            )
    if policy == "size" and wraps_nothing(draft) and draft.consumer.name != "fsdptool":
        # accelerate 1.15 set_auto_wrap_policy: "If zero, we silently ignore it."
        draft.report(
            "FSD315",
            f"{draft.name('min_num_params')} is 0: nothing is wrapped, and the whole model is one unit",
            draft.at("min_num_params", "wrap_policy"),
            value=True,
            help="write a threshold, or wrap by class",
        )
    elif policy == "size":
        # torch's FSDP1 policy passes containers by; accelerate's FSDP2 policy counts parameters only.
        first = draft.get("fsdp_version") == 1
        draft.report(
            "FSD324",
            f"size-based wrapping fails {'under version 2 ' if first else ''}on models whose layer list "
            "exceeds the threshold",
            draft.at("wrap_policy"),
            value=True,
            severity="info" if first else None,
        )
    classes = draft.at("wrap_classes")
    if policy != "transformer" and classes is not None:
        draft.ignore(classes, "read with TRANSFORMER_BASED_WRAP only")
        draft.unheeded["wrap_classes"] = []
    for class_name in draft.get("wrap_classes") or ():
        if policy != "transformer":
            break
        what = None
        if class_name in _LEAVES:
            what = "a layer inside the blocks, not a block"
        elif class_name.endswith(_WHOLE) or (class_name.endswith("Model") and len(class_name) > 5):
            what = "a whole model, by its name"
        if what is not None:
            draft.report("FSD335", f"{class_name} is {what}", draft.at("wrap_classes"), value=True)


def _checkpointing(draft: Draft) -> None:
    on = bool(draft.get("activation_checkpointing"))
    offload = bool(draft.get("activation_checkpointing_offload"))
    if on and wraps_nothing(draft) and draft.consumer.name != "fsdptool":
        draft.report(
            "FSD316",
            "activation checkpointing without wrapped blocks crashes",
            draft.at("activation_checkpointing"),
        )
    if offload and (not on or draft.get("fsdp_version") != 2):
        need = "activation checkpointing" if not on else "fsdp_version 2"
        draft.report(
            "FSD318", f"activation offload needs {need}", draft.at("activation_checkpointing_offload")
        )
    entry: Entry | None = draft.extras.get("gradient_checkpointing")
    if on and entry is not None:
        draft.report(
            "FSD317",
            f"{entry.key} and FSDP's activation checkpointing are both on",
            entry,
            edits=draft.editor.replace(entry.node, False),
            safe=False,
            fix=f"write {entry.key}: false",
            changes={"gradient_checkpointing": False},
        )
    only, best = draft.extras.get("save_only_model", (None, False))
    sharded = draft.get("state_dict_type") == "sharded"
    if only is not None and (sharded or best):
        other = "SHARDED_STATE_DICT" if sharded else "load_best_model_at_end under FSDP"
        draft.report("FSD340", f"save_only_model cannot be combined with {other}", only)


def _loading(draft: Draft) -> None:
    # Where no policy is written at all, FSD315 names the cause, and mending that mends this.
    if not draft.get("cpu_ram_efficient_loading") or draft.get("wrap_policy") != "none":
        return
    if draft.written("wrap_policy"):
        entry = draft.at("cpu_ram_efficient_loading") or draft.at("wrap_policy")
        draft.report("FSD319", "RAM-efficient loading with nothing wrapped", entry)


def _defaults(draft: Draft) -> None:
    """Write out what another program or version would fill in differently."""
    if draft.dialect != "accelerate":
        return
    pending = draft.pending()
    unwritten = not draft.written("mixed_precision") and "mixed_precision" not in pending
    if draft.consumer.name == "accelerate" and unwritten:
        draft.report(
            "FSD352",
            "mixed_precision is not written: no, by default",
            edits=draft.editor.add(draft.root, None, {"mixed_precision": "no"}),
            fix="write mixed_precision: 'no'",
        )
    block = draft.root.get("fsdp_config")
    keys = [("fsdp_state_dict_type", "state_dict_type")]
    if draft.get("fsdp_version") == 2:
        keys.append(("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading"))
    for key, canonical in keys:
        fact = draft.facts.get(canonical)
        if fact is None or fact.entry is not None or fact.origin.startswith("environment"):
            continue
        if canonical in pending:
            continue
        value = WRITTEN.get(canonical, {}).get(fact.value, fact.value)
        edits = draft.editor.add(block.node if block else None, block, {key: value})
        draft.report(
            "FSD320",
            f"{key} is not written: {str(value).lower() if value is True else value} by default",
            block,
            edits=edits,
            fix=f"write {key}: {str(value).lower() if value is True else value}",
        )
