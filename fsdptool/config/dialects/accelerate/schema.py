"""The JSON Schema of accelerate's YAML for FSDP2, generated from the tables of its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, get_args

from fsdptool.config.canonical import WRITTEN
from fsdptool.config.dialects.accelerate.keys import (
    CONVERTED,
    DETAILS,
    FSDP_KEYS,
    LEGACY_KEYS,
    PARALLELISM_KEYS,
    TOP_LEVEL,
)
from fsdptool.config.dialects.accelerate.plugin import FALSE_WORDS, TRUE_WORDS
from fsdptool.records.schema import compose
from fsdptool.records.sharding import Precision

NAME = "accelerate-fsdp2"
_SIZE = {"type": "integer", "minimum": 1}
_OFFLOAD, _CHECKPOINTING = "fsdp_activation_checkpointing_offload", "fsdp_activation_checkpointing"


def _any_case(words: Iterable[str]) -> dict[str, Any]:
    """Return the schema of a word in any case: accelerate compares in upper or lower case."""
    spelled = (
        "".join(f"[{letter.lower()}{letter.upper()}]" if letter.isalpha() else letter for letter in word)
        for word in words
    )
    return {"type": "string", "pattern": f"^({'|'.join(spelled)})$"}


def _truth(words: Iterable[str], numbers: Iterable[int], truths: Iterable[bool]) -> dict[str, Any]:
    """Return the schema of what accelerate's ``str_to_bool`` makes of the text of a value."""
    return {"anyOf": [{"enum": [*truths, *numbers]}, _any_case(sorted(words))]}


_TRUE = _truth(TRUE_WORDS, (1,), (True,))
_BOOLEAN = _truth(TRUE_WORDS | FALSE_WORDS, (0, 1), (True, False))

_TOP: Mapping[str, dict[str, Any]] = {
    "compute_environment": {"const": "LOCAL_MACHINE"},
    "debug": {"type": ["boolean", "null"]},
    "deepspeed_config": {
        "description": "FSDP and DeepSpeed cannot be enabled simultaneously.",
        "anyOf": [{"type": "null"}, {"type": "object", "maxProperties": 0}],
    },
    "distributed_type": {"const": "FSDP"},
    "gpu_ids": {"description": "Text: all, or ids separated by commas.", "type": ["string", "null"]},
    "machine_rank": {"type": "integer", "minimum": 0},
    "main_process_ip": {"type": ["string", "null"]},
    "main_process_port": {"type": ["integer", "null"], "minimum": 0, "maximum": 65535},
    "mixed_precision": {
        "description": "'no' needs its quotes: YAML 1.1 reads no as false.",
        "anyOf": [_any_case(get_args(Precision)), {"type": "null"}],
    },
    "num_machines": _SIZE,
    "num_processes": {
        "description": "All processes on all machines.",
        "anyOf": [_SIZE, {"enum": ["gpu", "auto", "cpu", -1]}],
    },
    "use_cpu": {"type": ["boolean", "null"]},
}
"""What a top-level key may hold; any value where it is not listed."""

