"""No name that somebody else chose begins a line of its own or drives a terminal, in any output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from attacks import CONFIG, MODEL, Answer, Cli, write_job

NAME = "bad\n::error title=owned::owned \x1b]0;owned\x07\x1b[31m\x9b31m\r\u202e.yaml"
BROKEN = CONFIG.replace(
    "fsdp_version: 2", "fsdp_version: 2\n  fsdp_wrapp: 'x\\e[31m'\n  fsdp_offload_params: 'no'"
)


def harmless(answer: Answer) -> None:
    """Nothing of the name is a command of GitHub's, an escape or a control character."""
    assert answer.clean, answer
    said = answer.out + answer.err
    assert "owned" in said
    assert not [line for line in said.splitlines() if line.startswith("::error title=owned")]
    for control in ("\x1b", "\x9b", "\x07", "\r", "\u202e"):
        assert control not in said, (control, said)


@pytest.fixture
def named(tmp_path: Path) -> Path:
    """A configuration with findings whose name is an attack."""
    path = tmp_path / NAME
    path.write_text(BROKEN)
    return path


@pytest.mark.parametrize("format", ["text", "concise", "github", "json", "sarif"])
def test_validate(here: Cli, named: Path, format: str) -> None:
    harmless(here("validate", named, "--format", format))
    harmless(here("validate", named.with_name("missing" + NAME), "--format", format))


def test_diffs_and_what_is_fixed(here: Cli, named: Path) -> None:
    harmless(here("validate", named, "--diff"))
    harmless(here("validate", named, "--fix"))


def test_explain_migrate_and_merge(here: Cli, named: Path) -> None:
    harmless(here("explain", named))
    named.write_text(BROKEN.replace("fsdp_version: 2", "fsdp_version: 1"))
    harmless(here("migrate", named, "--diff"))
    harmless(here("migrate", named))
    harmless(here("emit-config", "--preset", "single-node", "--into", named))


@pytest.mark.slow
def test_names_in_emitted_files_and_plans(here: Cli, tmp_path: Path) -> None:
    model = tmp_path / f"model{NAME}\nevil: true\n#"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    answer = here("emit-config", model)
    harmless(answer)
    assert "evil" not in yaml.safe_load(answer.out)
    assert not [line for line in answer.out.splitlines() if line.startswith("evil")]
    harmless(here("detect", model))
    harmless(here("detect", model, "--format", "json"))
    plan = here("plan", model, "--profile", "cpu-gloo", "--gpus", "2", "--seq-len", "8", "--no-search")
    harmless(plan)


def test_names_in_the_lines_of_several_machines(here: Cli, tmp_path: Path) -> None:
    recipe, config = write_job(tmp_path)
    config.write_text(config.read_text().replace("num_machines: 1", "num_machines: 2"))
    other = shutil.copy(recipe, tmp_path / NAME)
    answer = here("launch", other, "--config", config)
    assert answer.code == 2
    harmless(answer)
    harmless(here("launch", recipe, "--config", config, "--host", NAME))


def test_names_in_a_dry_run_and_in_errors(here: Cli, tmp_path: Path) -> None:
    recipe, config = write_job(tmp_path)
    harmless(here("train", recipe, "--config", config, "-o", tmp_path / f"run{NAME}", "--dry-run"))
    harmless(here("train", tmp_path / f"no{NAME}", "--config", config))
    harmless(here("export", tmp_path / f"no{NAME}"))
    harmless(here("compare", tmp_path / f"no{NAME}", tmp_path / f"no{NAME}"))


def test_names_inside_files(here: Cli, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(CONFIG + '"bad\\n::error title=owned::owned \\e[31m": 1\n')
    for chosen in ("text", "concise", "github", "json"):
        harmless(here("validate", path, "--format", chosen))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text('"bad\\n::error title=owned::owned \\e[31m": 1\n')
    harmless(here("train", recipe, "--config", path))
