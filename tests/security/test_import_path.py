"""Modules that lie in the working directory are not imported, by no process of a command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from attacks import PATIENCE, write_job

TRAPS = (
    "torch.py",
    "accelerate.py",
    "typer.py",
    "yaml.py",
    "json.py",
    "numpy.py",
    "multiprocessing.py",
    "pickle.py",
)


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder whose modules leave a mark when somebody imports them."""
    for name in TRAPS:
        text = f"open({str(tmp_path / 'pwned')!r}, 'a').write({name!r})\nraise SystemExit('a trap')\n"
        (tmp_path / name).write_text(text)
    return tmp_path


def call(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the console script as an installation has it: its own folder is first on Python's path."""
    script = "import sys; from fsdptool.cli.app import main; sys.argv[0] = 'fsdptool'; main()"
    return subprocess.run(
        [sys.executable, "-P", "-c", script, *map(str, arguments)],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_doctor_and_its_probe(trapped: Path) -> None:
    done = call(trapped, "doctor")
    assert not (trapped / "pwned").exists(), (trapped / "pwned").read_text()
    assert done.returncode == 0, done.stdout + done.stderr


def test_train_with_loading_processes(trapped: Path) -> None:
    recipe, config = write_job(trapped)
    (trapped / "text.txt").write_text("many words " * 400)
    text = recipe.read_text().replace(
        "data: {source: synthetic}", "data: {source: text, path: text.txt, tokenizer: bytes, workers: 1}"
    )
    recipe.write_text(text)
    config_file = trapped / "model" / "config.json"
    config_file.write_text(config_file.read_text().replace('"vocab_size": 64', '"vocab_size": 262'))
    done = call(trapped, "train", recipe, "--config", config, "--no-predict")
    assert not (trapped / "pwned").exists(), (trapped / "pwned").read_text()
    assert done.returncode == 0, done.stderr


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
