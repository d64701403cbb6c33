"""``audit`` names advisories, says what decides about the others, and ends with the documented status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import fsdptool
from fsdptool.cli.app import run
from fsdptool.errors import ConfigError
from fsdptool.files.values import load_schema

LAUNCH = """\
distributed_type: FSDP
num_processes: 4
mixed_precision: bf16
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_offload_params: true
  fsdp_cpu_ram_efficient_loading: true
"""
APPLIES = "accelerate-ram-loading-with-cpu-offload"
MAY_APPLY = "accelerate-persistent-buffers-ram-loading"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp.yaml").write_text(LAUNCH, encoding="utf-8")
    (tmp_path / "requirements.txt").write_text("accelerate==1.12.0\n", encoding="utf-8")
    return tmp_path


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = run(["audit", "fsdp.yaml", *arguments, "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, load_schema("audit"))
    return code, found


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {item["id"]: item["verdict"] for item in found["files"][0]["findings"]}


def test_what_applies_and_what_may(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = document(capsys, "--lock", "requirements.txt")
    assert code == 1
    assert found["versions"] == {"accelerate": ["1.12.0"]}
    assert verdicts(found)[APPLIES] == "applies"
    assert verdicts(found)[MAY_APPLY] == "may_apply"
    item = found["files"][0]["findings"][0]
    assert (item["id"], item["installed"], item["fixed_in"]) == (APPLIES, "1.12.0", "1.13.0")
    assert list(verdicts(found).values()) == sorted(verdicts(found).values())


def test_the_repaired_version_is_clean(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = document(capsys, "--lock", "requirements.txt", "--target", "accelerate==1.13.0")
    assert code == 0
    assert APPLIES not in verdicts(found)


def test_an_ignored_advisory_is_left_out(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = document(capsys, "--lock", "requirements.txt", "--ignore", APPLIES)
    assert (code, found["ignored"]) == (0, [APPLIES])
    assert APPLIES not in verdicts(found)
    with pytest.raises(ConfigError, match="there is no advisory") as refused:
        fsdptool.audit("fsdp.yaml", lock="requirements.txt", ignore=[APPLIES[:-1]])
    assert refused.value.help == f"did you mean {APPLIES}?"


def test_the_text_names_versions_change_and_link(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "fsdp.yaml", "--lock", "requirements.txt"]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"fsdp.yaml: {APPLIES} (crash) accelerate 1.12.0, fixed in 1.13.0" in text
    assert "https://github.com/huggingface/accelerate/pull/3910" in text
    assert f"{MAY_APPLY} (crash) may apply; the file does not show whether the model has persistent" in text


def test_code_scanning(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "fsdp.yaml", "--lock", "requirements.txt", "--format", "github"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"::error title=fsdptool {APPLIES},file=fsdp.yaml::") for line in lines)
    assert any(line.startswith(f"::notice title=fsdptool {MAY_APPLY},") for line in lines)
    assert run(["audit", "fsdp.yaml", "--lock", "requirements.txt", "--format", "sarif"]) == 1
    log = json.loads(capsys.readouterr().out)["runs"][0]
    rules = [rule["id"] for rule in log["tool"]["driver"]["rules"]]
    levels = {result["ruleId"]: result["level"] for result in log["results"]}
    assert (levels[APPLIES], levels[MAY_APPLY]) == ("error", "note")
    assert all(rules[result["ruleIndex"]] == result["ruleId"] for result in log["results"])


@pytest.mark.parametrize(
    ("written", "transformers", "runs"),
    [(None, "5.9.0", 1), (None, "5.10.1", 2), (2, "4.57.6", 1), (2, "5.0.0", 2), (1, "5.10.1", 1)],
)
def test_the_version_of_transformers_decides_which_fsdp_runs(
    project: Path, written: int | None, transformers: str, runs: int
) -> None:
    config: dict[str, Any] = {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    if written is not None:
        config["version"] = written
    arguments = {"output_dir": "out", "fsdp": "full_shard", "fsdp_config": config, "weight_decay": 0.1}
    (project / "args.json").write_text(json.dumps(arguments), encoding="utf-8")
    report = fsdptool.audit("args.json", target=[f"transformers=={transformers}", "accelerate==1.12.0"])
    assert report.files[0].fsdp == runs


def test_a_file_that_cannot_be_read_does_not_hide_the_others(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "broken.yaml").write_text("a: [", encoding="utf-8")
    assert run(["audit", "broken.yaml", "fsdp.yaml", "--lock", "requirements.txt"]) == 2
    text = capsys.readouterr().out
    assert "broken.yaml: not audited: " in text
    assert APPLIES in text


def test_versions_must_be_known(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "empty.txt").write_text("numpy==2.0\naccelerate\n", encoding="utf-8")
    assert run(["audit", "fsdp.yaml", "--lock", "empty.txt"]) == 2
    assert "none of the packages that advisories name" in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_that_the_base_lacks_is_imported(project: Path) -> None:
    heavy = "{'torch', 'numpy', 'transformers', 'accelerate'} & set(sys.modules)"
    script = (
        "import sys, fsdptool\n"
        "fsdptool.audit('fsdp.yaml', lock='requirements.txt')\n"
        f"print(sorted({heavy}))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
