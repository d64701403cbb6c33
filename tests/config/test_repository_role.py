"""The role of a platform team: hundreds of configurations, from the first look to hooks that stay on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_rules_against_accelerate import GOOD

from fsdptool.api.validate import expand
from fsdptool.cli.app import run
from fsdptool.launch.options import StartOptions
from fsdptool.launch.start import open_run

FSDP1 = GOOD.replace("  fsdp_version: 2\n", "").replace(
    "  fsdp_reshard_after_forward: true\n", "  fsdp_sharding_strategy: FULL_SHARD\n"
)
MISSPELT = GOOD.replace("reshard_after_forward", "reshard_after_foward")
CHART = "apiVersion: apps/v1\nkind: Deployment\n"
FILES = 150
BASELINE = "fsdptool-baseline.json"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """150 files: sound ones, some of FSDP1, one misspelt key, and charts of another program."""
    for number in range(FILES):
        folder = tmp_path / "configs" / f"team{number % 7}"
        folder.mkdir(parents=True, exist_ok=True)
        text = CHART if number % 30 == 0 else FSDP1 if number % 10 == 1 else GOOD
        (folder / f"fsdp_{number:03d}.yaml").write_text(MISSPELT if number == 149 else text)
    (tmp_path / "pyproject.toml").write_text('[tool.fsdptool]\nexclude = ["third_party"]\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_a_repository_of_configurations(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(*arguments: str, status: int) -> str:
        capsys.readouterr()
        assert run(list(arguments)) == status, capsys.readouterr().err
        return capsys.readouterr().out

    foreign, old = FILES // 30, FILES // 10
    counted = ask("validate", "configs", "--statistics", status=0)
    assert f"{FILES - foreign} files: 0 errors, {old + 1} warnings" in counted
    assert f"{foreign} of other programs skipped" in counted
    # One key is misspelt: the fix is shown, then applied, and everything else stays as it is.
    before = {path: path.read_bytes() for path in (repository / "configs").rglob("*.yaml")}
    broken = repository / "configs" / "team2" / "fsdp_149.yaml"
    shown = ask("validate", str(broken), "--unsafe-fixes", "--diff", status=1)
    assert "+  fsdp_reshard_after_forward" in shown
    assert broken.read_bytes() == before[broken]
    assert "no errors, no warnings" in ask("validate", str(broken), "--fix", "--unsafe-fixes", status=0)
    assert {p for p in before if p.read_bytes() != before[p]} == {broken}
    # What is old is accepted for now; from then on only what is new fails.
    assert ask("validate", "configs", "--format", "concise", status=0).count("FSD301") == old
    ask("validate", "configs", "--write-baseline", status=0)
    accepted = json.loads(ask("validate", "configs", "--baseline", BASELINE, "--format", "json", status=0))
    assert not [f for file in accepted["files"] for f in file["findings"] if f["severity"] != "info"]
    (repository / "configs" / "new.yaml").write_text(FSDP1)
    assert ask("validate", "configs", "--baseline", BASELINE, "--strict", "-q", status=1).count("FSD301") == 1
    # Migration: a check that fails, a look at one difference, and files that the next check leaves alone.
    assert run(["migrate", "--check", "configs"]) == 1
    assert ask("explain", "configs/new.yaml", status=0).count("FSDP1") >= 1
    ask("migrate", "configs", status=0)
    assert run(["migrate", "--check", "configs"]) == 0
    assert sum(path.read_bytes() != before[path] for path in before) == old + 1
    ask("validate", "configs", "--strict", "-q", status=0)


RECIPE = """\
model: {reference: "qwen3:tiny"}
data: {source: synthetic}
batch: {micro_batch: 1, sequence_length: 16}
steps: 2
"""


def test_run_folders_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """What a run stores is in fsdptool's own form: no finding, no hook and no migration concerns it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert run(["emit-config", "--preset", "cpu", "-o", "accelerate.yaml"]) == 0
    start = StartOptions(output=Path("runs/first"), cpu=True, predict=False)
    with open_run(Path("recipe.yaml"), Path("accelerate.yaml"), start) as ready:
        folder = ready.folder.relative_to(tmp_path)
    export = folder / "export"
    export.mkdir()
    (export / "fsdp_settings.json").write_text((folder / "settings.json").read_text())
    own = [Path("accelerate.yaml"), Path("recipe.yaml")]
    stored = [path for path in folder.rglob("*.json") if path.name != "run.json"]
    assert len(stored) > 5

    def read(*arguments: str) -> list[Path]:
        capsys.readouterr()
        run(["validate", *arguments, "--format", "json"])
        return sorted(Path(file["path"]) for file in json.loads(capsys.readouterr().out)["files"])

    assert read(".") == own
    assert sorted(expand([Path()])) == own
    assert read(str(folder)) == [folder / path for path in own], "what the run was started with"
    assert read("runs") == []
    assert run(["validate", "."]) == 0
    settings = str(folder / "settings.json")
    assert read(settings) == [Path(settings)]
    assert run(["validate", settings]) == 1, "a file that is named is judged"
    # A hook names every file of a commit.
    assert read("--skip-unknown", settings, str(export / "fsdp_settings.json"), "recipe.yaml") == own[1:]
    assert run(["validate", "--skip-unknown", settings]) == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert run(["migrate", "--check", "--skip-unknown", "recipe.yaml", *map(str, stored)]) == 0
    run(["migrate", "."])
    assert {path: path.read_bytes() for path in before} == before
    # Another program's run.json makes no run folder.
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.json").write_text('{"schema": "run", "jobs": []}')
    (tmp_path / "other" / "fsdp.yaml").write_text(GOOD)
    assert Path("other/fsdp.yaml") in read(".")
