"""A wheel, an sdist and an editable install all find the schemas and the plugin packages."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from contextlib import suppress
from email import message_from_bytes
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.testclient import TestClient

from fsdptool.web.server import CompressedFiles

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


def environment(folder: Path, wheel: Path, extra: str | None) -> Path:
    """Return the interpreter of a new environment of what a wheel and an extra bring, and tools to build.

    The libraries are those of this environment, linked: to download PyTorch again takes minutes. Those that
    the tests' own environment lacks are left out.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        required = message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []
    wanted = [(tool, "") for tool in ("pip", "hatchling", "editables")]
    wanted += _requirements(required, extra or "")
    seen = set[tuple[str, str]]()
    while wanted:
        if (item := wanted.pop()) in seen:
            continue
        seen.add(item)
        with suppress(metadata.PackageNotFoundError):
            distribution = metadata.distribution(item[0])
            wanted += _requirements(distribution.requires or [], item[1])
            for top in {path.parts[0] for path in distribution.files or ()} - {"..", "__pycache__"}:
                with suppress(FileExistsError):
                    (site(python) / top).symlink_to(Path(str(distribution.locate_file(top))))
    return python


def _requirements(texts: list[str], extra: str) -> list[tuple[str, str]]:
    """Return name and extra of each library that ``texts`` require in this environment."""
    found: list[tuple[str, str]] = []
    for requirement in map(Requirement, texts):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            found += [(requirement.name, one) for one in ("", *requirement.extras)]
    return found


@cache
def site(python: Path) -> Path:
    """Return the folder in which an interpreter looks for libraries."""
    return Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())


@pytest.fixture
def throwaway(distributions: tuple[Path, Path], tmp_path: Path) -> Path:
    """Return the interpreter of a new environment that has what ``fsdptool[train]`` needs."""
    return environment(tmp_path / "env", distributions[0], "train")


def installed(wheel: Path, folder: Path, extra: str | None) -> Path:
    """Install the wheel into a new environment and return its command."""
    python = environment(folder, wheel, extra)
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    return python.with_name("fsdptool")


def test_a_wheel_carries_schemas_plugins_and_types(distributions: tuple[Path, Path]) -> None:
    wheel, sdist = distributions
    names = set(zipfile.ZipFile(wheel).namelist())
    schemas = {
        path.name.removesuffix(".schema.json"): json.loads(path.read_text(encoding="utf-8"))
        for path in (ROOT / "schemas").glob("*.json")
    }
    assert schemas
    with zipfile.ZipFile(wheel) as archive:
        packed_schemas = archive.read("fsdptool/schemas.json.gz")
    assert json.loads(gzip.decompress(packed_schemas)) == schemas
    entries = [path.stem for path in sorted((ROOT / "fsdptool" / "advisories" / "entries").glob("*.json"))]
    with zipfile.ZipFile(wheel) as archive:
        packed_entries = archive.read("fsdptool/advisories/entries.json.gz")
    assert entries == [entry["id"] for entry in json.loads(gzip.decompress(packed_entries))]
    assert not [name for name in names if name.startswith("fsdptool/advisories/entries/")]
    assert "fsdptool/failures.json.gz" in names
    packed = {name for name in names if name.endswith(".gz")}
    assert not {name.removesuffix(".gz") for name in packed} & names, "once each, compressed"
    assert "fsdptool/py.typed" in names
    for folder in ("templates", "static"):
        web = [path for path in (ROOT / "fsdptool" / "web" / folder).rglob("*") if path.is_file()]
        assert web
        stored = {
            f"{path.relative_to(ROOT).as_posix()}{'.gz' if path.suffix == '.js' else ''}" for path in web
        }
        assert stored <= names
    for package in (ROOT / "plugins").iterdir():
        assert f"{package.name}/__init__.py" in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "plugins/", "schemas/"))]
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("schemas/recipe.schema.json") for name in archive.getnames())


CONFIGURATION = """\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
"""


