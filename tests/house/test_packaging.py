"""A wheel, an sdist and an editable install all find the schemas and the plugin packages."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def call(*arguments: str | Path, cwd: Path | None = None) -> str:
    """Run a command and return its output; its complaint is the failure's message."""
    done = subprocess.run(
        [str(part) for part in arguments], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Build an sdist from the checkout and a wheel from the sdist, as an index would."""
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


@pytest.fixture
def throwaway(tmp_path: Path) -> Path:
    """Return the interpreter of a new environment that borrows this one's libraries."""
    folder = tmp_path / "env"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    site = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # This environment may itself borrow from another one.
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    Path(site, "borrowed.pth").write_text("\n".join(folders) + "\n")
    return python


def test_a_wheel_carries_schemas_plugins_and_types(distributions: tuple[Path, Path]) -> None:
    wheel, sdist = distributions
    names = set(zipfile.ZipFile(wheel).namelist())
    schemas = {f"fsdptool/schemas/{path.name}" for path in (ROOT / "schemas").glob("*.json")}
    assert schemas
    assert schemas <= names
    assert "fsdptool/py.typed" in names
    for folder in ("templates", "static"):
        web = [path for path in (ROOT / "fsdptool" / "web" / folder).rglob("*") if path.is_file()]
        assert web
        assert {path.relative_to(ROOT).as_posix() for path in web} <= names
    for package in (ROOT / "plugins").iterdir():
        assert f"{package.name}/__init__.py" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "plugins/", "schemas/"))]
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("schemas/recipe.schema.json") for name in archive.getnames())


CHECK = """
import fsdptool, pathlib, sys
from fsdptool.files.values import schema_names, load_schema
from fsdptool.families.registry import load_registry
home = pathlib.Path(fsdptool.__file__).parent
assert str(home).startswith(sys.argv[1]), home
assert "recipe" in schema_names() and load_schema("recipe")
registry = load_registry()
assert not registry.diagnostics, registry.diagnostics
assert len(list(registry.all())) > 100
"""


def test_a_wheel_works_where_it_is_installed(distributions: tuple[Path, Path], throwaway: Path) -> None:
    call(throwaway, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", distributions[0])
    call(throwaway, "-c", CHECK, throwaway.parents[1], cwd=throwaway.parent)
    assert "fsdptool 0." in call(throwaway, "-m", "fsdptool", "--version", cwd=throwaway.parent)
    assert "The main commands" in call(throwaway.parent / "fsdptool", cwd=throwaway.parent)


def test_an_editable_install_works_from_anywhere(throwaway: Path) -> None:
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--editable")
    call(throwaway, "-m", "pip", "install", *options, ROOT)
    call(throwaway, "-c", CHECK, ROOT, cwd=throwaway.parent)
