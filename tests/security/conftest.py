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
from attacks import PATIENCE, Answer, Cli, write_job


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
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with two checkpoints of two ranks; attacks are made on copies of it."""
    folder = tmp_path_factory.mktemp("trained")
    recipe, config = write_job(folder)
    argv = [sys.executable, "-P", "-m", "fsdptool", "train", str(recipe), "--config", str(config)]
    done = subprocess.run(
        [*argv, "-o", str(folder / "run"), "--no-predict"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run_copy(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def job(tmp_path: Path) -> tuple[Path, Path]:
    """A recipe and a configuration."""
    return write_job(tmp_path)
