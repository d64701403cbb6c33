"""Each rule about axolotl, next to what axolotl 0.19.0 does with the smallest such file.

What axolotl does stands in the cases, as it was seen. Where axolotl is installed (see the oracle), every
case is run through it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import axolotl_oracle
import pytest

from fsdptool.config import read_settings
from fsdptool.config.fixes import repair
from fsdptool.config.migrate import migrate_file

TOP = """\
base_model: a/b
micro_batch_size: 1
gradient_accumulation_steps: 1
num_epochs: 1
learning_rate: 0.0001
bf16: true
sequence_len: 64
datasets:
  - path: a
    type: alpaca
"""
FOUR_BIT = "load_in_4bit: true\nadapter: qlora\nlora_r: 8\nlora_alpha: 8\nlora_target_linear: true\n"
RAM = "  cpu_ram_efficient_loading: true\n"
CHECKPOINTING = "  activation_checkpointing: true\n"


def text(block: str = "", top: str = "", version: int | str | None = 2) -> str:
    """Return a file with more lines in ``fsdp_config`` and at the top."""
    written = f"fsdp_version: {version}\n" if version is not None else ""
    return f"{TOP}{top}{written}fsdp_config:\n  transformer_layer_cls_to_wrap: LlamaDecoderLayer\n{block}"


# The code we report; the file; what axolotl says when it refuses it, or settings that it runs.
CASES: dict[str, tuple[str, str | dict[str, Any]]] = {
    "FSD205": (text(top="fsdp: full_shard\n"), "Input should be a valid list"),
    "FSD206-policy": (text("  auto_wrap_policy: NO_WRAP\n"), "Input should be 'TRANSFORMER_BASED_WRAP'"),
    "FSD206-case": (text("  auto_wrap_policy: transformer_based_wrap\n"), "Input should be"),
    "FSD206-state": (text("  state_dict_type: full_state_dict\n"), "Input should be 'FULL_STATE_DICT'"),
    "FSD206-bool": (text("  offload_params: maybe\n"), "Input should be a valid boolean"),
    "FSD206-zero": (text("  min_num_params: 0\n"), "greater than or equal to 1"),
    "FSD206-unread": (text("  use_orig_params: maybe\n"), "Input should be a valid boolean"),
    "FSD206-pin": (text("  cpu_offload_pin_memory: false\n"), "requires enabling offload_params"),
    "FSD206-reshard": (text("  reshard_after_forward: true\n", version=1), "KeyError: 'TRUE'"),
    "FSD206-word": (text(top="fsdp:\n  - FULL_SHARD\n"), "only available with FSDP1"),
    "FSD206-version": (text(version="v2"), "Input should be a valid integer"),
    "FSD212-list": (f"{TOP}fsdp:\n  - full_shard\n", "has no attribute 'activation_checkpointing'"),
    "FSD212-size": (text("  auto_wrap_policy: SIZE_BASED_WRAP\n"), "min_num_params is required"),
    "FSD213": (text("  auto_wrap_policy: SIZE_BASED_WRAP\n  min_num_params: 1e8\n"), "valid integer"),
    "FSD214": (text().replace(": LlamaDecoderLayer", ": [A, B]"), "Input should be a valid string"),
    "FSD317": (text(CHECKPOINTING, "gradient_checkpointing: true\n"), "can't both be set to True"),
    "FSD333": (text("  state_dict_type: LOCAL_STATE_DICT\n"), "does not support LOCAL_STATE_DICT"),
    "FSD334": (text(top="fsdp:\n  - hybrid_shard\n"), "only available with FSDP1"),
    "FSD345": (text(top="optimizer: adamw_8bit\n"), "use `adamw_torch_8bit` instead"),
    "FSD345-muon": (text(top="optimizer: muon\n", version=1), "only compatible with FSDP2"),
    "FSD346": (text(RAM, FOUR_BIT), "does not support `cpu_ram_efficient_loading` with load_in_4bit"),
    "FSD350": (
        text("  offload_params: true\n", "optimizer: paged_adamw_8bit\n", 1),
        "FSDP Offload not compatible with paged_adamw_8bit",
    ),
    "FSD350-bnb": (
        text("  offload_params: true\n", "optimizer: adamw_bnb_8bit\n", 1),
        "FSDP Offload not compatible with adamw_bnb_8bit",
    ),
    "FSD202": (text("  forward_prefetch: true\n", version=1), {"forward_prefetch": False}),
    "FSD204": (text("  fsdp_offload_params: true\n"), {"cpu_offload": True}),
    "FSD210": (text("  fsdp_version: 2\n", version=None), {"fsdp_version": 2, "state_dict_type": "full"}),
    "FSD301": (text(RAM, FOUR_BIT, 1), {"sync_module_states": True, "use_orig_params": True}),
    "FSD325": (text("  min_num_params: 5\n"), {"min_num_params": None}),
    "FSD336": (text("  sharding_strategy: SHARD_GRAD_OP\n", version=1), {"sharding_strategy": "full_shard"}),
    "FSD336-list": (text(top="fsdp:\n  - hybrid_shard\n", version=1), {"sharding_strategy": "full_shard"}),
    "FSD339": (text(top="fsdp:\n  - full_shard\n  - offload\n"), {"cpu_offload": True}),
    "FSD339-grad": (text(top="fsdp: [shard_grad_op]\n"), {"reshard_after_forward": False}),
}


def codes(found: Any) -> set[str]:
    """Return the codes of a reading's findings."""
    return {item.code for item in found.diagnostics}


