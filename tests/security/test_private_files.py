"""What a run and the caches keep is the user's own: no secrets in it, and nobody else opens it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from attacks import Cli, Watched

from fsdptool.cache import Store
from fsdptool.files.text import private_folder
from fsdptool.runs.folder import environment


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_only_listed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "GLOO_TOKEN",
        "NCCL_SECRET_X",
        "TORCH_PASSWORD",
        "FSDPTOOL_KEY",
        "CUDA_API",
        "OMP_X",
        "SLURM_JOB_X",
    ):
        monkeypatch.setenv(name, "a secret")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    recorded = environment()
    assert "a secret" not in json.dumps(recorded)
    assert recorded["variables"]["NCCL_DEBUG"] == "INFO"


def test_a_run_folder_and_the_caches_are_private(watched_run: Watched) -> None:
    assert watched_run.code == 0, watched_run
    run, cache = watched_run.folder / "run", watched_run.folder / "cache"
    for folder in (run, cache, cache / "data"):
        assert mode(folder) == 0o700, folder
    for file in (run / "events" / "rank-00000.jsonl", run / "logs" / "rank-00000.log"):
        assert mode(file) == 0o600, file
    assert b"a secret" not in b"".join(path.read_bytes() for path in run.rglob("*") if path.is_file())


def test_a_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    private_folder(tmp_path)
    assert mode(tmp_path) == 0o755


@pytest.mark.slow
def test_the_home_folder_of_a_service_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    home = tmp_path / "nonexistent"
    answer = cli("detect", "albert:base-v2", HOME=str(home), XDG_CACHE_HOME="", FSDPTOOL_CACHE="")
    assert answer.code == 0, answer
    assert not home.exists()
    monkeypatch.setenv("HOME", str(home))
    assert Store(home / ".cache" / "fsdptool").put("kind", "key", 1), "it says that nothing is kept"
    assert not home.exists()
