"""torchtitan's TOML: places in the text, its defaults, and what it refuses."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fsdptool.cli.app import run
from fsdptool.config import read_settings
from fsdptool.config.fixes import repair
from fsdptool.config.migrate import write_across
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.files.toml_tree import parse_toml
from fsdptool.files.tree import ParseError, to_python
from fsdptool.planning.request import read_request_settings
from fsdptool.records.sharding import FsdpSettings

JOB = """\
# Llama 3
[model]
name = "llama3"

[training]
local_batch_size = 1
global_batch_size = 128  # per step
enable_cpu_offload = true

[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
"""


def found(*changes: tuple[str, str], add: str = "") -> list[tuple[str, int | None]]:
    text = JOB + add
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    reading = read_settings(text)
    assert reading.dialect == "torchtitan"
    return [(item.code, item.line) for item in reading.diagnostics]


def test_its_settings_and_defaults() -> None:
    reading = read_settings(JOB)
    settings = reading.require()
    assert (settings.mesh.dp_shard, settings.mesh.tp, settings.cpu_offload) == (8, 2, True)
    assert settings.mixed_precision == "bf16" and settings.state_dict_type == "sharded"
    assert not reading.diagnostics
    origins = {item.key: item.origin for item in reading.effective}
    assert origins["dp_shard"] == "line 11" and "selective" in origins["activation_checkpointing"]
    assert read_settings(JOB.replace("= 8\n", "= -1\n")).require().mesh.dp_shard is None


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (("= 128", "= 12"), ("FSD360", 7)),
        (("shard_degree = 8", "shard_degree = 0"), ("FSD206", 11)),
        (("enable_cpu_offload", "enable_offload"), ("FSD201", 8)),
        (("enable_cpu_offload = true", 'enable_cpu_offload = "yes"'), ("FSD205", 8)),
        (("[model]", "[modle]"), ("FSD201", 2)),
        (("tensor_parallel_degree = 2", "pipeline_parallel_degree = 2"), ("FSD361", 12)),
        (("shard_degree = 8", "shard_degree = 1"), ("FSD113", 11)),
    ],
)
def test_what_it_refuses(change: tuple[str, str], code: tuple[str, int]) -> None:
    assert found(change) == [code]


def test_a_custom_module_may_add_keys() -> None:
    own = '[job]\ncustom_config_module = "mine"\n'
    assert found(("enable_cpu_offload", "enable_offload"), add=own) == []


def test_a_fix_keeps_the_rest_of_the_file() -> None:
    text = JOB + 'fsdp_reshard_after_forward = "nevr"  # why\r\n'
    fixed = repair(read_settings(SourceText(text)), unsafe=True)
    assert fixed.after.text == text.replace("nevr", "never") and fixed.reading.errors == ()


def test_it_is_found_planned_from_and_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'p'\n")
    (tmp_path / "Cargo.toml").write_text("[package]\nname = 'p'\n[dependencies]\n")
    assert run(["validate", "."]) == 0
    assert "1 file: no errors, no warnings; 1 of other programs skipped" in capsys.readouterr().out
    settings, findings = read_request_settings(tmp_path / "job.toml")
    assert settings == read_settings(JOB).settings and findings == ()
    assert run(["migrate", "job.toml", "--to", "accelerate"]) == 0
    assert read_settings(capsys.readouterr().out).require().mesh == settings.mesh


TOML = """\
title = 'a'  # first
"quoted key" = [1, # one
  2, "]"]
[a.b] # table
x.y = { z = 1, w = "# no comment" }
long = \"\"\"
[not] = a table
\"\"\"
[[list]]
n = 1
[[list]]
n = 2.5
"""


def test_the_tree_of_a_toml_file_is_what_tomllib_reads() -> None:
    root = parse_toml(TOML).root
    assert root is not None and to_python(root) == tomllib.loads(TOML)
    title, table = root.get("title"), root.get("a")
    assert title is not None and TOML[title.node.start : title.node.end] == "'a'"
    quoted = root.get("quoted key")
    assert quoted is not None and TOML[quoted.node.start : quoted.node.end] == '[1, # one\n  2, "]"]'
    assert table is not None and table.node.get("b") is not None
    with pytest.raises(ParseError, match="not TOML") as caught:
        parse_toml("a = 1\nb = = 2\n")
    assert caught.value.index == 10


def test_classes_to_wrap_are_left_to_torchtitans_own_models() -> None:
    text, notes = write_across(
        FsdpSettings(wrap_classes=("LlamaDecoderLayer",), num_processes=8), "torchtitan"
    )
    assert read_settings(text).dialect == "torchtitan"
    assert [note.partition(" is left out")[0] for note in notes][1:] == ["wrap_classes (LlamaDecoderLayer)"]
    with pytest.raises(ConfigError, match="wrap_policy"):
        write_across(FsdpSettings(wrap_policy="none"), "torchtitan")
