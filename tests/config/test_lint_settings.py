"""What counts where: options, project settings, baselines, and files of other programs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_rules_against_accelerate import GOOD

from fsdptool.api.validate import validate
from fsdptool.cli.app import run
from fsdptool.config import read_settings
from fsdptool.config.lint_settings import LintSettings
from fsdptool.config.rules import RULES
from fsdptool.errors import ConfigError
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.report.code_scanning import sarif_document

ONE = GOOD.replace("num_processes: 8", "num_processes: 1")  # FSD327
OLD = ONE.replace("  fsdp_version: 2\n", "").replace("  fsdp_reshard_after_forward: true\n", "")  # and FSD301
DEAD = (
    GOOD + "  fsdp_use_orig_params: true\n  fsdp_sync_module_states: true\n  fsdp_backward_prefetch: null\n"
)
HELD = GOOD.replace("fsdp_reshard_after_forward: true", "fsdp_reshard_after_forward: banana") + (
    "  fsdp_backward_prefetch: BACKWARD_PRE\n"
)

FOREIGN = {
    "chart.yaml": "apiVersion: apps/v1\nkind: Deployment\n",
    "manifest.yaml": "apiVersion: v1\nkind: A\ndata:\n  c: |\n    distributed_type: FSDP\n---\nkind: Pod\n",
    "template.yaml": "{{- if .Values.x }}\nkind: {{ .Values.kind }}\n{{- end }}\n",
    "docker-compose.yml": 'version: "3"\nservices:\n  a: {image: b}\n',
    "package.json": '{"name": "accelerate", "version": "1.0.0", "private": true}',
    "tokenizer.json": '{"version": "1.0", "truncation": null, "model": {"type": "BPE"}}',
    "tsconfig.json": '{"compilerOptions": {}, // comment\n"version": 2}',
    "train.yaml": "model_name: x\noffload: true\nlr: 1\n",
    "playbook.yml": "- hosts: all\n",
    "ds.json": '{"zero_optimization": {"stage": 3}}',
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs" / "old").mkdir(parents=True)
    (tmp_path / "configs" / "one.yaml").write_text(ONE)
    (tmp_path / "configs" / "old" / "a.yaml").write_text(OLD)
    return tmp_path


def found(*paths: str, **options: object) -> dict[str, list[str]]:
    readings = validate(paths or ("configs",), **options).readings  # type: ignore[arg-type]
    return {
        Path(reading.path or "").name: [item.code for item in reading.diagnostics if item.severity != "info"]
        for reading in readings
    }


def test_the_longer_match_of_select_and_ignore_decides() -> None:
    def reports(code: str, **settings: tuple[str, ...]) -> bool:
        return LintSettings(**settings).reports(Diagnostic(code, "error", ""), None)  # type: ignore[arg-type]

    assert reports("FSD301") and not reports("FSD301", ignore=("FSD3",))
    assert reports("FSD301", ignore=("FSD3",), select=("ALL", "FSD301"))
    assert not reports("FSD301", ignore=("FSD301",), select=("FSD301",))
    assert not reports("FSD201", select=("FSD3",))
    # A file that is not judged is not a clean one, unless somebody says so.
    assert reports("FSD104", select=("FSD3",)) and not reports("FSD104", ignore=("FSD104",))


def test_options_choose_and_leave_out(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found() == {"one.yaml": ["FSD327"], "a.yaml": ["FSD327", "FSD301"]}
    assert found(select=["FSD30"]) == {"one.yaml": [], "a.yaml": ["FSD301"]}
    assert found(ignore=["fsd301,FSD327"]) == {"one.yaml": [], "a.yaml": []}
    assert found(exclude=["old"]) == found(exclude=["configs/old/*"]) == {"one.yaml": ["FSD327"]}
    assert found("configs/old/a.yaml", exclude=["a.y*ml"]) == {}
    with pytest.raises(ConfigError, match="FSD999 is not a rule"):
        found(ignore=["FSD999"])
    before = (project / "configs/old/a.yaml").read_text()
    assert run(["validate", "configs", "--unsafe-fixes", "--select", "FSD302"]) == 0
    assert (project / "configs/old/a.yaml").read_text() == before
    assert run(["validate", "configs", "--statistics", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert (
        "2  warning  FSD327  FSDP over a single process\n1  warning  FSD301  FSDP1 runs (1 with a fix)" in out
    )
    assert run(["validate", "configs", "--statistics", "--format", "sarif"]) == 2


def test_the_nearest_settings_count(project: Path) -> None:
    (project / "pyproject.toml").write_text(
        '[tool.fsdptool]\nignore = ["FSD327"]\nstrict = true\n'
        '[tool.fsdptool.per-file-ignores]\n"configs/old/*" = ["FSD301"]\n'
    )
    assert found() == {"one.yaml": [], "a.yaml": []} and run(["validate", "configs"]) == 0
    assert found(isolated=True)["a.yaml"] == ["FSD327", "FSD301"]
    assert found(select=["FSD327"]) == {"one.yaml": ["FSD327"], "a.yaml": ["FSD327"]}
    assert run(["validate", "configs", "--select", "FSD327"]) == 1  # strict
    assert run(["migrate", "--check", "configs"]) == 0 and run(
        ["migrate", "--check", "configs", "--isolated"]
    )
    (project / "configs" / "old" / "fsdptool.toml").write_text('select = ["FSD301"]')
    assert found() == {"one.yaml": [], "a.yaml": ["FSD301"]}
    (project / "configs" / "pyproject.toml").write_text("[tool.other]\n")  # does not count
    assert found()["one.yaml"] == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slect = []", "does not know slect"),
        ('select = "FSD3"', "select must be a list of strings"),
        ('ignore = ["FSD9"]', "FSD9 is not a rule"),
        ("strict = 1", "strict must be true or false"),
        ('per-file-ignores = ["a"]', "must be a table"),
        ("select = [", "is not TOML"),
        ('baseline = "absent.json"', "absent.json does not exist"),
    ],
)
def test_wrong_settings_are_one_clear_line(
    text: str, said: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "fsdptool.toml").write_text(text)
    assert run(["validate", "configs"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and said in error.splitlines()[0]


def test_a_baseline_holds_back_what_is_old(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "configs", "--write-baseline"]) == 0
    (project / "fsdptool.toml").write_text('baseline = "fsdptool-baseline.json"')
    assert found() == {"one.yaml": [], "a.yaml": []}
    one = project / "configs" / "one.yaml"
    one.write_text("# moved\n# down\n" + ONE)
    assert run(["validate", "configs", "--strict"]) == 0
    assert "3 old findings in the baseline" in capsys.readouterr().out
    one.write_text(OLD)
    assert found()["one.yaml"] == ["FSD301"]
    one.write_text(GOOD)
    # Writing it again accepts what is left in the files that are checked, and keeps the others'.
    assert run(["validate", "configs/one.yaml", "--write-baseline"]) == 0
    assert list(json.loads((project / "fsdptool-baseline.json").read_text())["files"]) == [
        "configs/old/a.yaml"
    ]
    (project / "fsdptool-baseline.json").write_text('{"version": 9}')
    assert run(["validate", "configs"]) == 2


def test_files_of_other_programs_never_fail(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in FOREIGN.items():
        (project / name).write_text(text)
    assert run(["validate", *FOREIGN, "--skip-unknown", "--strict"]) == 0
    said = capsys.readouterr().out
    assert said == f"0 files: no errors, no warnings; {len(FOREIGN)} of other programs skipped\n"
    assert run(["migrate", *FOREIGN, "--skip-unknown", "--check"]) == 0
    (project / "broken.yaml").write_text("distributed_type: FSDP\nfsdp_config: {\n")
    assert run(["validate", "broken.yaml", "--skip-unknown"]) == 1
    assert run(["validate", "chart.yaml"]) == 1
    (project / "fsdptool.toml").write_text("skip-unknown = true")
    assert run(["validate", "chart.yaml"]) == 0


def test_leftovers_of_fsdp1_are_one_finding(project: Path) -> None:
    [item] = [item for item in read_settings(DEAD).diagnostics if item.code == "FSD302"]
    assert item.message.endswith("fsdp_use_orig_params, fsdp_sync_module_states, fsdp_backward_prefetch")
    (project / "dead.yaml").write_text(DEAD.rstrip("\n"))
    assert run(["validate", "dead.yaml", "--fix"]) == 0
    assert (project / "dead.yaml").read_text() == GOOD.rstrip("\n")
    silenced = DEAD.replace("orig_params: true", "orig_params: true  # fsdptool: ignore[FSD302]")
    [item] = [item for item in read_settings(silenced).diagnostics if item.code == "FSD302"]
    assert "use_orig_params" not in item.message


def test_a_fix_and_the_advice_agree_on_the_option(project: Path) -> None:
    """Which option applies a fix is said with the fix alone; advice with another option would contradict."""
    (project / "args.json").write_text(
        '{"output_dir": "o", "fsdp": true, "fsdp_config": {"version": 2, "offload_params": false}}'
    )
    [item] = [item for item in read_settings(project / "args.json").diagnostics if item.code == "FSD216"]
    assert item.fix is not None and item.fix.safe and item.help == "remove it: the run does this without it"
    log = sarif_document(validate(["configs", "args.json"]).readings)
    said = [result["message"]["text"] for result in log["runs"][0]["results"]]
    assert said and not any("--fix" in text or "--unsafe" in text for text in said)
    assert "--unsafe-fixes" in RULES["FSD216"].fix


def test_errors_that_are_held_back_do_not_keep_fixes_from_other_findings(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = project / "held.yaml"
    file.write_text(HELD)
    assert run(["validate", str(file), "--ignore", "FSD322", "--fix"]) == 0
    assert file.read_text() == HELD.replace("  fsdp_backward_prefetch: BACKWARD_PRE\n", "")
    capsys.readouterr()
    file.write_text(HELD)
    assert run(["validate", str(file), "--write-baseline", "--select", "FSD322"]) == 0
    (baseline,) = project.glob("**/*baseline*.json")
    capsys.readouterr()
    assert run(["validate", str(file), "--baseline", str(baseline), "--fix"]) == 0
    assert "BACKWARD_PRE" not in file.read_text()
    assert "1 old finding in the baseline" in capsys.readouterr().out
    # What is accepted is counted once, however often a fix judges the file.
    file.write_text(HELD)
    assert run(["validate", str(file), "--write-baseline"]) == 0
    capsys.readouterr()
    for options in ([], ["--fix"]):
        assert run(["validate", str(file), "--baseline", str(baseline), *options]) == 0
        assert "2 old findings in the baseline" in capsys.readouterr().out
