"""Every key of ``fsdp_config`` with every kind of value, next to what accelerate 1.15 makes of it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import accelerate_oracle
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdptool.config import read_settings
from fsdptool.config.dialects.accelerate.keys import FSDP_KEYS
from fsdptool.config.migrate import repair

TRUTHS = [True, False, True, False, "true", "False", "no", 1, 0, None, "maybe", 2]
VALUES: dict[str, list[Any]] = {
    "fsdp_version": [2, 2, 2, 1, 1, "2", "1", 3, 2.0, None, True],
    "fsdp_reshard_after_forward": [*TRUTHS, "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"],
    "fsdp_auto_wrap_policy": [
        "TRANSFORMER_BASED_WRAP",
        "transformer_based_wrap",
        "SIZE_BASED_WRAP",
        "NO_WRAP",
        "transformer",
        "BOGUS",
        None,
        1,
    ],
    "fsdp_transformer_layer_cls_to_wrap": ["Block", "A,B", "A, B", ["A", "B"], "", None, 3],
    "fsdp_min_num_params": [1000, 0, "1000", "1e8", 1.5, None, True],
    "fsdp_state_dict_type": [
        "SHARDED_STATE_DICT",
        "full_state_dict",
        "FULL_STATE_DICT",
        "LOCAL_STATE_DICT",
        "sharded",
        1,
        3,
        None,
    ],
    "fsdp_ignored_modules": [None, "model\\.embed.*", 3, True],
    "fsdp_sharding_strategy": [
        "FULL_SHARD",
        "full_shard",
        "SHARD_GRAD_OP",
        "NO_SHARD",
        "HYBRID_SHARD",
        "_HYBRID_SHARD_ZERO2",
        1,
        2,
        "4",
        7,
        "BOGUS",
        None,
    ],
    "fsdp_backward_prefetch": ["BACKWARD_PRE", "backward_post", "NO_PREFETCH", "NONE", None, 1],
}
TOP: dict[str, list[Any]] = {
    "mixed_precision": ["no", "bf16", "FP16", "fp32", False, None],
    "num_processes": [8, "8", 1, None, -1, 2.0],
    "num_machines": [1, 2, "1", None],
    "machine_rank": [0, 1, "0", None],
    "main_process_ip": [None, "10.0.0.1"],
    "main_process_port": [None, 29500, "29500"],
    "use_cpu": [False, True, "no", None],
    "debug": [False, True, "no", None],
    "gpu_ids": [None, "all", "0,1", 0],
}


@st.composite
def files(draw: Any) -> dict[str, Any]:
    """A file with any of the keys, most of them as they should be."""
    block = {"fsdp_version": draw(st.sampled_from([2, 2, 2, 1]))}
    for key in draw(st.lists(st.sampled_from(sorted(FSDP_KEYS)), max_size=5, unique=True)):
        block[key] = draw(st.sampled_from(VALUES.get(key, TRUTHS)))
    top = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 8,
    }
    for key in draw(st.lists(st.sampled_from(sorted(TOP)), max_size=1)):
        top[key] = draw(st.sampled_from(TOP[key]))
    return {**top, "fsdp_config": block}


@pytest.mark.slow
def test_all_values_are_read_as_accelerate_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    seen = {"refused": 0, "taken": 0, "fixed": 0}

    @settings(
        max_examples=int(os.environ.get("FSDPTOOL_EXAMPLES", "50")),
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(files())
    def check(data: dict[str, Any]) -> None:
        path.write_text(yaml.safe_dump(data))
        before = read_settings(path)
        stopped = accelerate_oracle.check_explained(path)
        seen["refused" if stopped else "taken"] += 1
        fixed = repair(before)
        path.write_bytes(fixed.after.encode())
        seen["fixed"] += fixed.after.text != fixed.before.text
        after = accelerate_oracle.check_explained(path)
        if stopped is None:
            assert after is None, "a safe fix broke what ran"
            assert before.facts == fixed.reading.facts or before.errors, fixed.applied

    check()
    assert min(seen.values()) > 10, seen
