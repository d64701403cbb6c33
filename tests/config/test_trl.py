"""TRL's YAML: its own defaults on top of TrainingArguments, and what its trainers refuse."""

from __future__ import annotations

import importlib.util

import pytest

from fsdptool.config import read_settings
from fsdptool.config.described import describe_command
from fsdptool.config.migrate import repair
from fsdptool.config.result import Reading

SFT = "model_name_or_path: Qwen/Qwen3-8B\ndataset_name: trl-lib/Capybara\npacking: true\n"
FSDP = SFT + "fsdp: true\nfsdp_config:\n  version: 2\n"
DPO = "model_name_or_path: m\ndataset_name: d\nbeta: 0.1\nuse_liger_kernel: true\n"
GRPO = "model_name_or_path: m\ndataset_name: d\nmax_completion_length: 64\n"


def found(text: str, **options: str) -> list[str]:
    return [item.code for item in read_settings(text, **options).errors]  # type: ignore[arg-type]


def test_its_defaults_count() -> None:
    reading = read_settings(FSDP + "  activation_checkpointing: true\n")
    assert reading.dialect == "trl" and str(reading.consumer) == "trl 1.16.0"
    assert reading.settings is not None and reading.settings.mixed_precision == "bf16"
    assert [item.code for item in reading.errors] == ["FSD317"]
    fixed = repair(reading, unsafe=True)
    assert fixed.after.text.endswith("gradient_checkpointing: false\n") and not fixed.reading.errors
    assert read_settings(FSDP + "bf16: false\n").require().mixed_precision == "no"
    assert read_settings(FSDP + "fp16: true\n").require().mixed_precision == "fp16"


def test_what_trl_hands_to_accelerate_is_read() -> None:
    assert read_settings(FSDP + "num_processes: 16\nnum_machines: 2\n").require().num_processes == 16
    shipped = read_settings(SFT + "accelerate_config: fsdp2\n")
    assert shipped.version == 2 and shipped.require().state_dict_type == "full"
    other = read_settings(SFT + "accelerate_config: mine.yaml\n")
    assert [item.code for item in other.diagnostics] == ["FSD113"] and "mine.yaml" in other.diagnostics[
        0
    ].message
    assert [item.code for item in read_settings(SFT).diagnostics] == ["FSD113"]


def test_liger_by_version() -> None:
    assert found(DPO + "loss_type: ipo\n", target="trl==0.24") == ["FSD359"]
    assert found(DPO + "loss_type: [sigmoid]\n", target="trl==0.24") == []
    assert found(DPO + "loss_type: ipo\n") == []
    assert found(DPO + "liger_kernel_config:\n  fused_linear_cross_entropy: true\n") == ["FSD359"]


@pytest.mark.parametrize(
    ("more", "codes"),
    [
        ("num_processes: 4\ngeneration_batch_size: 64\n", []),
        ("num_processes: 3\ngeneration_batch_size: 64\n", ["FSD360"]),
        ("generation_batch_size: 64\nnum_generations: 6\n", ["FSD360"]),
    ],
)
def test_the_generation_batch_divides(more: str, codes: list[str]) -> None:
    assert found(GRPO + more) == codes


def test_other_files_with_a_model_are_not_its() -> None:
    def dialect(text: str) -> Reading:
        return read_settings(text)

    assert (
        dialect("model_name_or_path: m\nstage: sft\nfinetuning_type: full\ndataset_name: d\n").dialect
        != "trl"
    )
    assert dialect("model_name_or_path: m\noutput_dir: o\nfsdp: true\nfsdp_config: {}\n").dialect == "trainer"


if importlib.util.find_spec("trl") is not None:

    def test_trl_itself_has_these_defaults() -> None:
        from trl import SFTConfig

        fields = SFTConfig.__dataclass_fields__
        assert fields["gradient_checkpointing"].default is True and fields["bf16"].default is None
        assert SFTConfig(output_dir="o", use_cpu=True).bf16 is True


@pytest.mark.parametrize(
    ("script", "objective"),
    [("ppo", "ppo"), ("ppo_tldr", "ppo"), ("prm", "prm"), ("bco", "bco"), ("xpo", "xpo"), ("sft_vlm", "sft")],
)
def test_the_script_names_the_trainer(script: str, objective: str) -> None:
    line = f"python examples/scripts/{script}.py --model_name_or_path gpt2 --dataset_name d --output_dir o"
    _, run = describe_command(line.split())
    assert run is not None
    assert (run.program, run.objective) == ("trl", objective)