_FSDP: Mapping[str, dict[str, Any]] = {
    "fsdp_version": {
        "description": "2 for FSDP2; without it accelerate 1.15 runs FSDP1.",
        "anyOf": [{"const": 2}, {"const": "2"}],
    },
    "fsdp_reshard_after_forward": {
        "description": "Free gathered parameters after forward (true) or keep them until backward (false).",
        **_BOOLEAN,
    },
    "fsdp_auto_wrap_policy": {
        "description": "Without it accelerate takes NO_WRAP, and TrainingArguments TRANSFORMER_BASED_WRAP: "
        "write it.",
        **_any_case(WRITTEN["wrap_policy"].values()),
    },
    "fsdp_transformer_layer_cls_to_wrap": {
        "description": "Class names separated by commas, without spaces; fsdptool detect finds them.",
        "type": "string",
        "pattern": "^[A-Za-z_][A-Za-z0-9_]*(,[A-Za-z_][A-Za-z0-9_]*)*$",
    },
    "fsdp_min_num_params": {
        "description": "Read with SIZE_BASED_WRAP only. 1e8 is text to YAML 1.1.",
        "type": "integer",
        "minimum": 0,
    },
    "fsdp_state_dict_type": {
        "description": "SHARDED under version 2 when missing; FULL in TrainingArguments.",
        **_any_case(WRITTEN["state_dict_type"][kind] for kind in ("sharded", "full")),
    },
    "fsdp_offload_params": {
        "description": "Parameters, gradients and optimizer states live in host memory.",
        **_BOOLEAN,
    },
    "fsdp_cpu_ram_efficient_loading": {
        "description": "True in accelerate launch when missing, false in TrainingArguments.",
        **_BOOLEAN,
    },
    _CHECKPOINTING: {"description": "Recompute every wrapped block in backward.", **_BOOLEAN},
    _OFFLOAD: {
        "description": "Keep the saved block inputs in host memory; needs fsdp_activation_checkpointing.",
        **_BOOLEAN,
    },
    "fsdp_ignored_modules": {
        "description": "Regular expression, matched in full against module paths.",
        "type": ["string", "null"],
    },
}

_PARALLELISM: Mapping[str, dict[str, Any]] = {
    "parallelism_config_dp_replicate_size": {"description": "Copies of the sharded model.", **_SIZE},
    "parallelism_config_dp_shard_size": {
        "description": "Ranks that share one copy; 1 when missing, never filled in.",
        **_SIZE,
    },
    "parallelism_config_tp_size": {"description": "Tensor-parallel ranks.", **_SIZE},
    "parallelism_config_cp_size": {"description": "Ranks that share one sequence.", **_SIZE},
    "parallelism_config_cp_comm_strategy": {"enum": ["allgather", "alltoall"]},
    "parallelism_config_sp_size": {
        "description": "DeepSpeed Ulysses; has no effect under FSDP2.",
        "const": 1,
    },
    "parallelism_config_cp_backend": {"const": "torch"},
    "parallelism_config_sp_backend": {"const": "deepspeed"},
}


def accelerate_schema() -> dict[str, Any]:
    """Return the schema of what accelerate 1.15 reads with FSDP2, every key of its tables and no other."""
    modern = [key for key in FSDP_KEYS if key not in LEGACY_KEYS]
    offload = {"properties": {_OFFLOAD: _TRUE}, "required": [_OFFLOAD]}
    needed = {"required": [_CHECKPOINTING], "properties": {_CHECKPOINTING: _TRUE}}
    blocks = {
        "fsdp_config": {
            **_closed(modern, _FSDP, required=["fsdp_version"]),
            "allOf": [{"if": offload, "then": needed}],
        },
        "parallelism_config": {
            **_closed([*PARALLELISM_KEYS, *DETAILS], _PARALLELISM),
            "type": ["object", "null"],
        },
    }
    body = _closed(
        sorted(TOP_LEVEL | CONVERTED), {**_TOP, **blocks}, required=["distributed_type", "fsdp_config"]
    )
    description = (
        "What accelerate 1.15 reads, strictly: unknown nested keys, which accelerate drops silently, are "
        "refused, and so are spellings that accelerate parses but nobody needs (numbers of enumerations, "
        "numbers as text). fsdptool validate also checks what a schema cannot express: meshes against "
        "process counts, the model, the hardware, and how PyYAML (YAML 1.1) reads the text. A checker that "
        "reads YAML 1.2 passes `mixed_precision: no`, `fsdp_min_num_params: 1e8` and `fsdp_version: 2.0`, at "
        "which accelerate stops, and takes yes, no, on and off for text."
    )
    return compose(NAME, "accelerate configuration for FSDP2", {"description": description, **body}, {})


def _closed(
    keys: Iterable[str], values: Mapping[str, dict[str, Any]], *, required: list[str] | None = None
) -> dict[str, Any]:
    return {
        "type": "object",
        **({"required": required} if required else {}),
        "additionalProperties": False,
        "properties": {key: values.get(key, {}) for key in keys},
    }
