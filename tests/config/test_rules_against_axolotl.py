"""Each rule about axolotl, next to what axolotl 0.19.0 does with the smallest such file.

What axolotl does stands in the cases, as it was seen. Where axolotl is installed (see the oracle), every
case is run through it again.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import axolotl_oracle
import pytest

from fsdptool.config import read_settings
from fsdptool.config.dialects.axolotl.refusals import REFUSALS, WrittenValues
from fsdptool.config.migrate import migrate_file, repair
from fsdptool.files.yaml_tree import parse_yaml

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


LORA = "adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_linear: true\n"
EIGHT = f"load_in_8bit: true\n{LORA}"

# One file for every row of the table: its place in it, the file, and what axolotl says.
REFUSED: list[tuple[str, str, str]] = [
    ("validate_adapter", f"{TOP}load_in_4bit: true\n", "not supported without setting an adapter"),
    ("validate_adapter", text(top="load_in_8bit: true\n"), "not supported without setting an adapter"),
    ("validate_adapter", f"{TOP}adapter: ia3\n", "is not built in"),
    ("validate_qlora", text(top=FOUR_BIT + "load_in_8bit: true\n"), "Can't load qlora in 8bit"),
    ("validate_qlora", text(top=FOUR_BIT + "gptq: true\n"), "Can't load qlora if gptq"),
    ("validate_qlora", f"{TOP}adapter: qlora\n", "Require cfg.load_in_4bit to be True for qlora"),
    ("validate_qlora", f"{TOP}{FOUR_BIT}merge_lora: true\n", "Can't merge qlora if loaded in 4bit"),
    (
        "validate_lora_target_parameters_dropout",
        f"{TOP}adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_parameters: [a]\nlora_dropout: 0.1\n",
        "lora_dropout must be 0",
    ),
    ("check_fp8_config", text(top="fp8_config:\n  recipe: tensorwise\n"), "requires `fp8: true`"),
    (
        "check_fp8_config",
        text(top="fp8: true\nfp8_config:\n  recipe: rowwise\nfp8_enable_fsdp_float8_all_gather: true\n"),
        "only supports the tensorwise",
    ),
    (
        "check_fp8_config",
        text(top="fp8: true\nfp8_enable_fsdp_float8_all_gather: true\n", version=1),
        "requires FSDP2",
    ),
    (
        "check_lr_groups",
        f"{TOP}{LORA}loraplus_lr_ratio: 4\nlr_groups:\n  - {{name: a, modules: [b], lr: 0.1}}\n",
        "cannot be used together",
    ),
    (
        "check_frozen",
        f"{TOP}{LORA}peft_layers_to_transform: [0]\nunfrozen_parameters: [a]\n",
        "can have unexpected behavior",
    ),
    (
        "check_peft_layers_pattern",
        f"{TOP}{LORA}peft_layers_pattern: [a]\n",
        "requires peft_layers_to_transform",
    ),
    ("check_fused_lora", f"{TOP}{LORA}flash_attn_fuse_mlp: true\n", "Fused modules are not supported"),
    ("check_onebitllms_lora", f"{TOP}{LORA}use_onebitllms: true\n", "not supported with use_onebitllms"),
    ("check_lora_kernels_8bit", f"{TOP}{EIGHT}lora_mlp_kernel: true\n", "8-bit LoRA"),
    (
        "check_lora_kernels_trust_remote_code",
        f"{TOP}{LORA}lora_o_kernel: true\ntrust_remote_code: true\n",
        "trust_remote_code",
    ),
    ("check_multigpu_lora_kernels", text(top=LORA + "lora_qkv_kernel: true\n", version=1), "with FSDP1"),
    (
        "check_rl_config_gradient_checkpointing",
        text(
            top=FOUR_BIT + "rl: grpo\ngradient_checkpointing: true\n"
            "gradient_checkpointing_kwargs:\n  use_reentrant: true\n"
        ),
        "not supported for distributed RL",
    ),
    ("check_fsdp2_base_model_quant_rl", text(top=EIGHT + "rl: dpo\n"), "does not support load_in_8bit"),
    ("check_fsdp2_base_model_quant_rl", text(top=FOUR_BIT + "rl: orpo\n"), "does not support load_in_8bit"),
    (
        "check_model_quantization_config_vs_bnb",
        text(top=FOUR_BIT + "model_quantization_config: Mxfp4Config\n"),
        "cannot be used together",
    ),
    (
        "check_gpt_oss_fsdp_loading",
        text(RAM, "model_quantization_config: Mxfp4Config\n"),
        "not supported for Mxfp4Config",
    ),
    ("check_gptq_w_revision", f"{TOP}{LORA}gptq: true\nrevision_of_model: a\n", "not supported for GPTQ"),
    (
        "check_falcon_fsdp",
        text(top="fsdp: [full_shard]\n").replace("a/b", "tiiuae/falcon-7b"),
        "not supported for falcon",
    ),
    ("check_relora", f"{TOP}{LORA}relora: true\n", "jagged_restart_steps must be set"),
    ("check_relora", f"{TOP}relora: true\njagged_restart_steps: 5\n", "must support ReLoRA"),
    ("check_relora", text(top=LORA + "relora: true\njagged_restart_steps: 5\n"), "fsdp not supported"),
    ("check_fp32_norms", f"{TOP}fp32_norms: true\n", "requires FSDP to be enabled"),
    ("check_fp32_norms", text(top="fp32_norms: true\n", version=1), "requires fsdp_version: 2"),
    ("check_ple_cpu_offload", text(top=FOUR_BIT + "ple_cpu_offload: true\n"), "not compatible with FSDP"),
    ("check_ple_cpu_offload", f"{TOP}{LORA}ple_cpu_offload: true\n", "requires qlora with load_in_4bit"),
    (
        "check_quantize_moe_experts",
        f"{TOP}{FOUR_BIT}quantize_moe_experts: true\n",
        "lora_target_linear is not",
    ),
    ("check_quantize_moe_experts", f"{TOP}quantize_moe_experts: true\n", "requires adapter: lora or qlora"),
    (
        "check_quantize_moe_experts",
        f"{TOP}adapter: lora\nlora_r: 8\nlora_alpha: 8\nlora_target_modules: [q]\n"
        "quantize_moe_experts: true\n",
        "requires load_in_4bit or load_in_8bit",
    ),
    (
        "check_muon_deepspeed_fsdp",
        f"{TOP}optimizer: muon\ndeepspeed: a.json\n",
        "incompatible with DeepSpeed",
    ),
    ("check_polora", f"{TOP}optimizer: polora\n", "requires adapter: lora or qlora"),
    ("check_polora", f"{TOP}{LORA}optimizer: polora\ndeepspeed: a.json\n", "not compatible with DeepSpeed"),
    ("check_polora", f"{TOP}{LORA}optimizer: polora\ntensor_parallel_size: 2\n", "tensor parallelism"),
    ("check_polora", text(top=LORA + "optimizer: polora\n", version=1), "polora requires FSDP2"),
    (
        "check_polora",
        text(top=LORA + "optimizer: polora\nlora_modules_to_save: [embed_tokens]\n"),
        "no fallback optimizer",
    ),
    ("check_polora", text(top=LORA + "optimizer: polora\nloraplus_lr_ratio: 4\n"), "per-factor step size"),
    (
        "check_polora",
        text(top=LORA + "optimizer: polora\nrelora_steps: 4\n"),
        "relora resets optimizer state",
    ),
    ("check_qgalore", f"{TOP}{LORA}optimizer: q_galore_adamw8bit\n", "incompatible with adapter"),
    ("check_qgalore", f"{TOP}optimizer: q_galore_adamw8bit\ndeepspeed: a.json\n", "not yet validated"),
    ("check_qgalore", text(top="optimizer: q_galore_adamw8bit\n", version=1), "requires FSDP2"),
    ("check_qgalore", text(top="optimizer: q_galore_adamw8bit\n"), "use_orig_params=True"),
    ("check_flashoptim_deepspeed_fsdp", f"{TOP}optimizer: flash_adamw\ndeepspeed: a.json\n", "DeepSpeed"),
    ("check_flashoptim_deepspeed_fsdp", text(top="optimizer: flash_adamw\n", version=1), "with FSDP2"),
]
RUNS = {
    "4 bits": text(top=FOUR_BIT),
    "8 bits": text(top=EIGHT),
    "8 bits and rl under FSDP1": text(top=EIGHT + "rl: dpo\n", version=1),
    "rl without quantisation": text(top=LORA + "rl: dpo\n"),
    "kernels under FSDP2": text(top=LORA + "lora_qkv_kernel: true\n"),
    "fp32 norms": text(top="fp32_norms: true\n"),
    "polora": text(top=LORA + "optimizer: polora\n"),
    "flash": text(top="optimizer: flash_adamw\n"),
    "muon": text(top="optimizer: muon\n"),
    "switched off": text(top="load_in_4bit: false\nload_in_8bit: false\nrelora: false\ngptq: false\n"),
}


@pytest.mark.parametrize(("validator", "written", "says"), REFUSED)
def test_what_its_validators_refuse_is_an_error(validator: str, written: str, says: str) -> None:
    reading = read_settings(written)
    assert reading.dialect == "axolotl"
    assert any(item.code == "FSD370" for item in reading.errors), codes(reading)
    if axolotl_oracle.AVAILABLE:
        outcome = axolotl_oracle.run_axolotl(written)
        assert isinstance(outcome, str) and says in outcome, outcome


def test_every_refusal_has_a_file() -> None:
    """Each row of the table strikes in one of the cases, and all cases of a row name its validator."""
    struck: set[int] = set()
    for validator, written, _ in REFUSED:
        document = parse_yaml(written)
        lint = SimpleNamespace(root=document.root)
        rows = [row for row in REFUSALS if row.when(WrittenValues(lint))]
        assert validator in {row.validator for row in rows}
        struck.update(map(id, rows))
    assert {row.words for row in REFUSALS if id(row) not in struck} == set()


@pytest.mark.parametrize("case", RUNS)
def test_what_its_validators_let_pass_is_no_error(case: str) -> None:
    assert "FSD370" not in codes(read_settings(RUNS[case]))
    if axolotl_oracle.AVAILABLE:
        assert not isinstance(axolotl_oracle.run_axolotl(RUNS[case]), str)
