"""Which program reads which file, what is said where it does not, and which files a folder stands for."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
from accelerate.commands.launch import launch_command_parser
from test_rules_against_accelerate import GOOD

from fsdptool.cli.app import run
from fsdptool.config import read_settings, write_settings
from fsdptool.config.dialects import load_registry
from fsdptool.config.migrate import migrate_file, repair
from fsdptool.config.programs import PROGRAMS
from fsdptool.config.shell import _SWITCHES
from fsdptool.errors import ConfigError
from fsdptool.files.values import load_schema
from fsdptool.records.sharding import FsdpSettings

NATURAL = {dialect.name: dialect.consumers[0] for dialect in load_registry().all()}
READS = {name: [dialect.name for dialect in load_registry().read_by(name)] for name in PROGRAMS}
TEXTS = {
    dialect.name: write_settings(
        dialect.base or FsdpSettings(wrap_classes=() if "wrap_classes" in dialect.cannot else ("Block",)),
        dialect,
    )
    for dialect in load_registry().all()
}


@pytest.mark.parametrize("dialect", NATURAL)
@pytest.mark.parametrize("consumer", PROGRAMS)
def test_a_file_is_judged_for_its_readers_only(consumer: str, dialect: str) -> None:
    reading = read_settings(TEXTS[dialect], consumer=consumer)
    assert reading.consumer.name == consumer and reading.dialect == dialect
    if dialect in READS[consumer]:
        assert "FSD114" not in {item.code for item in reading.diagnostics} and reading.settings is not None
        return
    assert [item.code for item in reading.diagnostics] == ["FSD114"]
    assert reading.status == "error" and reading.settings is None and not reading.effective
    said = reading.diagnostics[0]
    assert said.message == f"{consumer} does not read {dialect} files"
    assert f"--consumer {NATURAL[dialect]}" in (said.help or "")
    # What the advice says works: judged so there is no such finding, and the migration exists.
    assert "FSD114" not in {
        item.code for item in read_settings(TEXTS[dialect], consumer=NATURAL[dialect]).diagnostics
    }
    assert f"migrate --to {READS[consumer][0]}" in (said.help or "")
    assert repair(reading, unsafe=True).after.text == TEXTS[dialect]


def test_a_target_is_a_version_of_one_program() -> None:
    accelerate = GOOD
    assert read_settings(accelerate, target="1.12").consumer.version == "1.12"
    assert [item.code for item in read_settings(accelerate, target="transformers==5.1").errors] == ["FSD114"]
    assert [item.code for item in read_settings(TEXTS["axolotl"], target="accelerate==1.12").errors] == [
        "FSD114"
    ]
    factory = read_settings(TEXTS["llamafactory"], target="transformers==5.1")
    assert (factory.consumer.name, factory.consumer.version) == ("llamafactory", "5.1")
    # The comment in the file is about another program: the target says nothing of it.
    noted = "# fsdptool: consumer=fsdptool\n" + accelerate
    ours = read_settings(noted, target="accelerate==1.12").consumer
    assert ours.name == "fsdptool" and ours.version == read_settings(noted).consumer.version
    for wrong in ("accelerate==", "accelerate==new", "nobody==1.0", "accelerate=1.2"):
        with pytest.raises(ConfigError, match="--target"):
            read_settings(accelerate, target=wrong)
    with pytest.raises(ConfigError, match="name different programs"):
        read_settings(accelerate, consumer="accelerate", target="transformers==5.1")


def test_a_fix_is_judged_for_the_same_version() -> None:
    noted = "# fsdptool: consumer=fsdptool\n" + GOOD.replace("num_processes: 8", "num_processes: '8'")
    reading = read_settings(noted, target="accelerate==1.12")
    fixed = repair(reading)
    assert fixed.applied and fixed.reading.consumer == reading.consumer


@pytest.mark.parametrize(
    ("name", "message"),
    [("trainer", "trainer does not read accelerate files"), ("bogus", "the file says consumer=bogus;")],
)
def test_the_files_own_word_is_a_finding_at_its_line(name: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(f"debug: false\n# fsdptool: consumer={name}\n{GOOD}")
    reading = read_settings(path)
    assert [(item.code, item.line) for item in reading.errors] == [("FSD114", 2)]
    assert reading.errors[0].message.startswith(message)
    refused = migrate_file(path)
    assert refused.after is None and (refused.refusal or "").startswith(message)
    # The command line outranks the comment.
    assert not read_settings(path, consumer="accelerate").errors


def test_a_command_line_is_for_the_program_it_starts(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("simpletuner train --model_family flux --fsdp-enable --num_processes 4\n")
    reading = read_settings(path)
    assert reading.consumer.name == "simpletuner"
    # Judged for the program that refuses the spelling; ours is forgiving.
    assert [(item.code, item.fix is not None) for item in reading.errors] == [("FSD206", True)]
    assert not read_settings(path, consumer="fsdptool").errors
    path.write_text(path.read_text().replace("fsdp-enable", "fsdp_enable --fsdp_version 1"))
    refused = migrate_file(path)
    assert refused.after is None and refused.help == "change the command line to --fsdp_version 2 by hand"
    path.write_text("accelerate launch --use_fsdp --fsdp_version 2 --num_processes 4 train.py\n")
    assert read_settings(path).consumer.name == "accelerate"


@pytest.mark.parametrize(
    "line",
    [
        "accelerate launch --num_processes 4 --fsdp_version 2 --use_fsdp train.py {}",
        "accelerate launch --use_fsdp --fsdp_version=2 --num_processes 4 \\\n  train.py \\\n  {}",
        "python -m accelerate.commands.launch --use_fsdp --fsdp_version 2 --num_processes 4 -m my.module {}",
        "srun -n 4 accelerate launch $MORE --use_fsdp --fsdp_version 2 --num_processes 4 train.py {}",
    ],
)
def test_what_follows_the_script_is_the_scripts(line: str) -> None:
    """accelerate's own parser agrees: the launcher's arguments end at the first word that is no value."""
    text = line.format("--mixed_precision bf16 --num_processes 9 --debug")
    reading = read_settings(text + "\n", dialect="flags")
    assert not reading.errors, [item.message for item in reading.errors]
    assert (reading.version, reading.facts["num_processes"], reading.facts["mixed_precision"]) == (2, 4, "no")
    own = [word for word in text.replace("\\", " ").partition("launch ")[2].split() if word != "$MORE"]
    parsed = launch_command_parser().parse_args(own)
    assert (parsed.use_fsdp, parsed.fsdp_version, parsed.num_processes) == (True, "2", 4)
    assert parsed.mixed_precision is None and not parsed.debug


def test_a_switch_with_a_value_is_an_error() -> None:
    """accelerate takes the value for the script, and all behind it for the script's arguments."""
    line = "accelerate launch --use_fsdp true --fsdp_version=2 train.py"
    parsed = launch_command_parser().parse_args(line.split()[2:])
    assert (parsed.training_script, parsed.fsdp_version) == ("true", "1")
    assert [item.code for item in read_settings(line + "\n", dialect="flags").errors] == ["FSD206"]


