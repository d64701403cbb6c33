"""Versions are read from each kind of lock file; what is not pinned is said."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from fsdptool.advisories.locks import installed, read_lock, read_targets
from fsdptool.errors import ConfigError

UV = """\
version = 1
[[package]]
name = "accelerate"
version = "1.13.0"
source = { registry = "https://pypi.org/simple" }
[[package]]
name = "torch"
version = "2.9.1"
[[package]]
name = "torch"
version = "2.9.1+cu128"
[[package]]
name = "project"
source = { editable = "." }
[[package]]
name = "numpy"
version = "2.3.0"
"""
PYLOCK = 'lock-version = "1.0"\n[[packages]]\nname = "trl"\nversion = "1.9.0"\n[[packages]]\nname = "peft"\n'
REQUIREMENTS = """\
# comment
-r more.txt
--index-url https://example.org/simple
Accelerate[testing] == 1.13.0 \\
    --hash=sha256:0123456789abcdef
torch==2.9.1+cu128 ; python_version >= "3.9"
trl==0.20.0 ; python_version < "3"
transformers>=5  # newest
./wheels/local.whl
git+https://example.org/peft.git
"""
ENVIRONMENT = """\
name: train
channels: [conda-forge]
dependencies:
  - python=3.12
  - pytorch=2.9.1=py312_cuda
  - conda-forge::accelerate==1.13.0
  - transformers=5.5
  - datasets>=4
  - pip
  - pip:
      - trl==1.9.0
      - bitsandbytes
"""


def read(folder: Path, name: str, text: str) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    (folder / name).write_text(text, encoding="utf-8")
    versions, loose = read_lock(folder / name)
    return {package: [str(item) for item in items] for package, items in versions.items()}, loose


@pytest.mark.parametrize("name", ["uv.lock", "poetry.lock"])
def test_a_lock_of_uv_or_poetry(tmp_path: Path, name: str) -> None:
    versions, loose = read(tmp_path, name, UV)
    assert versions == {"accelerate": ["1.13.0"], "torch": ["2.9.1", "2.9.1+cu128"]}
    assert loose == ()


def test_a_lock_of_pep_751(tmp_path: Path) -> None:
    assert read(tmp_path, "pylock.toml", PYLOCK) == ({"trl": ["1.9.0"]}, ("peft",))


def test_a_requirements_file_and_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("peft==0.18.1\n-r requirements.txt\n", encoding="utf-8")
    versions, loose = read(tmp_path, "requirements.txt", REQUIREMENTS)
    assert versions == {"accelerate": ["1.13.0"], "torch": ["2.9.1+cu128"], "peft": ["0.18.1"]}
    assert loose == ("transformers",)


def test_an_environment_of_conda(tmp_path: Path) -> None:
    versions, loose = read(tmp_path, "environment.yml", ENVIRONMENT)
    assert versions == {"torch": ["2.9.1"], "accelerate": ["1.13.0"], "trl": ["1.9.0"]}
    assert set(loose) >= {"bitsandbytes", "transformers"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("uv.lock", "version = ", "not valid TOML"),
        ("pyproject.toml", "[project]\nname = 'x'\n", "holds no list of packages"),
        ("environment.yml", "fsdp_config: {}\n", "holds no list of dependencies"),
        ("environment.yml", "- a\n", "holds no list of dependencies"),
    ],
)
def test_what_is_no_lock_file_is_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, name, text)


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"requirements\.txt"):
        read_lock(tmp_path / "requirements.txt")


def test_targets() -> None:
    versions = read_targets(["accelerate==1.13.0,Torch == 2.9.1"])
    assert {name: str(items[0]) for name, items in versions.items()} == {
        "accelerate": "1.13.0",
        "torch": "2.9.1",
    }
    for wrong in ("accelerate", "accelerate>=1.13", "==1.0", "accelerate==new"):
        with pytest.raises(ConfigError, match="names no version"):
            read_targets([wrong])


def test_the_installed_versions_are_those_of_this_environment() -> None:
    for package, (version,) in installed().items():
        assert str(version) == metadata.version(package)
