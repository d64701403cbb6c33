"""A model's own code runs only if this very command line says so: no file can consent for anybody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attacks import CONFIG, RECIPE, Answer, Cli, strange_model, write_job

from fsdptool.errors import FsdptoolError

pytestmark = pytest.mark.slow

FLAG = "--trust-remote-code"
ASKS = RECIPE.replace("{reference: model,", "{reference: strange, trust_remote_code: true,")
PLAN = ("--profile", "cpu-gloo", "--gpus", "2", "--no-search")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Appears when the stranger's code has run."""
    return tmp_path / "pwned"


@pytest.fixture
def job(tmp_path: Path, mark: Path) -> tuple[Path, Path]:
    """A recipe that asks for the model's code to run."""
    strange_model(tmp_path / "strange", mark)
    return write_job(tmp_path, ASKS)


def refused(answer: Answer, mark: Path, folder: str) -> None:
    assert answer.code == 2, answer
    assert not mark.exists(), "the stranger's code ran"
    error = answer.err.splitlines()[0]
    assert folder in error
    assert FLAG in answer.err


def test_a_recipe_cannot_consent(here: Cli, job: tuple[Path, Path], mark: Path) -> None:
    recipe, config = job
    refused(here("train", recipe, "--config", config, "--cpu"), mark, "strange")
    refused(here("plan", "--recipe", recipe, *PLAN), mark, "strange")
    refused(here("launch", recipe, "--config", config), mark, "strange")


def test_a_recipe_for_pictures_cannot_consent(cli: Cli, tmp_path: Path, mark: Path) -> None:
    strange_model(tmp_path / "strange", mark)
    recipe, _ = write_job(tmp_path, ASKS.replace("source: synthetic", "source: images, path: ."))
    refused(cli("precompute", recipe), mark, "strange")


def test_a_teacher_cannot_consent(cli: Cli, tmp_path: Path, mark: Path) -> None:
    strange_model(tmp_path / "strange", mark)
    teacher = "{reference: strange, trust_remote_code: true}"
    method = f"method: {{name: distillation, distillation: {{teacher: {teacher}}}}}\n"
    recipe, config = write_job(tmp_path, RECIPE + method)
    refused(cli("train", recipe, "--config", config, "--cpu"), mark, "strange")


def test_a_plan_cannot_consent(
    cli: Cli, here: Cli, job: tuple[Path, Path], mark: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    answer = cli("plan", "--recipe", job[0], *PLAN, FLAG, "-o", plan)
    assert answer.code == 0, answer
    assert mark.exists(), "with the flag it may run"
    assert '"trust_remote_code": true' in plan.read_text()
    mark.unlink()
    refused(here("plan", "--check", plan), mark, "strange")
    refused(here("emit-config", "--plan", plan), mark, "strange")
    assert cli("plan", "--check", plan, FLAG).code in (0, 1)
    assert cli("emit-config", "--plan", plan, FLAG).code == 0


def test_a_plan_cannot_consent_to_a_library_call(tmp_path: Path, job: tuple[Path, Path], mark: Path) -> None:
    import fsdptool

    inputs: dict[str, Any] = {"recipe": job[0], "profile": "cpu-gloo", "gpus": 2, "search": False}
    with pytest.raises(FsdptoolError, match="strange"):
        fsdptool.plan(**inputs)
    made = fsdptool.plan(**inputs, trust_remote_code=True)
    mark.unlink()
    with pytest.raises(FsdptoolError, match="strange"):
        fsdptool.emit_config(plan=made)
    assert not mark.exists()


def test_a_run_folder_cannot_consent(cli: Cli, run_copy: Path, mark: Path, tmp_path: Path) -> None:
    folder = strange_model(tmp_path / "strange", mark)
    spec = json.loads((run_copy / "spec.json").read_text())
    spec |= {
        "trust_remote_code": True,
        "folder": str(folder),
        "config": json.loads((folder / "config.json").read_text()),
    }
    (run_copy / "spec.json").write_text(json.dumps(spec))
    refused(cli("export", run_copy), mark, str(folder))


def test_a_recipe_in_a_run_folder_cannot_consent(cli: Cli, run_copy: Path, mark: Path) -> None:
    recipe = json.loads((run_copy / "recipe.json").read_text())
    recipe["model"]["trust_remote_code"] = True
    (run_copy / "recipe.json").write_text(json.dumps(recipe))
    refused(cli("export", run_copy), mark, "model")


def test_a_copied_recipe_cannot_consent(cli: Cli, run_copy: Path, tmp_path: Path, mark: Path) -> None:
    strange_model(run_copy / "strange", mark)
    (run_copy / "recipe.yaml").write_text(ASKS)
    arguments = ("train", run_copy / "recipe.yaml", "--config", run_copy / "accelerate.yaml", "--cpu")
    refused(cli(*arguments, "-o", run_copy, "--resume", "auto"), mark, "strange")


def test_consent_on_the_command_line_reaches_the_workers(
    cli: Cli, here: Cli, job: tuple[Path, Path], mark: Path
) -> None:
    recipe, config = job
    config.write_text(CONFIG.replace("num_processes: 2", "num_processes: 1"))
    answer = cli("train", recipe, "--config", config, "--no-predict", FLAG, "-o", mark.parent / "out")
    assert answer.code == 0, answer
    assert mark.exists()
    mark.unlink()
    refused(here("export", mark.parent / "out"), mark, "strange")
    assert cli("export", mark.parent / "out", FLAG).code == 0
