"""``check``: the training files of a repository against their hardware, and against what they were."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fsdptool.cli.app import run
from fsdptool.files.values import load_schema
from fsdptool.records.advice import Suggestion, SuggestionKind
from fsdptool.records.codec import to_json
from fsdptool.records.config_documents import CheckedFile
from fsdptool.report.checks import change
from fsdptool.report.console.train import memory_text
from fsdptool.report.plan_words import change_words

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
TRAIN = """\
base_model: org/model
adapter: lora
lora_r: 4
lora_target_linear: true
sequence_len: 64
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_torch_fused
bf16: true
gradient_checkpointing: true
sample_packing: true
datasets: [{path: org/data, type: alpaca}]
learning_rate: 0.0002
"""
LARGE = TRAIN.replace("micro_batch_size: 2", "micro_batch_size: 1024")
SETTINGS = """\
[tool.fsdptool.hardware]
"large/*" = {gpu = "H100-80GB-SXM", gpus = 8, model = "config.json"}
"*.yaml" = {gpu = "RTX-4090-24GB", gpus = 2, model = "config.json"}
"*.sh" = {gpu = "RTX-4090-24GB", model = "config.json"}
"""
FSDP = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
"""
LINE = (
    "accelerate launch --config_file fsdp.yaml sft.py --model_name_or_path org/model --max_length 64"
    " --per_device_train_batch_size 2 --output_dir out --bf16 --dataset_name d\n"
)


def git(*arguments: str) -> None:
    call = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    subprocess.run(call, check=True, capture_output=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SIZES))
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / "pod.yaml").write_text("apiVersion: v1\nkind: Pod\n")
    git("init", "-q", ".")
    git("add", "-A")
    git("commit", "-qm", "first")
    return tmp_path