def test_scripts_of_a_wheel_reach_a_browser(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(distributions[0]) as wheel:
        wheel.extractall(tmp_path, [name for name in wheel.namelist() if "/web/static/" in name])
    stored = tmp_path / "fsdptool" / "web" / "static"
    client = TestClient(Starlette(routes=[Mount("/", CompressedFiles(directory=stored))]))
    scripts = sorted((ROOT / "fsdptool" / "web" / "static").rglob("*.js"))
    assert scripts
    for script in scripts:
        answer = client.get(f"/{script.relative_to(ROOT / 'fsdptool' / 'web' / 'static').as_posix()}")
        assert (answer.status_code, answer.headers["content-encoding"]) == (200, "gzip")
        assert "javascript" in answer.headers["content-type"]
        assert answer.content == script.read_bytes(), "the client decompresses it"
    assert client.get("/vendor/uPlot-1.6.32.min.css").headers.get("content-encoding") is None
    assert client.get("/nothing.js").status_code == 404


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


BASE = (
    ("--help",),
    ("families",),
    ("rule", "FSD208"),
    ("schema", "recipe"),
    ("validate", "fsdp.yaml"),
    ("explain", "fsdp.yaml"),
    ("migrate", "fsdp.yaml", "--check"),
    ("runs", "."),
    ("queue", "list"),
    ("diagnose", "run.log"),
    ("audit", "fsdp.yaml", "--target", "accelerate==1.15.0"),
)


def test_the_base_needs_no_torch(distributions: tuple[Path, Path], tmp_path: Path) -> None:
    """What checks configurations and reads logs installs beside any training environment."""
    command = installed(distributions[0], tmp_path / "env", None)
    (tmp_path / "fsdp.yaml").write_text(CONFIGURATION)
    shutil.copy(ROOT / "examples" / "main_job" / "recipe.yaml", tmp_path)
    (tmp_path / "run.log").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    for arguments in BASE:
        call(command, *arguments, cwd=tmp_path)
    libraries = {path.name: path for path in site(command.with_name("python")).iterdir()}
    assert not libraries.keys() & {"torch", "transformers", "numpy"}
    tools = ("pip", "hatchling", "editables", "pathspec", "pluggy", "tomlkit", "trove")
    brought = [path for name, path in libraries.items() if not name.startswith(tools)]
    # Since typer 0.29, 7.2 MB of it are pydantic.
    of_typer = ("pydantic", "annotated_types", "typing_inspection")
    assert sum(size_of(path) for path in brought if not path.name.startswith(of_typer)) < 18.5e6
    assert sum(map(size_of, brought)) < 25.7e6
    for text, extra in (
        ("detect llama3:tiny", "models"),
        ("plan llama3:tiny --gpus 2 --gpu H100-80GB-SXM", "models"),
        ("doctor", "models"),
        ("train recipe.yaml --config fsdp.yaml", "train"),
    ):
        done = subprocess.run(
            [command, *text.split()], capture_output=True, text=True, cwd=tmp_path, check=False
        )
        first, second = done.stderr.splitlines()
        assert done.returncode == 2
        assert first.endswith("is not installed")
        assert second.startswith(f"help: pip install 'fsdptool[{extra}]'")


def size_of(path: Path) -> int:
    """Return the bytes of a file or a folder, but for what Python compiled."""
    files = [path] if path.is_file() else [item for item in path.rglob("*") if item.is_file()]
    return sum(item.stat().st_size for item in files if item.suffix != ".pyc")


def test_models_are_planned_without_what_only_training_needs(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    command = installed(distributions[0], tmp_path / "env", "models")
    for arguments in (
        ("detect", "llama3:tiny"),
        ("plan", "llama3:tiny", "--gpus", "2", "--gpu", "H100-80GB-SXM", "-o", "plan.json"),
        ("emit-config", "--plan", "plan.json", "-o", "fsdp.yaml"),
        ("validate", "fsdp.yaml"),
    ):
        call(command, *arguments, cwd=tmp_path)
    libraries = site(command.with_name("python"))
    assert (libraries / "torch").exists() and not (libraries / "datasets").exists()


def test_an_editable_install_works_from_anywhere(throwaway: Path) -> None:
    options = ("--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--editable")
    call(throwaway, "-m", "pip", "install", *options, ROOT)
    call(throwaway, "-c", CHECK, ROOT, cwd=throwaway.parent)
