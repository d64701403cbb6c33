"""Attacks repeated: the command line as a person starts it, on files a stranger wrote."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from attacks import PATIENCE, RECIPE, TEXT_DATA, Answer, Cli, Watched, set_traps, watch, write_job


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """Run ``fsdptool`` as its console script does, in a folder of its own."""

    def call(*arguments: str | Path, cwd: Path | None = None, **environment: str) -> Answer:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "fsdptool", *map(str, arguments)],
            cwd=cwd or tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=PATIENCE,
            check=False,
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process, for what imports torch and is asked many times."""
    from fsdptool.cli.app import run

    def call(*arguments: str | Path) -> Answer:
        capsys.readouterr()
        code = run([str(item) for item in arguments])
        said = capsys.readouterr()
        return Answer(code, said.out, said.err)

    return call


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """End a test that hangs: what it waits for never comes."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError(f"no answer within {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(2 * PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def watched_run(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A run of two ranks amid traps, open permissions and secrets; its sockets are looked at all the time."""
    folder = tmp_path_factory.mktemp("trained")
    recipe, config = write_job(folder, RECIPE.replace("source: synthetic", TEXT_DATA), vocabulary=262)
    (folder / "text.txt").write_text("many words " * 400)
    set_traps(folder)
    before = os.umask(0o022)
    try:
        return watch(
            folder,
            *("train", recipe, "--config", config, "-o", folder / "run", "--no-predict"),
            FSDPTOOL_CACHE=str(folder / "cache"),
            GLOO_TOKEN="a secret",
        )
    finally:
        os.umask(before)


@pytest.fixture(scope="session")
def watched_doctor(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """``fsdptool doctor`` amid traps."""
    return watch(set_traps(tmp_path_factory.mktemp("doctor")), "doctor")


@pytest.fixture(scope="session")
def trained(watched_run: Watched) -> Path:
    """A run folder with two checkpoints of two ranks; attacks are made on copies of it."""
    assert watched_run.code == 0, watched_run
    return watched_run.folder / "run"


@pytest.fixture
def run_copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def job(tmp_path: Path) -> tuple[Path, Path]:
    """A recipe and a configuration."""
    return write_job(tmp_path)
