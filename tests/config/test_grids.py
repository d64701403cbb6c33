"""Values beside the programs that read them: a share of benchmarks/config/grids.py, and cases like it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import simpletuner_oracle
from test_every_code import LLAMA, tiny

from fsdptool.config import Reading, read_settings
from fsdptool.config.migrate import migrate_file, repair
from fsdptool.inspection import inspect
from fsdptool.source import resolve

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "config"))

import grids  # type: ignore[import-not-found]

EVERY = {"accelerate": 47, "trainer": 31}
"""One of so many cases is judged here; the committed result has all."""


@pytest.mark.slow
@pytest.mark.parametrize("program", EVERY)
def test_a_share_of_the_grid(program: str) -> None:
    answers = grids.judge(program, every=EVERY[program], first=EVERY[program] // 2)
    assert len(answers) > 100
    wrong = [f"{answer.case}: {answer.why}" for answer in answers if answer.kind == "wrong"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.skipif(simpletuner_oracle.folder() is None, reason="FSDPTOOL_SIMPLETUNER names no folder")
def test_a_share_of_the_grid_of_simpletuner() -> None:
    wrong = [answer for answer in grids.judge("simpletuner", every=5) if answer.kind == "wrong"]
    assert not wrong, wrong


def both(text: str, folder: Path, form: str, key: str = "", program: str = "accelerate") -> Reading:
    """Return the reading of a text, on which its program agrees."""
    names = {"yaml": "f.yaml", "env": "f.env", "flags": "f.args", "json": "f.json"}
    case = grids.Case(program, form, "", key, "", text, names[form])
    answer = grids.PROGRAMS[program][1](case, folder)
    assert answer.kind != "wrong", answer.why
    dialect = {"env": "env", "flags": "flags"}.get(form, program)
    return read_settings(text, dialect=dialect)


def errors(reading: Reading) -> list[str]:
    return [item.code for item in reading.errors]


def line(*words: str, version: int = 1) -> str:
    """Return a launch line with these words besides what every one needs."""
    first = f"accelerate launch --use_fsdp --num_processes 8 --fsdp_version {version}"
    return f"{first} {' '.join(words)} train.py\n"


FLAGS = {
    "--fsdp_state_dict_type SHARDED": "FSD206",
    "--fsdp_auto_wrap_policy NO-WRAP": "FSD206",
    "--mixed_precision Bf16": "FSD206",
    "--fsdp_offload_params Enable": "FSD206",
    "--fsdp_min_num_params 2e6": "FSD213",
    "--fsdp_version 2.0": "FSD206",
    "--use_parallelism_config --parallelism_config_cp_size 8 "
    "--parallelism_config_cp_comm_strategy AllToAll": "FSD307",
    "--fsdp_backward_prefetch off": "FSD206",
    "--fsdp_sync_module_states ''": "FSD206",
    "--fsdp_offload-params true": "FSD201",
    "--fsdp_offload true": "FSD201",
    "--multi_gpu": "FSD206",
    "--num_processes 8.0": "FSD205",
    "--num_processes 0": "FSD205",
    "--num_machines 2": "FSD205",
    "--main_process_port 65537": "FSD205",
    "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap [A,B]": "FSD214",
    "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap None": "FSD214",
}


@pytest.mark.parametrize("words", FLAGS)
def test_a_flag_is_refused_where_accelerate_stops(words: str, tmp_path: Path) -> None:
    version = 2 if "parallelism" in words else 1
    assert FLAGS[words] in errors(both(line(words, version=version), tmp_path, "flags"))


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (1, "--fsdp_sharding_strategy zero2"),
        (2, "--fsdp_backward_prefetch 7"),
        (1, "--fsdp_backward_prefetch 7"),
    ],
)
def test_what_version_1_alone_reads(version: int, words: str, tmp_path: Path) -> None:
    assert errors(both(line(words, version=version), tmp_path, "flags")) == ["FSD206"]


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (1, "--fsdp_reshard_after_forward FULL_SHARD"),
        (1, "--fsdp_reshard_after_forward sometimes"),
        (2, "--fsdp_sharding_strategy 9"),
        (2, "--fsdp_sync_module_states perhaps"),
        (2, "--fsdp_forward_prefetch null"),
        (2, "--fsdp_use_orig_params None"),
        (2, "--fsdp-offload-params true"),
    ],
)
def test_a_flag_that_accelerate_does_not_read_is_no_error(version: int, words: str, tmp_path: Path) -> None:
    assert not errors(both(line(words, version=version), tmp_path, "flags"))


@pytest.mark.parametrize("version", [1, 2])
def test_the_environment_is_read_as_the_plugin_reads_it(version: int, tmp_path: Path) -> None:
    first = f"export ACCELERATE_USE_FSDP=true FSDP_VERSION={version}\n"
    for value in ("off", "7", "''"):
        assert errors(both(f"{first}export FSDP_BACKWARD_PREFETCH={value}\n", tmp_path, "env")) == ["FSD206"]
    strategy = both(f"{first}export FSDP_SHARDING_STRATEGY=7\n", tmp_path, "env")
    assert errors(strategy) == (["FSD206"] if version == 1 else [])
    classes = (
        f"{first}export FSDP_AUTO_WRAP_POLICY=TRANSFORMER_BASED_WRAP FSDP_TRANSFORMER_CLS_TO_WRAP=None\n"
    )
    assert errors(both(classes, tmp_path, "env")) == ["FSD214"]
    if version == 1:
        number = both(f"{first}export FSDP_BACKWARD_PREFETCH=2\n", tmp_path, "env")
        assert number.facts["backward_prefetch"] == "BACKWARD_POST"
        loading = f"{first}export FSDP_CPU_RAM_EFFICIENT_LOADING=1 FSDP_SYNC_MODULE_STATES=0\n"
        assert both(loading, tmp_path, "env").facts["sync_module_states"] is True


FILE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: {}
  fsdp_auto_wrap_policy: {}
"""
IN_FILES: list[tuple[int, str, str, list[str]]] = [
    (2, "TRANSFORMER_BASED_WRAP", "  fsdp_transformer_layer_cls_to_wrap: none\n", ["FSD214"]),
    (2, "TRANSFORMER_BASED_WRAP", "  fsdp_transformer_layer_cls_to_wrap: null\n", []),
    (2, "NO_WRAP", "  fsdp_transformer_layer_cls_to_wrap: [A, B]\n", []),
    (1, "NO_WRAP", "  fsdp_activation_checkpointing: true\n", []),
    (2, "NO_WRAP", "  fsdp_activation_checkpointing: true\n", ["FSD316"]),
    (2, "NO_WRAP", "deepspeed_config: {zero_stage: 3}\n", ["FSD304"]),
    (2, "NO_WRAP", "main_process_port: 65536\n", ["FSD205"]),
    (2, "NO_WRAP", "machine_rank: first\n", []),
    (2, "NO_WRAP", "num_machines: 0\n", []),
    (2, "NO_WRAP", "use_cpu: 'off'\n", ["FSD314", "FSD337"]),
    (2, "NO_WRAP", "debug: 1\n", []),
]