@pytest.mark.parametrize("case", CASES)
def test_what_axolotl_does_we_say(case: str, tmp_path: Path) -> None:
    written, wanted = CASES[case]
    path = tmp_path / "axolotl.yml"
    path.write_text(written)
    reading = read_settings(path)
    assert reading.dialect == "axolotl" and case[:6] in codes(reading), codes(reading)
    if isinstance(wanted, str):
        assert case[:6] in {item.code for item in reading.errors}
    else:
        explained = {item.key: item.value for item in reading.effective}
        assert {key: explained[key] for key in wanted} == wanted
    fixed = repair(reading, unsafe=True)
    if axolotl_oracle.AVAILABLE:
        outcome = axolotl_oracle.run_axolotl(written)
        if isinstance(wanted, str):
            assert isinstance(outcome, str) and wanted in outcome, outcome
        else:
            assert not isinstance(outcome, str) and {key: outcome[key] for key in wanted} == wanted
        path.write_text(fixed.after.text)
        axolotl_oracle.check_explained(path)


def test_what_axolotl_runs_is_no_finding() -> None:
    """Its own offloading takes the place of checkpointing; its context parallelism needs no FSDP."""
    offloading = "gradient_checkpointing: true\nactivation_offloading: true\n"
    assert "FSD317" not in codes(read_settings(text(CHECKPOINTING, offloading)))
    alone = read_settings(f"{TOP}context_parallel_size: 2\n")
    assert [(item.code, item.severity) for item in alone.diagnostics] == [
        ("FSD113", "info"),
        ("FSD305", "info"),
    ]
    assert not read_settings(text()).diagnostics


def test_two_versions_are_an_error_and_one_written_twice_is_not() -> None:
    assert "FSD215" in {item.code for item in read_settings(text("  fsdp_version: 1\n")).errors}
    twice = read_settings(text("  fsdp_version: 2\n"))
    assert not twice.errors and repair(twice).after.text == text()


def test_a_quantised_file_is_migrated_into_one_that_axolotl_accepts(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yml"
    path.write_text(text(RAM, FOUR_BIT, 1))
    migrated = migrate_file(path)
    assert migrated.after is not None and "cpu_ram_efficient_loading: false" in migrated.after
    assert any("RAM-efficient loading is disabled" in note for note in migrated.notes)
    assert repair(read_settings(path), unsafe=True).after.text == migrated.after
    path.write_text(migrated.after)
    assert not read_settings(path).errors
    if axolotl_oracle.AVAILABLE:
        axolotl_oracle.check_explained(path)


def test_an_optimizer_that_fsdp2_refuses_stops_the_migration(tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yml"
    path.write_text(text(top="optimizer: adamw_bnb_8bit\n", version=1))
    migrated = migrate_file(path)
    assert migrated.after is None and migrated.help is not None and "adamw_torch_8bit" in migrated.help
