"""Keys and defaults by version: the table against installed libraries, and what ``--target`` says."""

from __future__ import annotations

import dataclasses
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest

from fsdptool import explain
from fsdptool.config import read_settings
from fsdptool.config.key_history import default_of, groups, has_key, is_known, known_versions, versions_with
from fsdptool.config.result import Reading
from fsdptool.config.rules import RULES

ACCELERATE = (
    "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
)
TRL = "model_name_or_path: m\ndataset_name: d\nbeta: 0.1\n"
TRAINER = "output_dir: out\nfsdp: {}\nfsdp_config:\n  version: 2\n"


def said(reading: Reading, *codes: str) -> list[str]:
    """Return the messages of findings with one of the codes, FSD344 unless others are named."""
    return [item.message for item in reading.diagnostics if item.code in (codes or ("FSD344",))]


@pytest.mark.parametrize(
    ("package", "group", "place"),
    [
        ("accelerate", "plugin", "accelerate.utils:FullyShardedDataParallelPlugin"),
        ("accelerate", "file", "accelerate.commands.config.config_args:ClusterConfig"),
        ("transformers", "arguments", "transformers:TrainingArguments"),
    ],
)
def test_the_table_has_the_fields_of_the_installed_classes(package: str, group: str, place: str) -> None:
    installed = version(package)
    if not is_known(package, installed):
        pytest.skip(f"the table does not have {package} {installed}")
    module, _, name = place.partition(":")
    real = {item.name: item for item in dataclasses.fields(getattr(import_module(module), name))}
    known = {key for key in real if has_key(package, (group,), key, installed)}
    assert known == set(real)
    for key, item in real.items():
        expected = default_of(package, group, key, installed)
        if item.default is not dataclasses.MISSING and not isinstance(expected, dict):
            assert item.default == expected, key


def test_a_key_has_its_versions_and_defaults() -> None:
    assert versions_with("transformers", ("arguments",), "logging_dir") == ("4.50", "5.14")
    assert has_key("accelerate", ("variables",), "FSDP_IGNORED_MODULES", "1.9.0") is False
    assert default_of("transformers", "fsdp_config", "version", "5.9.0") == 1
    assert default_of("transformers", "fsdp_config", "version", "5.10.2") == 2
    assert has_key("trl", groups("trl"), "no_such_key", "1.0") is None
    # axolotl 0.12 takes any mapping for fsdp_config; the class with its fields came later.
    assert has_key("axolotl", ("fsdp_config",), "offload_params", "0.12") is None
    with pytest.raises(LookupError):
        default_of("accelerate", "file", "parallelism_config", "1.9")


@pytest.mark.parametrize(
    ("text", "target", "messages"),
    [
        (ACCELERATE + "  fsdp_ignored_modules: v\n", "accelerate==1.9",
         ["accelerate 1.9 does not have fsdp_ignored_modules: new in 1.10"]),
        (ACCELERATE + "  fsdp_ignored_modules: v\n", "accelerate==1.10", []),
        (ACCELERATE + "  fsdp_activation_checkpointing_offload: false\n", "accelerate==1.14", []),
        (ACCELERATE + "parallelism_config:\n  parallelism_config_dp_shard_size: 8\n", "accelerate==1.9",
         ["accelerate 1.9 does not have parallelism_config: new in 1.10"]),
        (ACCELERATE + "parallelism_config:\n  parallelism_config_cp_backend: torch\n", "accelerate==1.11",
         ["accelerate 1.11 does not have parallelism_config_cp_backend: new in 1.12"]),
        (ACCELERATE + "  fsdp_state_dict_type: FULL_STATE_DICT\n", "accelerate==1.6",
         ["FSDP2 has no FULL_STATE_DICT in accelerate 1.6: new in 1.7"]),
        ("output_dir: out\nlogging_dir: l\nfsdp: true\nfsdp_config: {version: 2}\n", "transformers==5.20",
         ["transformers 5.20 does not have logging_dir: removed in 5.15"]),
        ("output_dir: out\nlogging_dir: l\nfsdp: true\nfsdp_config: {version: 2}\n", None, []),
        (TRAINER.format("full_shard auto_wrap") + "  cpu_offload: true\n", "transformers==5.9",
         ["transformers 5.9 does not have cpu_offload: new in 5.10"]),
        (TRL + "max_seq_length: 9\n", "trl==1.0",
         ["trl 1.0 does not have max_seq_length: removed in 0.20"]),
        (TRL + "gradient_checkpointing: true\n", "trl==0.18", []),
        ("base_model: m\ndatasets: []\ntiled_mlp: true\n", "axolotl==0.10",
         ["axolotl 0.10 does not have tiled_mlp: new in 0.11"]),
    ],
)  # fmt: skip
def test_a_target_says_which_keys_it_does_not_have(
    text: str, target: str | None, messages: list[str]
) -> None:
    assert said(read_settings(text, target=target)) == messages


