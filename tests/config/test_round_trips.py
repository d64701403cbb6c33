"""FsdpSettings to every dialect and back: the identity, or an error that names what cannot be said."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdptool.config import read_settings, write_settings
from fsdptool.config.canonical import facts_from
from fsdptool.config.dialects import load_registry
from fsdptool.config.migrate import repair, write_across
from fsdptool.config.writer import merge_into
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.sharding import FsdpSettings

NAMES = st.from_regex(r"[A-Z][A-Za-z0-9_]{0,12}", fullmatch=True)
SIZES = st.sampled_from([1, 1, 1, 2, 4])


@st.composite
def every_setting(draw: Any) -> FsdpSettings:
    """Any settings that do not contradict themselves."""
    policy = draw(st.sampled_from(["transformer", "size", "none"]))
    recompute = draw(st.booleans())
    mesh = ParallelDims(
        draw(SIZES), draw(st.sampled_from([None, None, 1, 2, 4])), draw(SIZES), draw(SIZES), draw(SIZES)
    )
    return FsdpSettings(
        wrap_policy=policy,
        wrap_classes=tuple(draw(st.lists(NAMES, max_size=3, unique=True))) if policy == "transformer" else (),
        min_num_params=draw(st.integers(1, 10**10)) if policy == "size" else None,
        reshard_after_forward=draw(st.booleans()),
        state_dict_type=draw(st.sampled_from(["sharded", "full"])),
        cpu_offload=draw(st.booleans()),
        cpu_ram_efficient_loading=draw(st.booleans()),
        activation_checkpointing=recompute,
        activation_checkpointing_offload=recompute and draw(st.booleans()),
        ignored_modules=draw(
            st.sampled_from([None, None, r"model\.embed.*", "no", "a b", "1e3", "null", "x: y"])
        ),
        mixed_precision=draw(st.sampled_from(["no", "fp16", "bf16", "fp8"])),
        mesh=mesh,
        cp_comm_strategy=draw(st.sampled_from(["allgather", "alltoall"])),
        num_processes=draw(st.sampled_from([None, 2, 8, 16])),
        num_machines=draw(st.sampled_from([1, 1, 2])),
        machine_rank=draw(st.sampled_from([0, 0, 1])),
        main_process_ip=draw(st.sampled_from([None, None, "10.0.0.1"])),
        main_process_port=draw(st.sampled_from([None, None, 29501])),
        rdzv_backend=draw(st.sampled_from(["static", "c10d"])),
        use_cpu=draw(st.booleans()),
        gpu_ids=draw(st.sampled_from([None, None, "all", "0,1", "3"])),
        debug=draw(st.booleans()),
    )


ANY = settings(
    max_examples=int(os.environ.get("FSDPTOOL_EXAMPLES", "100")),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.slow
def test_every_dialect_goes_round() -> None:
    """Written and read again is the identity, or one line says which setting there is no word for.

    Then once more without the launch settings a dialect has no words for, so that every example counts.
    """
    expressed: Counter[str] = Counter()
    understood: Counter[str] = Counter()

    @ANY
    @given(every_setting())
    def check(chosen: FsdpSettings) -> None:
        for dialect in load_registry().names:
            try:
                text = write_settings(chosen, dialect)
            except ConfigError as error:
                # It names the setting: a canonical name, or the thing itself.
                assert any(name in error.message for name in (*facts_from(chosen), "mesh")), error.message
            else:
                expressed[dialect] += 1
                assert read_settings(text, dialect=dialect).settings == chosen, text
            try:
                text, _ = write_across(chosen, dialect)
            except ConfigError:
                continue
            understood[dialect] += 1
            reading = read_settings(text)
            assert reading.dialect == dialect and reading.settings is not None
            assert write_settings(reading.settings, dialect) == text

    check()
    # The others have no word for some setting of nearly every example.
    assert all(expressed[dialect] for dialect in ("accelerate", "flags"))
    usual = {dialect.name for dialect in load_registry().all() if dialect.base is None}
    assert min(understood[name] for name in usual) > 1, understood


@pytest.mark.slow
def test_merging_says_exactly_what_was_asked() -> None:
    existing = SourceText(
        "# mine\ncompute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU  # was DDP\n"
        "mixed_precision: no\nfsdp_config:\n  sharding_strategy: 1\n  fsdp_unknown_key: keep me\n"
        "dynamo_config: {}\ntpu_env: []\n",
        "existing.yaml",
    )

    @ANY
    @given(every_setting())
    def check(chosen: FsdpSettings) -> None:
        try:
            write_settings(chosen)
        except ConfigError:
            return
        merged = merge_into(existing, chosen)
        again = merge_into(SourceText(merged.after, "existing.yaml"), chosen)
        assert again.after == merged.after
        for kept in ("# mine", "# was DDP", "keep me", "dynamo_config: {}", "tpu_env: []"):
            assert kept in merged.after

    check()


@pytest.mark.slow
def test_a_written_file_needs_no_fix() -> None:
    @ANY
    @given(every_setting())
    def check(chosen: FsdpSettings) -> None:
        try:
            text = write_settings(chosen)
        except ConfigError:
            return
        reading = read_settings(text, consumer="fsdptool")
        assert repair(reading).after.text == text

    check()
