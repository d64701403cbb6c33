"""The files for contributors agree with the package, and the hosts and tools that read them accept them."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from fsdptool.records.diagnostic import tool_version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read(name: str) -> str:
    """Return the text of a file at the root."""
    return (ROOT / name).read_text(encoding="utf-8")


def test_every_file_states_the_same_version() -> None:
    version = PROJECT["project"]["version"]
    assert tool_version() == version
    assert yaml.safe_load(read("CITATION.cff"))["version"] == version
    assert re.findall(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)[0] == version


def test_the_guide_for_contributors_names_files_and_commands_that_exist() -> None:
    text = read("CONTRIBUTING.md")
    paths = re.findall(r"(?:fsdptool|tests|benchmarks|docs|examples|plugins)/[\w./*-]+", text)
    assert len(paths) > 20
    assert not [path for path in paths if not list(ROOT.glob(path.rstrip("./")))]
    names = re.findall(r"`fsdptool\.(testing\.\w+)\.(\w+)`", text)
    assert len(names) == 2
    for module, function in names:
        assert f"def {function}(" in read(f"fsdptool/{module.replace('.', '/')}.py")


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        ("citation-file-format", "CITATION.cff"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("github-workflows", ".github/workflows/*.yml"),
        ("readthedocs", ".readthedocs.yaml"),
    ],
)
def test_hosts_accept_their_files(kind: str, pattern: str) -> None:
    pytest.importorskip("check_jsonschema")
    files = sorted(map(str, ROOT.glob(pattern)))
    assert files
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{kind}", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_pre_commit_accepts_both_files() -> None:
    pytest.importorskip("pre_commit")
    for command, file in (
        ("validate-config", ".pre-commit-config.yaml"),
        ("validate-manifest", ".pre-commit-hooks.yaml"),
    ):
        call = [sys.executable, "-m", "pre_commit", command, str(ROOT / file)]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def test_the_hook_of_this_repository_passes_on_its_examples() -> None:
    hooks = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    hook = next(hook for hook in hooks if hook["id"] == "validate-examples")
    files = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".yml", ".yaml")]
    assert files
    command = [sys.executable, "-m", *shlex.split(hook["entry"]), *map(str, sorted(files))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