def test_a_key_that_was_removed_is_not_taken_for_another_one() -> None:
    reading = read_settings(f"{ACCELERATE}ipex_config: {{ipex: false}}\n")
    assert said(reading, "FSD201") == [
        "ipex_config was a key of accelerate up to 1.12: 1.15.0 refuses the file"
    ]


def test_only_unknown_versions_are_a_guess() -> None:
    for package in ("accelerate", "transformers", "trl", "axolotl"):
        known = known_versions(package)
        assert len(known) > 9
        assert f"{package} {known[0]} to {known[-1]}" in RULES["FSD354"].why.replace("TRL", "trl")
    assert said(read_settings(ACCELERATE, target="accelerate==1.8.1"), "FSD354") == []
    assert said(read_settings(ACCELERATE, target="accelerate==1.99"), "FSD354") == [
        "accelerate 1.99 is not a version that the rules were checked against; "
        "known are accelerate 1.6 to 1.15"
    ]


def test_size_based_wrapping_needed_its_threshold() -> None:
    text = ACCELERATE + "  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n"
    assert said(read_settings(text, target="accelerate==1.12"), "FSD212")
    assert not said(read_settings(text, target="accelerate==1.13"), "FSD212")


@pytest.mark.parametrize(
    ("words", "target", "expected"),
    [
        ("true", "5.10", ("transformer", "full", True)),
        ("true", "5.9", ("none", "sharded", True)),
        ("full_shard auto_wrap", "5.9", ("transformer", "sharded", True)),
        ("shard_grad_op auto_wrap", "5.4", ("transformer", "sharded", False)),
        ("full_shard auto_wrap", "5.3", ("transformer", "sharded", False)),
    ],
)
def test_arguments_mean_what_their_version_passes(
    words: str, target: str, expected: tuple[str, str, bool]
) -> None:
    reading = read_settings(TRAINER.format(words), target=f"transformers=={target}")
    settings = reading.settings
    assert settings is not None
    assert (settings.wrap_policy, settings.state_dict_type, settings.reshard_after_forward) == expected
    assert bool(said(reading, "FSD315")) == (expected[0] == "none")


def test_words_name_the_strategy_of_fsdp1_before_transformers_5_4() -> None:
    text = "output_dir: out\nfsdp: shard_grad_op auto_wrap\nfsdp_config: {version: 1}\n"
    for target, strategy in (("4.57", "shard_grad_op"), ("5.3", "shard_grad_op"), ("5.4", "full_shard")):
        reading = read_settings(text, target=f"transformers=={target}")
        assert reading.facts["sharding_strategy"] == strategy


def test_a_run_has_the_defaults_of_its_version(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(TRL + "max_length: 512\noutput_dir: out\n")
    for target, recomputes, computed in (
        ("0.18", False, "fp32"), ("0.20", False, "bf16"), ("0.22", True, "bf16"), ("1.16", True, "bf16"),
    ):  # fmt: skip
        run = explain(path, target=f"trl=={target}")[0].run
        assert run is not None
        assert run.program_version == target
        assert (run.compute_dtype, run.gradient_checkpointing != "none") == (computed, recomputes), target
