"""Modules that lie in the working directory are not imported, by no process of a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attacks import PATIENCE, TRAPS, Watched, installed_script, set_traps, write_job

pytestmark = pytest.mark.slow


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder whose modules leave a mark when somebody imports them."""
    return set_traps(tmp_path)


def call(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the console script as an installation has it."""
    return subprocess.run(
        installed_script(*arguments),
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_doctor_and_its_probe(watched_doctor: Watched) -> None:
    assert not (watched_doctor.folder / "pwned").exists(), (watched_doctor.folder / "pwned").read_text()
    assert watched_doctor.code == 0, watched_doctor


def test_train_with_loading_processes(watched_run: Watched) -> None:
    assert not (watched_run.folder / "pwned").exists(), (watched_run.folder / "pwned").read_text()
    assert watched_run.code == 0, watched_run


def test_as_a_module_the_working_directory_is_not_on_the_path(trapped: Path) -> None:
    # Python itself puts it there; what the command imports later must not come from it.
    for name in TRAPS:
        if name not in ("torch.py", "accelerate.py"):
            (trapped / name).unlink()
    done = subprocess.run(
        [sys.executable, "-m", "fsdptool", "detect", "albert:base-v2", "--no-cache"],
        cwd=trapped,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert not (trapped / "pwned").exists()
    assert done.returncode == 0, done.stderr


def test_printed_command_lines_are_safe_too(trapped: Path) -> None:
    recipe, config = write_job(trapped)
    done = call(trapped, "train", recipe, "--config", config, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert " -P " in done.stdout
    assert "PYTHONSAFEPATH=1" in done.stdout
