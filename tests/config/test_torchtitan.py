"""torchtitan's TOML: places in the text, its defaults, and what it refuses."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from fsdptool.cli.app import run
from fsdptool.config import read_settings
from fsdptool.config.dialects.torchtitan import keys_of
from fsdptool.config.migrate import repair, write_across
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.files.tree import ParseError, parse_toml, to_python
from fsdptool.planning import Options, read_request
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


@pytest.mark.parametrize(
    ("model", "severity"),
    [("transformers_modeling_backend", "warning"), ("simple_fsdp.llama3", "warning"), ("llama3", "error")],
)
def test_keys_of_an_experiment_may_be_defined_on_its_command_line(model: str, severity: str) -> None:
    text = f'[model]\nname = "{model}"\n[parallelism]\n[own_table]\nmodel = "x"\n'
    (found,) = read_settings(text, dialect="torchtitan").diagnostics
    assert (found.code, found.severity) == ("FSD201", severity)
    assert ("--job.custom_config_module" in found.message) == (severity == "warning")


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
    request = read_request(Options(reference="llama3:8b", config="job.toml", gpu="H100-80GB-SXM"))
    settings = request.inputs.settings
    # A plan has a number of processes, which the file leaves open.
    assert replace(settings, num_processes=None) == read_settings(JOB).settings and request.diagnostics == ()
    assert settings.num_processes == 1
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


OLD = """\
[job]
print_args = true
[training]
steps = 10
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 4
tensor_parallel_degree = 2  # within a node
compile = true
warmup_steps = 5
[lr_scheduler]
decay_type = "cosine"
[checkpoint]
enable_checkpoint = true
[memory_estimation]
enabled = false
[experimental]
context_parallel_degree = 1
"""


def test_moved_keys_are_moved_and_hybrid_sharding_stays() -> None:
    reading = read_settings(OLD)
    assert len(reading.errors) == 9 and {item.code for item in reading.errors} == {"FSD201"}
    assert any("[parallelism] data_parallel_replicate_degree now" in item.message for item in reading.errors)
    # Nothing is removed: that would turn hybrid sharding into sharding over all ranks.
    assert all("remove" not in (item.help or "") for item in reading.errors)
    fixed = repair(reading, unsafe=True)
    data = tomllib.loads(fixed.after.text)
    assert data == {
        "job": {"print_config": True},
        "training": {"steps": 10},
        "lr_scheduler": {"decay_type": "cosine", "warmup_steps": 5},
        "checkpoint": {"enable": True},
        "memory_estimation": {"enable": False},
        "experimental": {},
        "parallelism": {
            "data_parallel_replicate_degree": 2,
            "data_parallel_shard_degree": 4,
            "tensor_parallel_degree": 2,
            "context_parallel_degree": 1,
        },
        "compile": {"enable": True},
    }
    settings = fixed.reading.require()
    assert (settings.mesh.dp_replicate, settings.mesh.dp_shard, settings.mesh.tp) == (2, 4, 2)
    assert repair(reading).after.text == OLD  # only on request: the file begins to count


def test_a_key_that_is_in_its_new_place_already_is_only_removed() -> None:
    text = OLD + "[parallelism]\ndata_parallel_replicate_degree = 4\n"
    again = next(item for item in read_settings(text).errors if "written there, too" in item.message)
    assert again.line == 5 and again.fix is not None and again.fix.description.startswith("remove")


SECTIONS = ("job", "profiling", "metrics", "model", "optimizer", "lr_scheduler", "training", "parallelism",
            "checkpoint", "activation_checkpoint", "compile", "quantize", "quantize.linear.float8", "comm",
            "memory_estimation", "fault_tolerance", "experimental", "validation")  # fmt: skip


@pytest.mark.parametrize("section", SECTIONS)
def test_unknown_keys_of_every_section_are_reported(section: str) -> None:
    others = "".join(f"[{name}]\n" for name in ("model", "training") if name != section)
    text = f"{others}[{section}]\nno_such_key_at_all = 1\n"
    assert [item.code for item in read_settings(text).errors] == ["FSD201"]


@pytest.mark.parametrize(
    ("target", "text", "severities"),
    [
        (
            "0.1.0",
            "[training]\ncompile = true\n[checkpoint]\nenable_checkpoint = true\n[float8]\nemulate = true\n",
            [],
        ),
        ("0.1.0", "[compile]\nenable = true\n[training]\nsteps = 1\n", ["warning"]),
        ("0.2.0", "[debug]\nseed = 1\n[training]\nsteps = 1\n", ["warning"]),
        ("0.2.2", "[debug]\nseed = 1\n[training]\nsteps = 1\n", []),
        ("0.2.0", "[training]\nseed = 1\n[job]\n", []),
        ("0.2.2", "[training]\nseed = 1\n[job]\n", ["error"]),
        ("0.2.0", "[mx]\nrecipe_name = 'a'\n[training]\nsteps = 1\n", ["error"]),
    ],
)
def test_keys_are_those_of_the_version(target: str, text: str, severities: list[str]) -> None:
    reading = read_settings(text, dialect="torchtitan", target=f"torchtitan=={target}")
    assert [item.severity for item in reading.diagnostics if item.code == "FSD201"] == severities


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torchtitan", "tyro", "triton")), reason="needs torchtitan"
)
def test_the_keys_are_those_that_torchtitan_takes() -> None:
    """Its own function, over every key of the table and over one that is not in it."""
    from importlib.metadata import version

    from torchtitan.config import ConfigManager, JobConfig  # type: ignore[import-not-found]

    known = keys_of(version("torchtitan"))
    take = ConfigManager()._dict_to_dataclass
    for section, keys in known.items():
        for key in (*keys, "no_such_key"):
            data: dict[str, object] = {key: 1}
            for name in reversed(section.split(".")):
                data = {name: data}
            if key in keys:
                take(JobConfig, data)
            else:
                with pytest.raises(ValueError, match="Invalid field names"):
                    take(JobConfig, data)
