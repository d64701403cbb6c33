"""SimpleTuner's page promises forgiving spellings; here they are accepted, or answered with the right one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run
from fsdptool.config import read_settings, write_settings
from fsdptool.config.migrate import repair
from fsdptool.records.sharding import FsdpSettings

# What SimpleTuner 4.8.0's parser refuses, and what it can only have meant.
REJECTED: list[tuple[str, str, Any]] = [
    ("--fsdp_version=v2", "fsdp_version", 2),
    ("--fsdp_version=2.0", "fsdp_version", 2),
    ("--fsdp_state_dict_type=full_state_dict", "state_dict_type", "full"),
    ("--fsdp_state_dict_type=FULL", "state_dict_type", "full"),
    ("--fsdp_state_dict_type=sharded", "state_dict_type", "sharded"),
    ("--fsdp_state_dict_type=sharded-state-dict", "state_dict_type", "sharded"),
    ('--fsdp_state_dict_type=" FULL_STATE_DICT "', "state_dict_type", "full"),
    ("--fsdp_auto_wrap_policy=no_wrap", "wrap_policy", "none"),
    ("--fsdp_auto_wrap_policy=NONE", "wrap_policy", "none"),
    ("--fsdp_auto_wrap_policy=transformer", "wrap_policy", "transformer"),
    ("--fsdp_auto_wrap_policy=transformer-based-wrap", "wrap_policy", "transformer"),
    ("--fsdp_auto_wrap_policy=size", "wrap_policy", "size"),
    ("--context_parallel_comm_strategy=ALLGATHER", "cp_comm_strategy", "allgather"),
    ("--context_parallel_comm_strategy=all-gather", "cp_comm_strategy", "allgather"),
    ("--context_parallel_comm_strategy=All_To_All", "cp_comm_strategy", "alltoall"),
    ("--fsdp-reshard-after-forward=false", "reshard_after_forward", False),
    ("--FSDP_CPU_OFFLOAD=yes", "cpu_offload", True),
    ("--fsdp_cpu_ram_efficient_loading=On", "cpu_ram_efficient_loading", True),
    ("--fsdp_transformer_layer_cls_to_wrap='A;B'", "wrap_classes", ("A", "B")),
    ("--fsdp_transformer_layer_cls_to_wrap=\"['A','B']\"", "wrap_classes", ("A", "B")),
    ("--fsdp_transformer_layer_cls_to_wrap=['A','B']", "wrap_classes", ("A", "B")),
    ("--fsdp_transformer_layer_cls_to_wrap='A, B'", "wrap_classes", ("A", "B")),
    ("--fsdp_transformer_layer_cls_to_wrap='A B'", "wrap_classes", ("A", "B")),
    ("--fsdp_transformer_layer_cls_to_wrap=none", "wrap_classes", ()),
    ("--fsdp_transformer_layer_cls_to_wrap=a.b.Block", "wrap_classes", ("Block",)),
    ("--mixed_precision=BF16", "mixed_precision", "bf16"),
]


@pytest.mark.parametrize(("flag", "key", "value"), REJECTED, ids=[flag for flag, _, _ in REJECTED])
def test_a_spelling_is_understood_shown_and_made_right(flag: str, key: str, value: Any) -> None:
    text = f"--fsdp_enable=true \\\n{flag}\n"
    reading = read_settings(text, dialect="flags", consumer="fsdptool")
    assert reading.facts[key] == value
    assert not reading.errors
    # The same words for SimpleTuner itself: an error with the fix, and nothing left to say afterwards.
    strict = read_settings(text, dialect="flags", consumer="simpletuner")
    assert strict.facts[key] == value
    fixed = repair(strict)
    assert fixed.reading.facts[key] == value
    assert not fixed.reading.errors


@pytest.mark.parametrize("flag", ["--fsdp_enable", "--fsdp-enable", "--FSDP_ENABLE=1", "--fsdp_en"])
def test_enabling_in_any_spelling(flag: str) -> None:
    assert read_settings(f"{flag}\n--fsdp_cpu_offload\n", dialect="flags").settings is not None


def test_a_dotted_policy_is_refused_plainly_and_never_imported() -> None:
    reading = read_settings("--fsdp_enable --fsdp_auto_wrap_policy=os.system\n", dialect="flags")
    assert [item.code for item in reading.errors] == ["FSD348"]


def test_blank_values_are_answered() -> None:
    for name in ("fsdp_state_dict_type", "fsdp_auto_wrap_policy"):
        reading = read_settings(f'--fsdp_enable --{name}=""\n', dialect="flags")
        assert [item.code for item in reading.errors] == ["FSD206"]


def test_a_boolean_that_is_none() -> None:
    reading = read_settings("--fsdp_enable --fsdp_cpu_offload=2\n", dialect="flags")
    assert [item.code for item in reading.errors] == ["FSD206"] and "'2'" in reading.errors[0].message


# processes, context-parallel size, FSDP on: (dp_replicate, dp_shard), or what is said.
TOPOLOGIES: list[tuple[int, int, bool, tuple[int, int] | str]] = [
    (8, 2, False, (4, 1)),
    (2, 2, False, (1, 1)),
    (8, 2, True, (1, 4)),
    (8, 8, True, (1, 1)),
    (4, 4, False, (1, 1)),
    (7, 2, True, "Context parallel size (2) must evenly divide process count (7)."),
    (7, 2, False, "Context parallel size (2) must evenly divide process count (7)."),
    (2, 4, True, "Context parallel size (4) cannot exceed process count (2)."),
    (8, 0, True, "Context parallel size must be greater than 0 when specified."),
    (8, -2, True, "Context parallel size must be greater than 0 when specified."),
]


@pytest.mark.parametrize(("processes", "size", "fsdp", "wanted"), TOPOLOGIES)
def test_the_ten_topologies(processes: int, size: int, fsdp: bool, wanted: tuple[int, int] | str) -> None:
    data = {
        "model_family": "flux",
        "model_type": "lora",
        "fsdp_enable": fsdp,
        "context_parallel_size": size,
        "num_processes": processes,
    }
    reading = read_settings(json.dumps(data, indent=1) + "\n", dialect="simpletuner")
    if isinstance(wanted, str):
        assert [item.message for item in reading.errors] == [wanted], "said once"
        return
    assert not reading.errors
    assert (reading.facts["dp_replicate"], reading.facts["dp_shard"]) == wanted
    assert reading.facts["cp"] == size
    if not fsdp:
        assert "Context parallelism requires FSDP2." in [item.message for item in reading.diagnostics]


def test_size_one_still_normalises_the_rotation() -> None:
    text = "--fsdp_enable --context_parallel_size 1 --context_parallel_comm_strategy AllToAll\n"
    reading = read_settings(text, dialect="flags", consumer="fsdptool")
    assert reading.facts["cp"] == 1 and reading.facts["cp_comm_strategy"] == "alltoall"
    bad = read_settings("--fsdp_enable --context_parallel_comm_strategy ring\n", dialect="flags")
    assert [item.code for item in bad.errors] == ["FSD307"]


LIMITS = [
    ({"deepspeed_config": "ds.json"}, "FSD304"),
    ({"base_model_precision": "int8-quanto"}, "FSD346"),
    ({"optimizer": "bnb-adamw8bit"}, "FSD345"),
    ({"optimizer": "soap"}, "FSD345"),
    ({"ema_cpu_only": True, "use_ema": True}, "FSD349"),
    ({"fsdp_cpu_offload": True, "optimizer": "optimi-adamw", "optimizer_release_gradients": True}, "FSD350"),
    ({"fsdp_cpu_offload": True, "optimizer_cpu_offload_method": "torchao"}, "FSD350"),
    ({"fsdp_version": 1}, "FSD301"),
]


@pytest.mark.parametrize(("extra", "code"), LIMITS)
def test_what_simpletuner_refuses_or_swaps(extra: dict[str, Any], code: str) -> None:
    data = {"model_family": "sdxl", "model_type": "full", "fsdp_enable": True, **extra}
    reading = read_settings(json.dumps(data) + "\n", dialect="simpletuner")
    assert code in [item.code for item in reading.diagnostics]
    if code == "FSD304":
        assert "FSDP and DeepSpeed cannot be enabled simultaneously." in [
            item.message for item in reading.errors
        ]


def test_lora_and_validation_are_fine() -> None:
    """The page's old limits (full models only, validation off while resharding) are no findings."""
    data = {"model_family": "sdxl", "model_type": "lora", "fsdp_enable": True, "validation_steps": 50}
    assert not read_settings(json.dumps(data) + "\n", dialect="simpletuner").diagnostics


