"""The role of a platform team: hundreds of configurations, from the first look to hooks that stay on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_rules_against_accelerate import GOOD

from fsdptool.cli.app import run

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