@pytest.mark.parametrize(("version", "policy", "more", "codes"), IN_FILES)
def test_a_file_is_judged_for_its_version(
    version: int, policy: str, more: str, codes: list[str], tmp_path: Path
) -> None:
    text = FILE.format(version, policy) + more
    reading = read_settings(text) if "deepspeed" in more else both(text, tmp_path, "yaml")
    assert sorted(errors(reading)) == codes


def test_neither_of_two_is_enabled_under_a_third_type(tmp_path: Path) -> None:
    text = (
        FILE.format(2, "NO_WRAP").replace(": FSDP\n", ": MULTI_GPU\n") + "deepspeed_config: {zero_stage: 2}\n"
    )
    assert errors(both(text, tmp_path, "yaml")) == ["FSD330"]


@pytest.mark.parametrize("count", [0, -3, "True", "'0x8'"])
def test_a_process_count_that_torchrun_refuses(count: Any, tmp_path: Path) -> None:
    text = FILE.format(2, "NO_WRAP").replace("processes: 8", f"processes: {count}")
    assert errors(both(text, tmp_path, "yaml")) == ["FSD205"]


def test_sagemakers_keys_are_not_called_misspelt() -> None:
    text = (
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\nec2_instance_type: ml.p3.2xlarge\n"
        "iam_role_name: role\nmixed_precision: 'no'\nnum_machines: 1\n"
    )
    reading = read_settings(text, dialect="accelerate")
    assert [item.code for item in reading.diagnostics] == ["FSD110"]


