"""Writing TrainingArguments, and turning FSDP1 settings into FSDP2 in place."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fsdptool.config.dialects.trainer_keys import CANNOT, FSDP1_KEYS, KEYS, NAME
from fsdptool.config.draft import Draft
from fsdptool.config.edits import block_list_to_scalar
from fsdptool.config.expressible import check_expressible
from fsdptool.config.facts import WRITTEN
from fsdptool.errors import ConfigError
from fsdptool.files.tree import to_python
from fsdptool.records.settings import FsdpSettings

if TYPE_CHECKING:
    from fsdptool.config.migrate import Rewriter, Target


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
    steps.put(
        block,
        "state_dict_type",
        WRITTEN["state_dict_type"][target.state_dict],
        synonyms=("fsdp_state_dict_type",),
    )
    steps.put(block, "version", 2, synonyms=("fsdp_version",))
    switch = steps.root.get("fsdp") if block is not None else None
    if switch is not None and to_python(switch.node) is not True:
        value = to_python(switch.node)
        offload = "offload" in (value if isinstance(value, list) else str(value).split())
        if (offload and draft.facts["cpu_offload"].entry is switch) or draft.get("cpu_offload"):
            steps.put(block, "cpu_offload", True, synonyms=("fsdp_cpu_offload",))
        switch = steps.root.get("fsdp")
        assert switch is not None
        if switch.node.kind == "scalar" or switch.node.flow:
            steps.apply(steps.editor.replace(switch.node, True), "fsdp")
        else:
            steps.apply(block_list_to_scalar(steps.editor, switch, True), "fsdp")
