"""What somebody meets in the first hour with files of mixed quality: links, tabs, misspelt values."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdptool.cli.app import run
from fsdptool.config import read_settings
from fsdptool.config.described import describe_path

FSDP2 = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_cpu_ram_efficient_loading: true
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
FSDP1 = FSDP2.replace("fsdp_version: 2", "fsdp_sharding_strategy: FULL_SHARD")
AXOLOTL = "base_model: Qwen/Qwen2.5-7B\nfsdp_version: 2\nfsdp_config:\n  offload_params: false\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def messages(text: str) -> dict[str, str]:
    Path("given.yaml").write_text(text)
    return {item.code: item.message for item in read_settings("given.yaml").diagnostics}


@pytest.mark.parametrize(
    "command", [["validate", "--unsafe-fixes"], ["migrate"]], ids=["validate --unsafe-fixes", "migrate"]
)
def test_a_file_and_a_link_to_it_are_written_once(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file.yaml").write_text(FSDP1)
    Path("link.yaml").symlink_to("file.yaml")

    assert run([*command, "."]) == 0
    assert "error" not in capsys.readouterr().err
    assert "fsdp_version: 2" in Path("file.yaml").read_text()
    assert Path("link.yaml").is_symlink()


@pytest.mark.parametrize(
    ("written", "broken", "said"),
    [
        ("  fsdp_version", "\tfsdp_version", "a tab indents this line"),
        ("  fsdp_state_dict_type", "\tfsdp_state_dict_type", "a tab indents this line"),
        ("bf16", "@bf16", "a value cannot start with '@': put it in quotes"),
        ("bf16", "bf16: x", "put the value in quotes"),
        ("  fsdp_state_dict_type", " fsdp_state_dict_type", "not indented as the lines"),
        ("bf16", "bf16\x07", "the text holds U+0007"),
        ("bf16", "'it's'", "text stands behind a closed value"),
        ("bf16", '"bf16" x', "put all of it in quotes"),
        ("bf16", '"bf16", "fp16"', "text stands behind a closed value"),
        ("bf16", "[bf16]]", "text stands behind a closed value"),
    ],
)
def test_what_is_not_yaml_is_told_in_words_of_the_file(written: str, broken: str, said: str) -> None:
    assert said in messages(FSDP2.replace(written, broken))["FSD104"]


def test_a_list_of_processes_is_one_finding() -> None:
    assert set(messages(FSDP2.replace("num_processes: 8", "num_processes: [8]"))) == {"FSD205"}


@pytest.mark.parametrize(
    ("right", "misspelt"),
    [
        ("TRANSFORMER_BASED_WRAP", "TRANSFORMR_BASED_WRAP"),
        ("SHARDED_STATE_DICT", "SHARDED_STATEDICT"),
    ],
)
def test_a_misspelt_choice_can_be_fixed_and_causes_no_other_finding(right: str, misspelt: str) -> None:
    assert set(messages(FSDP2.replace(right, misspelt))) == {"FSD206"}
    assert run(["validate", "--fix", "given.yaml"]) == 0
    assert Path("given.yaml").read_text() == FSDP2


@pytest.mark.parametrize("written", ["BY_BLOCKS", "42", "$W", "${NO_WRAP}", "$SIZE_BASED_WRAP"])
def test_a_choice_that_is_near_nothing_has_no_fix(written: str) -> None:
    broken = FSDP2.replace("TRANSFORMER_BASED_WRAP", written)
    assert "FSD206" in messages(broken)
    assert run(["validate", "--fix", "given.yaml"]) == 1
    assert Path("given.yaml").read_text() == broken


def test_what_several_machines_lack_is_named() -> None:
    text = FSDP2.replace("num_machines: 1", "num_machines: 2")
    assert messages(text)["FSD329"] == "several machines without main_process_ip and main_process_port"
    port = messages(text + "main_process_port: 29500\n")
    assert port["FSD329"] == "several machines without main_process_ip"


def test_a_folder_counts_files_that_are_not_utf8_apart(capsys: pytest.CaptureFixture[str]) -> None:
    Path("shell.yaml").write_text(FSDP2, encoding="utf-16")
    Path("compose.yaml").write_text("services:\n  web: {image: nginx}\n")
    Path("good.yaml").write_text(FSDP2)

    assert run(["validate", "."]) == 0
    assert capsys.readouterr().out.endswith("; 1 of other programs skipped; 1 not UTF-8 skipped\n")


@pytest.mark.parametrize(
    ("lines", "precision"),
    [
        ("", "bf16"),
        ("bf16: auto\n", "bf16"),
        ("bf16: false\n", "no"),
        ("bf16:\n", "no"),
        ("fp16: true\n", "fp16"),
        ("fp16:\n", "bf16"),
        ("bf16: auto\nfp16: true\n", "fp16"),
        ("float16: true\n", "bf16"),
        ("bf16: false\nfloat16: true\n", "fp16"),
    ],
)
def test_axolotl_trains_in_bf16_unless_the_file_says_otherwise(lines: str, precision: str) -> None:
    Path("given.yaml").write_text(AXOLOTL + lines)
    settings, run = read_settings("given.yaml").settings, describe_path(Path("given.yaml"))
    assert settings is not None
    assert run is not None
    assert settings.mixed_precision == precision
    assert run.compute_dtype == ("fp32" if precision == "no" else precision)


def test_what_is_not_explained_names_no_reader_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("zero.json").write_text('{"zero_optimization": {"stage": 3}, "train_batch_size": 8}')

    assert run(["explain", "zero.json"]) == 1
    out = capsys.readouterr().out
    assert "read by" not in out
    assert "a DeepSpeed configuration" in out
    assert "help: " in out


def test_a_recipe_of_our_own_is_known() -> None:
    said = messages("model:\n  reference: qwen3:tiny\ndata:\n  source: synthetic\nsteps: 3\n")
    assert "a recipe of fsdptool" in said["FSD110"]
    assert "--dry-run" in said["FSD110"]
    (refused,) = read_settings("given.yaml").diagnostics
    assert "emit-config" not in str(refused.help)


def test_a_run_that_is_described_is_not_called_unexplained(capsys: pytest.CaptureFixture[str]) -> None:
    batch = "batch: {micro_batch: 2, sequence_length: 128}"
    recipe = f"model: {{reference: 'gpt2:small'}}\ndata: {{source: synthetic}}\nsteps: 3\n{batch}\n"
    Path("recipe.yaml").write_text(recipe)
    flags = "--model_name_or_path gpt2 --per_device_train_batch_size 4 --output_dir out"
    Path("start.sh").write_text(f"CMD=(torchrun run_clm.py)\nCMD+=({flags})\neval ${{CMD[@]}}\n")
    for name in ("recipe.yaml", "start.sh"):
        assert run(["explain", name]) == 0
        out = capsys.readouterr().out
        assert "run described for" in out
        assert "not explained" not in out


def test_the_beginning_of_codes_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["rule", "fsd32"]) == 0
    codes = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {"FSD326", "FSD329"} <= codes
    assert all(code.startswith("FSD32") for code in codes)
    assert run(["rule", "FSD9999"]) == 2


def test_explained_learning_is_not_a_dictionary_of_python(capsys: pytest.CaptureFixture[str]) -> None:
    Path("given.yaml").write_text(AXOLOTL + "learning_rate: 0.0002\nsequence_len: 128\nmicro_batch_size: 1\n")

    assert run(["explain", "given.yaml"]) == 0
    out = capsys.readouterr().out
    assert "learning_rate 0.0002" in out
    assert "{'" not in out


@pytest.mark.parametrize(
    "options", [["--gpus", "8", "--nodes", "3"], ["--gpus", "6", "--tp", "4"]], ids=["nodes", "tp"]
)
def test_counts_that_do_not_divide_come_with_a_remedy(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["emit-config", "gpt2:small", *options]) == 2
    err = capsys.readouterr().err
    assert "cannot be divided evenly" in err
    assert "help: " in err