TRAINER: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({}, {"cpu_offload": None}, []),
    ({}, {"cpu_offload": []}, []),
    ({}, {"cpu_offload": 3}, ["FSD337"]),
    ({"bf16": True, "fp16": True}, {}, ["FSD206"]),
    ({"bf16": 1, "fp16": "yes"}, {}, ["FSD206"]),
    ({"bf16": "no"}, {}, ["FSD337"]),
    ({}, {"xla": "off"}, ["FSD337"]),
    ({}, {"fsdp_xla": 1}, ["FSD110"]),
    ({}, {"state_dict_type": 3}, ["FSD205"]),
    ({}, {"state_dict_type": "3"}, []),
    ({}, {"transformer_layer_cls_to_wrap": "null"}, ["FSD214"]),
    ({}, {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": -1.5}, []),
    ({}, {"version": 1, "backward_prefetch": "2"}, []),
    ({}, {"version": 1, "backward_prefetch": None}, ["FSD206"]),
]


@pytest.mark.parametrize(("arguments", "config", "codes"), TRAINER)
def test_trainings_arguments_are_read_as_they_are(
    arguments: dict[str, Any], config: dict[str, Any], codes: list[str], tmp_path: Path
) -> None:
    data = {"output_dir": "o", "fsdp": True, **arguments, "fsdp_config": {"version": 2, **config}}
    reading = both(json.dumps(data, indent=1), tmp_path, "json", next(iter(config), ""), "trainer")
    assert errors(reading) == codes


def test_a_renamed_flag_must_take_its_value() -> None:
    for flag, value in (
        ("fsdp_backward_prefetch_policy", "SIZE_BASED_WRAP"),
        ("fsdp_state_type", "NO_WRAP"),
        ("fsdp_shard_strategy", "FULL_STATE_DICT"),
    ):
        reading = read_settings(line(f"--{flag} {value}"), dialect="flags")
        fixed = repair(reading, unsafe=True)
        assert value in fixed.after.text and not fixed.reading.errors, fixed.after.text
    # Where no flag takes the value, nothing is offered.
    reading = read_settings(line("--fsdp_backward_prefetch_policy SOMETIMES"), dialect="flags")
    assert [item.fix for item in reading.errors] == [None]


@pytest.mark.parametrize(
    "text",
    [
        FILE.format(2, "NO_WRAP") + "  fsdp_backward_prefech: SOMETIMES\n",
        FILE.format(1, "NO_WRAP") + "  fsdp_activation_checkpointing: true\n",
        FILE.format(2, "NO_WRAP") + "  fsdp_reshard_after_forwad: sometimes\n",
        FILE.format(2, "NO_WRAP") + "fsdp_offload_params: sometimes\n",
    ],
)
def test_every_fix_that_is_offered_leads_to_a_better_file(text: str) -> None:
    reading = read_settings(text)
    before = {item.code for item in reading.errors}
    for item in reading.diagnostics:
        if item.fix is None:
            continue
        after = text
        for edit in sorted(item.fix.edits, key=lambda edit: -edit.start):
            after = after[: edit.start] + edit.text + after[edit.end :]
        again = read_settings(after)
        assert {found.code for found in again.errors} <= before, item
        assert (item.code, item.message) not in {(found.code, found.message) for found in again.diagnostics}


@pytest.mark.slow
def test_the_model_is_judged_for_the_version_that_runs(tmp_path: Path) -> None:
    bert = {
        "hidden_size": 32, "vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64,
    }  # fmt: skip
    plain = inspect(resolve(tiny(tmp_path / "plain", "bert", "BertModel", **bert)))
    tied = inspect(resolve(tiny(tmp_path / "tied", "bert", "BertForMaskedLM", **bert)))
    llama = inspect(resolve(tiny(tmp_path / "llama", "llama", "LlamaForCausalLM", **LLAMA)))
    names = "  fsdp_transformer_layer_cls_to_wrap: BertEmbeddings,BertLayer,BertPooler\n"
    size = "  fsdp_min_num_params: 1000\n"

    def found(text: str, model: Any) -> dict[str, str]:
        return {item.code: item.severity for item in read_settings(text, model=model).diagnostics}

    for version, untied in ((1, "info"), (2, "error")):
        wrapped = FILE.format(version, "TRANSFORMER_BASED_WRAP") + names
        assert found(wrapped, plain)["FSD403"] == untied
        assert found(wrapped.replace(",BertPooler", ""), tied)["FSD403"] == "error"
        assert found(wrapped, plain)["FSD335"] == "warning"
        by_size = FILE.format(version, "SIZE_BASED_WRAP") + size
        assert found(by_size, llama)["FSD409"] == untied
    suspicious = read_settings(FILE.format(2, "TRANSFORMER_BASED_WRAP") + names).diagnostics
    assert sum(item.code == "FSD335" for item in suspicious) == 2


def test_migrating_says_what_it_removes_and_what_it_leaves(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(FILE.format(1, "NO_WRAP") + "  some_key_of_mine: 5\n")
    assert any("some_key_of_mine" in note for note in migrate_file(path).notes)
    path.write_text(FILE.format(2, "NO_WRAP") + "  fsdp_sharding_strategy: HYBRID_SHARD\n")
    left = migrate_file(path)
    assert not left.changed and any("already states version 2" in note for note in left.notes)
    path.write_text(FILE.format(1, "NO_WRAP") + "  fsdp_activation_checkpointing: true\n")
    refused = migrate_file(path)
    assert refused.after is None and "wrap the blocks first" in (refused.help or "")


def test_what_a_variable_of_the_shell_holds_is_not_judged() -> None:
    words = '--num_processes $GPUS --num_machines "${NODES}" --fsdp_offload_params $OFFLOAD'
    reading = read_settings(
        f"accelerate launch --use_fsdp --fsdp_version 2 {words} train.py\n", dialect="flags"
    )
    assert not reading.errors and "FSD326" not in {item.code for item in reading.diagnostics}
    text = "export ACCELERATE_USE_FSDP=true\nexport FSDP_VERSION=$V FSDP_IGNORED_MODULES='.*lm_head$'\n"
    reading = read_settings(text, dialect="env")
    assert not reading.errors and reading.facts["ignored_modules"] == ".*lm_head$"
    assert [item.key for item in reading.ignored] == ["FSDP_VERSION"]
