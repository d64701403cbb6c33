"""The commands as functions: what a notebook or a script of a platform team calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import fsdptool
from fsdptool.cli.app import run
from fsdptool.errors import ConfigError
from fsdptool.planning import plan_document

MISSPELT = """\
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_polcy: TRANSFORMER_BASED_WRAP
num_processes: 4
"""


def test_validate_says_what_the_command_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(MISSPELT)
    verdict = fsdptool.validate(tmp_path / "a.yaml", gpu="H100-80GB-SXM", gpus=4)
    assert (verdict.exit_code(), verdict.exit_code(strict=True)) == (0, 1)
    asked = ["validate", str(tmp_path / "a.yaml"), "--gpu", "H100-80GB-SXM", "--gpus", "4", "--strict"]
    assert run([*asked, "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["files"] == verdict.document()["files"]
    assert len(fsdptool.validate([tmp_path, str(tmp_path / "a.yaml")]).readings) == 1


def test_a_plan_becomes_the_file_that_was_planned(tmp_path: Path) -> None:
    plan = fsdptool.plan("gpt2:small", gpu="L4-24GB", gpus=4, sequence_length=128, search=False)
    written = yaml.safe_load(fsdptool.emit_config(plan=plan))
    assert written["num_processes"] == 4
    assert written["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] == "GPT2Block"
    (tmp_path / "plan.json").write_text(json.dumps(plan_document(plan)))
    (tmp_path / "out.yaml").write_text(fsdptool.emit_config(plan=plan))
    asked = ["emit-config", "--plan", str(tmp_path / "plan.json"), "-o", str(tmp_path / "out.yaml")]
    assert run([*asked, "--recipe-output", str(tmp_path / "recipe.yaml")]) == 2
    assert not (tmp_path / "recipe.yaml").exists(), "both or neither"
    assert fsdptool.validate(tmp_path / "out.yaml").errors == 0


def test_a_model_alone_starts_from_a_preset() -> None:
    written = yaml.safe_load(fsdptool.emit_config("gpt2:small", processes=2, precision="bf16"))
    assert (written["num_processes"], written["mixed_precision"]) == (2, "bf16")


def test_neither_or_both_is_one_line() -> None:
    with pytest.raises(ConfigError, match="a model, a plan or a preset is required"):
        fsdptool.emit_config()
    with pytest.raises(ConfigError, match="not both"):
        fsdptool.emit_config("gpt2:small", plan="plan.json")
