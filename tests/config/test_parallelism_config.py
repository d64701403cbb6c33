"""Every key of ``parallelism_config`` with every kind of value, next to what accelerate 1.15 makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate_oracle
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_rules_against_accelerate import GOOD, accelerator_refuses

from fsdptool.config import read_settings
from fsdptool.config.canonical import DETAILS as DETAIL_FACTS
from fsdptool.config.dialects.accelerate.keys import DETAILS, PARALLELISM_KEYS
from fsdptool.config.migrate import migrate_file, repair

SIZES = st.sampled_from([1, 2, 4, 8, "2", "1", 0, -1, 2.0, True, None, "two", [2]])
KERNEL = "kernels-community/flash-attn2"
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "cp_comm_strategy": st.sampled_from(["allgather", "alltoall", "ring", "AllGather", None, 1]),
    "cp_backend": st.sampled_from(["torch", "Torch", "deepspeed", None, True]),
    "sp_backend": st.sampled_from(["deepspeed", "torch", "DeepSpeed", None]),
    "sp_seq_length": st.sampled_from([4096, "4096", None, "long", 0.5, "None"]),
    "sp_seq_length_is_variable": st.sampled_from([True, False, "true", "False", "yes", 1, None]),
    "sp_attn_implementation": st.sampled_from(
        ["sdpa", "flash_attention_2", "flash_attention2", KERNEL, "a/b", "eager", None, True]
    ),
}
KEYS = {**PARALLELISM_KEYS, **DETAILS}
MESHES: tuple[dict[str, int], ...] = (
    {"dp_shard": 8},
    {"dp_shard": 4, "sp": 2},
    {"dp_shard": 2, "sp": 4},
    {"dp_shard": 4, "cp": 2},
    {"dp_replicate": 2, "dp_shard": 4},
    {},
)


@st.composite
def blocks(draw: Any) -> dict[str, Any]:
    """A mesh of 8 ranks, with some details beside it and up to two values of any kind written over it."""
    names = {name: key for key, name in KEYS.items()}
    block = {names[name]: size for name, size in draw(st.sampled_from(MESHES)).items()}
    details = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=3, unique=True))
    for name in (*details, *draw(st.lists(st.sampled_from(sorted(names)), max_size=1))):
        block[names[name]] = draw(VALUES.get(name, SIZES))
    return block


def accelerate_takes(path: Path) -> accelerate_oracle.Outcome:
    """Return what the launcher, the plugin and ``ParallelismConfig`` make of a file for 8 processes."""
    outcome = accelerate_oracle.run_accelerate(path)
    if outcome.error is None:
        taken = outcome.settings
        sizes = {key: taken[key] for key in ("dp_replicate", "dp_shard", "cp", "tp", "sp")}
        problem = accelerator_refuses(sizes, fsdp2=True, processes=8) if None not in sizes.values() else None
        if problem is not None:
            return accelerate_oracle.Outcome({}, "validate", problem)
    return outcome


@pytest.mark.slow
def test_all_values_are_read_as_accelerate_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    seen = {"refused": 0, "taken": 0, "split": 0}

    @settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(blocks())
    def check(block: dict[str, Any]) -> None:
        path.write_text(GOOD + yaml.safe_dump({"parallelism_config": block}))
        reading = read_settings(path)
        ours = [item for item in reading.errors if item.code != "FSD312"]
        outcome = accelerate_takes(path)
        if outcome.error is not None:
            seen["refused"] += 1
            assert reading.errors, (block, outcome.error)
        else:
            assert not ours, (block, [item.message for item in ours])
            seen["taken"] += 1
            explained = {item.key: item.value for item in reading.effective}
            taken = {key: value for key, value in outcome.settings.items() if key in KEYS.values()}
            seen["split"] += taken["sp"] > 1
            assert {key: explained[key] for key in taken} == taken, block
            assert set(DETAIL_FACTS) & set(explained) == set(DETAIL_FACTS) & set(taken), block
        # A fix changes nothing that was taken, and its own outcome is again as explained.
        fixed = repair(reading)
        path.write_bytes(fixed.after.encode())
        again = accelerate_takes(path)
        assert again.error is None or fixed.reading.errors, (block, again.error)
        if outcome.error is None:
            assert again.settings == outcome.settings, block

    check()
    assert min(seen.values()) > 4, seen


@pytest.mark.parametrize("to", ["env", "flags", "trainer", "axolotl"])
def test_what_only_sequence_parallelism_reads_is_never_dropped_in_silence(to: str, tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    block = {
        "parallelism_config_dp_shard_size": 4,
        "parallelism_config_sp_size": 2,
        "parallelism_config_sp_attn_implementation": "flash_attention_2",
    }
    path.write_text(GOOD + yaml.safe_dump({"parallelism_config": block}))
    refused = migrate_file(path, to=to)
    assert refused.after is None and "sp 2 has no effect under FSDP2" in (refused.refusal or "")
    # Without it the detail is read by nobody, and said to be.
    path.write_text(GOOD + yaml.safe_dump({"parallelism_config": {**block, "parallelism_config_sp_size": 1}}))
    reading = read_settings(path)
    assert [item.reason for item in reading.ignored] == ["read with sp_size above 1 only"]
    assert "FSD209" in {item.code for item in reading.diagnostics}


def test_the_environment_and_the_command_line_say_the_same() -> None:
    env = (
        "export ACCELERATE_USE_FSDP=true FSDP_VERSION='2'; # FSDP_VERSION=1 once\n"
        "ACCELERATE_USE_PARALLELISM_CONFIG=true;PARALLELISM_CONFIG_DP_SHARD_SIZE=4\n"
        "PARALLELISM_CONFIG_SP_SIZE=2\nPARALLELISM_CONFIG_SP_SEQ_LENGTH=4096\n"
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE=false\n"
    )
    flags = (
        "--use_fsdp --fsdp_version 2 --use_parallelism_config --parallelism_config_dp_shard_size 4 "
        "--parallelism_config_sp_size 2 --parallelism_config_sp_seq_length 4096 \\\n"
        "--parallelism_config_sp_seq_length_is_variable false --parallelism_config_cp_backend ring\n"
    )
    read = read_settings(env, dialect="env")
    facts = read.facts
    assert [facts[key] for key in DETAIL_FACTS] == [4096, False, None]
    assert "FSD202" not in {item.code for item in read.diagnostics}
    typed = read_settings(flags, dialect="flags")
    # argparse's type=bool takes every text for true, and then nobody reads the length.
    assert [typed.facts[key] for key in DETAIL_FACTS] == [None, True, "sdpa"]
    assert {"FSD206", "FSD207"} <= {item.code for item in typed.diagnostics}