def test_page_and_command_line_say_the_same() -> None:
    """A configuration from one surface replays on the other."""
    chosen = FsdpSettings(wrap_classes=("Block",), state_dict_type="full", cpu_offload=True)
    page = json.loads(write_settings(chosen, "simpletuner"))
    line = " ".join(f"--{key}={value}" for key, value in page.items()) + "\n"
    assert read_settings(line, dialect="flags").settings == chosen


# What SimpleTuner 4.8.0's loader makes of values in a file: the setting, its value, and what is an error.
IN_A_FILE: list[tuple[dict[str, Any], str, Any, list[str]]] = [
    ({"fsdp_cpu_offload": None}, "cpu_offload", False, []),
    ({"fsdp_activation_checkpointing": ""}, "activation_checkpointing", False, []),
    ({"fsdp_reshard_after_forward": " False"}, "reshard_after_forward", True, ["FSD337"]),
    ({"fsdp_reshard_after_forward": "no"}, "reshard_after_forward", False, []),
    ({"fsdp_version": None}, "fsdp_version", 2, []),
    ({"fsdp_auto_wrap_policy": None}, "wrap_policy", "transformer", []),
    ({"mixed_precision": ""}, "mixed_precision", "bf16", []),
    ({"fsdp_transformer_layer_cls_to_wrap": "A,,B,"}, "wrap_classes", ("A", "B"), []),
    ({"fsdp_transformer_layer_cls_to_wrap": "None"}, "wrap_classes", (), []),
    ({"fsdp_transformer_layer_cls_to_wrap": ["A", "B"]}, "wrap_classes", ("A", "B"), ["FSD214"]),
    ({"fsdp_transformer_layer_cls_to_wrap": ["A"]}, "wrap_classes", ("A",), []),
    ({"fsdp_transformer_layer_cls_to_wrap": "A;B"}, "wrap_classes", ("A", "B"), ["FSD214"]),
    ({"context_parallel_size": 2.0}, "cp", 2, ["FSD306"]),
    ({"context_parallel_size": None}, "cp", 1, []),
    ({"fsdp_cpu_offload": "enabled"}, "cpu_offload", True, ["FSD206"]),
    ({"fsdp_cpu_offload": "t"}, "cpu_offload", True, ["FSD206"]),
    ({"fsdp_state_dict_type": True}, "state_dict_type", "sharded", ["FSD206"]),
]


@pytest.mark.parametrize(("extra", "key", "value", "codes"), IN_A_FILE)
def test_a_file_is_read_as_its_loader_makes_arguments(
    extra: dict[str, Any], key: str, value: Any, codes: list[str]
) -> None:
    data = {"model_family": "sdxl", "model_type": "full", "fsdp_enable": True, "num_processes": 8, **extra}
    reading = read_settings(json.dumps(data) + "\n", dialect="simpletuner")
    assert reading.facts[key] == value
    assert [item.code for item in reading.errors] == codes


def test_a_migrated_file_runs_version_2(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_family": "flux", "fsdp_enable": true,\n "fsdp_version": 1}\n')
    assert run(["migrate", str(path)]) == 0
    assert json.loads(path.read_text())["fsdp_version"] == 2


def test_a_written_file_is_indented_by_two() -> None:
    lines = write_settings(FsdpSettings(), "simpletuner").splitlines()
    assert {len(line) - len(line.lstrip()) for line in lines[1:-1]} == {2}