def checked(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run(["check", *arguments, "--format", "json"])
    document = json.loads(capsys.readouterr().out)
    jsonschema.validate(document, load_schema("check"))
    return code, {item["path"]: item for item in document["files"]}


@pytest.mark.slow
def test_a_run_that_does_not_fit_fails_with_what_the_change_did(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(capsys, "--base", "HEAD") == (0, {})
    (project / "train.yaml").write_text(LARGE)
    code, files = checked(capsys, "--base", "HEAD")
    assert (code, list(files)) == (1, ["train.yaml"])
    item = files["train.yaml"]
    assert (item["verdict"], item["hardware"], item["line"]) == ("does_not_fit", "2 RTX-4090-24GB", 6)
    assert item["needed_bytes"] > item["usable_bytes"] > item["before"]["needed_bytes"]
    assert item["before"]["verdict"] == "fits"
    assert item["smallest_change"]["fits"]
    assert run(["check", "--base", "HEAD"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("train.yaml:6: does not fit: needs ")
    assert f"; smallest change that fits: {item['smallest_change']['change']}" in line
    assert run(["check", "--base", "HEAD", "--format", "github"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("::error title=fsdptool check,file=train.yaml,line=6::does not fit: needs ")
    assert run(["check", "--base", "HEAD", "--format", "sarif"]) == 1
    log = json.loads(capsys.readouterr().out)
    (result,) = log["runs"][0]["results"]
    place = {"artifactLocation": {"uri": "train.yaml"}, "region": {"startLine": 6}}
    assert result["locations"] == [{"physicalLocation": place}]
    assert result["level"] == "error"
    assert result["message"]["text"].startswith("does not fit: needs ")
    assert log["runs"][0]["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == "does_not_fit"
    assert run(["check", "--base", "HEAD", "--format", "markdown"]) == 1
    table = capsys.readouterr().out
    assert "| file | verdict | needs | before | smallest change that fits |" in table
    assert "| `train.yaml` | **does not fit** | " in table


@pytest.mark.slow
def test_a_change_of_an_included_file_is_a_change_of_the_run(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "fsdp.yaml").write_text(FSDP)
    (project / "run.sh").write_text(LINE)
    git("add", "-A")
    git("commit", "-qm", "second")
    (project / "fsdp.yaml").write_text(FSDP.replace("num_processes: 2", "num_processes: 4"))
    _, files = checked(capsys, "--base", "HEAD")
    item = files.pop("run.sh")
    assert (item["changed_in"], item["line"], item["hardware"]) == ("fsdp.yaml", 3, "4 RTX-4090-24GB")
    assert item["before"]["same_run"] is False and item["verdict"] == "fits"
    assert [other["named"] for other in files.values()] == [False]  # the included file describes no run


@pytest.mark.slow
def test_the_first_pattern_that_matches_names_the_hardware(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "large").mkdir()
    (project / "large" / "train.yaml").write_text(TRAIN)
    code, files = checked(capsys)
    assert code == 0
    hardware = {path: item["hardware"] for path, item in files.items() if item["hardware"]}
    assert hardware == {"large/train.yaml": "8 H100-80GB-SXM", "train.yaml": "2 RTX-4090-24GB"}
    _, files = checked(
        capsys, "train.yaml", "--gpu", "A100-80GB-SXM", "--gpus", "4", "--model", "config.json"
    )
    assert files["train.yaml"]["hardware"] == "4 A100-80GB-SXM"
    (project / "pyproject.toml").unlink()
    assert run(["check"]) == 2
    assert "nothing says on which GPUs large/train.yaml runs" in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_not_certain_is_listed_and_does_not_fail(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paged = LARGE.replace("adamw_torch_fused", "paged_adamw_8bit")
    (project / "train.yaml").write_text(paged)
    (project / "other.yaml").write_text(TRAIN)
    (project / "broken.yaml").write_text(TRAIN + "a: [\n")
    settings = SETTINGS.replace('"*.yaml"', '"other.yaml" = {gpu = "RTX-4090-24GB"}\n"*.yaml"')
    (project / "pyproject.toml").write_text(settings)
    code, files = checked(capsys, "--base", "HEAD")
    assert code == 0
    verdicts = {path: item["verdict"] for path, item in files.items()}
    assert verdicts == {"broken.yaml": "not_planned", "other.yaml": "not_planned", "train.yaml": "unknown"}
    assert files["other.yaml"]["reason"] == "trains org/model, whose sizes are not known here"
    assert "config.json" in files["other.yaml"]["help"]
    assert "could turn the answer" in files["train.yaml"]["reason"]
    assert run(["check", "--base", "HEAD"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 4 and lines[-1] == "1 file changed since HEAD planned: 1 unknown; 2 files not planned"
    )


@pytest.mark.slow
def test_nothing_is_run_and_a_wrong_revision_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Filters, external diffs and the monitor that a repository configures are not started."""
    script = project / "script.sh"
    script.write_text(f"#!/bin/sh\ntouch {project}/ran\ncat\n")
    script.chmod(0o755)
    (project / ".gitattributes").write_text("*.yaml filter=x diff=x\n")
    for key in ("filter.x.clean", "filter.x.smudge", "diff.x.textconv", "diff.external", "core.fsmonitor"):
        git("config", key, str(script))
    (project / "train.yaml").write_text(TRAIN.replace("64", "32"))
    _, files = checked(capsys, "--base", "HEAD", "train.yaml")
    assert files["train.yaml"]["before"]["verdict"] == "fits"
    (project / "new.yaml").write_text(TRAIN)
    assert run(["check", "--base", "HEAD", "new.yaml"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("2 RTX-4090-24GB; new file")
    assert not (project / "ran").exists()
    for name in ("nothing", "--help", "-h", "HEAD:train.yaml"):
        assert run(["check", f"--base={name}"]) == 2
        assert "has no revision" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('"*" = {gpu = "H100-80GB-SXM", gpus = "8"}', "gpus must be a number, 1 or more"),
        ('"*" = {gpu = "H100-80GB-SXM", gups = 8}', "did you mean gpus"),
        ('"*" = {gpus = 8}', "must name a gpu or a cluster"),
        ('"*" = {gpu = "H100-80GB-SXM", cluster = "c.yaml"}', "must name a gpu or a cluster"),
        ('"*" = "H100-80GB-SXM"', "must be a table of patterns"),
    ],
)
def test_wrong_settings_are_one_line(
    table: str, said: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "pyproject.toml").write_text(f"[tool.fsdptool.hardware]\n{table}\n")
    assert run(["check"]) == 2
    assert said in capsys.readouterr().err


def test_a_change_of_several_settings_names_them() -> None:
    together = Suggestion(
        "all of the changes above", {"micro_batch": 1, "checkpointing": "full"}, 1, True, "",
        SuggestionKind.COMBINED, environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
    )  # fmt: skip
    item = CheckedFile("a.yaml", None, None, "trl", "does_not_fit", smallest_change=together)
    assert change(item) == "micro batch 1, checkpointing full, PYTORCH_ALLOC_CONF=expandable_segments:True"
    more = Suggestion(
        "16 GPUs in 2 nodes", {"micro_batch": 1, "dp_shard": 16}, 1, True, "",
        SuggestionKind.MORE_GPUS, hardware={"gpus": 8, "nodes": 2}, with_all_above=True,
    )  # fmt: skip
    assert change(replace(item, smallest_change=more)) == "16 GPUs in 2 nodes, micro batch 1"
    assert change_words(more) == "16 GPUs in 2 nodes, with all changes above"
    account = {"rank": 0, "seen": {"moment": "forward"}, "planned_moment": None, "peak_moment": None}
    said = memory_text({**account, "next_steps": [to_json(together), to_json(more)]})
    assert "next step: all of the changes above: 1 B" in said
    assert "next step: 16 GPUs in 2 nodes, with all changes above: 1 B" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lost.yaml"], "lost.yaml does not exist"),
        ([".", "--gpu", "nope"], "unknown GPU 'nope'"),
        ([".", "--gpu", "L4", "--gpus", "0"], "invalid value for '--gpus'"),
        ([".", "--gpu", "L4", "--nodes", "0"], "invalid value for '--nodes'"),
    ],
)
def test_a_mistake_in_the_call_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\n")
    assert run(["check", *arguments]) == 2
    assert message in capsys.readouterr().err