def test_the_launchers_switches_are_its_own() -> None:
    switches = {
        name.lstrip("-").replace("-", "_")
        for action in launch_command_parser()._actions
        if action.nargs == 0
        for name in action.option_strings
    }
    assert switches - {"h", "help"} == _SWITCHES


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "configs/a.yaml": GOOD,
        "configs/deep/b.YML": GOOD.replace("num_processes: 8", "num_processes: 1"),
        "configs/docker.yaml": "services:\n  web: {}\n",
        "configs/package.json": "[]",
        "configs/notes.txt": "none of ours",
        "configs/.git/c.yaml": ": [",
        "configs/node_modules/d.json": "{",
        "configs/deep/.venv/lib/e.yaml": ": [",
        "readme.md": "# Title\n\nSome prose: with a colon.\n",
        "script.py": "settings = {}\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_a_folder_stands_for_its_configurations(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "configs", "configs/a.yaml", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(load_schema("validate")).validate(data)
    found = {
        item["path"]: [(finding["code"], finding["severity"]) for finding in item["findings"]]
        for item in data["files"]
    }
    assert found == {
        "configs/a.yaml": [],
        "configs/deep/b.YML": [("FSD327", "warning")],
        "configs/docker.yaml": [("FSD109", "info")],
        "configs/package.json": [("FSD107", "info")],
    }
    assert run(["validate", "configs", "--strict", "--quiet"]) == 1


@pytest.mark.parametrize("name", ["configs/docker.yaml", "readme.md", "configs/notes.txt"])
def test_a_named_file_that_is_no_configuration_is_an_error(name: str, folder: Path) -> None:
    assert run(["validate", name]) == 1


def test_an_empty_folder_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "empty"]) == 2
    assert run(["validate", "configs", "empty"]) == 2
    assert capsys.readouterr().err.count("there is no YAML, JSON or TOML file in empty") == 2


def test_a_fix_is_tried_under_the_conditions_of_its_reading() -> None:
    """A variable decides a setting that the file does not write, before a fix and after it."""
    text = (
        "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_use_orig_params: true\n  fsdp_cpu_ram_efficient_loading: false\nmixed_precision: bf16\n"
    )
    reading = read_settings(text, environment={"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"})
    fixed = repair(reading)
    assert [item.code for item in fixed.applied] == ["FSD302"]
    assert reading.facts["state_dict_type"] == fixed.reading.facts["state_dict_type"] == "full"


@pytest.mark.parametrize("key", ["use_orig_params", "sync_module_states"])
def test_axolotl_reads_booleans_of_fsdp1_under_both_versions(key: str) -> None:
    """Its schema judges them under version 2 as well, and drops the other keys of FSDP1."""
    for version in (1, 2):
        text = f"base_model: m\ndatasets: []\nfsdp_version: {version}\nfsdp_config:\n  {key}: maybe\n"
        found = {item.code: item.message for item in read_settings(text).diagnostics}
        assert key in found["FSD206"], version
        dropped = read_settings(text.replace(f"{key}: maybe", "limit_all_gathers: true"))
        assert {1: "FSD202", 2: "FSD302"}[version] in {item.code for item in dropped.diagnostics}
