"""Rules for every module: what it may import, how long a function may be, what start-up may cost."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fsdptool"
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"torch", "transformers", "diffusers", "accelerate", "peft", "datasets"}
TORCH_FREE = ("records", "families", "config", "layout", "tensor", "cache")
OBJECTIVES = PACKAGE / "families" / "objectives"
"""Objectives run inside a model's training step: they are torch code, loaded by nobody else."""
LAZY = (PACKAGE / "families" / "bases", PACKAGE / "families" / "synthetic.py")
"""A folder and a module whose functions may import torch when they are called."""

LONGEST_FUNCTION = 100
"""Lines, with the signature and the docstring. A module has none: splitting by length scatters one duty."""


def room(path: Path) -> str:
    """Return the name of the folder (or top-level module) that ``path`` belongs to."""
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports(tree: ast.AST, *, top_level_only: bool) -> Iterator[str]:
    """Yield the dotted names that a module imports; ``if TYPE_CHECKING`` blocks do not count."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif not _skipped(node, top_level_only):
            yield from imports(node, top_level_only=top_level_only)


def _skipped(node: ast.AST, top_level_only: bool) -> bool:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
        return True
    return top_level_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a module."""
    return ast.parse(path.read_text(encoding="utf-8"))


def test_records_know_nobody_but_the_errors() -> None:
    modules = [path for path in MODULES if room(path) == "records"]
    every = {name for path in modules for name in imports(parsed(path), top_level_only=False)}
    own = {name for name in every if name.startswith("fsdptool.records")}
    assert own
    assert {name for name in every if name.startswith("fsdptool.")} - own == {"fsdptool.errors"}


def test_torch_free_rooms_never_import_torch() -> None:
    rooms = set()
    for path in MODULES:
        if room(path) in TORCH_FREE and not path.is_relative_to(OBJECTIVES):
            rooms.add(room(path))
            found = imports(parsed(path), top_level_only=path in LAZY or path.parent in LAZY)
            assert not {name.partition(".")[0] for name in found} & HEAVY, path
    assert rooms == set(TORCH_FREE)
    assert all(path.exists() for path in LAZY)


def test_a_function_is_one_page() -> None:
    functions = [
        (f"{path}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert len(functions) > 3000
    assert not {name: length for name, length in functions if length > LONGEST_FUNCTION}


LIGHT = {
    "overview": [],
    "help": ["--help"],
    "validate": ["validate", "{config}", "--consumer", "fsdptool"],
    "families": ["families"],
    "schema": ["schema", "recipe"],
}

CONFIG = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
  fsdp_reshard_after_forward: true
"""


@pytest.mark.parametrize("name", LIGHT)
def test_quick_commands_import_nothing_heavy(name: str, tmp_path: Path) -> None:
    config = tmp_path / "fsdp.yaml"
    config.write_text(CONFIG)
    arguments = [part.format(config=config) for part in LIGHT[name]]
    script = (
        "import json, sys\n"
        "from fsdptool.cli.app import run\n"
        f"code = run({arguments!r})\n"
        "sys.stderr.write('\\n' + json.dumps([code, sorted({m.partition('.')[0] for m in sys.modules})]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    code, loaded = json.loads(done.stderr.splitlines()[-1])
    assert code == 0, done.stderr
    assert not HEAVY & set(loaded)


def undocumented(path: Path) -> Iterator[str]:
    """Yield the public names of a module that lack a docstring (inherited ones are documented above)."""
    tree = parsed(path)
    if path.stat().st_size and not ast.get_docstring(tree):
        yield "module"
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node):
            yield node.name
        if isinstance(node, ast.ClassDef) and not node.bases:
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_")]
            yield from (f"{node.name}.{m.name}" for m in methods if not ast.get_docstring(m))


def test_everything_public_has_a_docstring() -> None:
    found = {path: list(undocumented(path)) for path in MODULES}
    assert {path: names for path, names in found.items() if names} == {}


def test_reports_take_records() -> None:
    """A renamed field is then a type error; only what ranks write line by line is plain data."""
    report = PACKAGE / "report"
    found = {
        str(path.relative_to(report))
        for path in report.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.arg) and node.annotation is not None
        if re.search(r"(Mapping|dict)\[str, (Any|object)\]", ast.unparse(node.annotation))
    }
    assert found == {"console/train.py", "page/run.py"}


@pytest.mark.xdist_group("grouped")
def test_groups_of_tests_stay_on_one_worker(request: pytest.FixtureRequest) -> None:
    """Without its suffix a group runs on every worker, and each repeats the runs that its tests share."""
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@grouped")


def test_no_page_or_result_names_a_folder_of_a_machine() -> None:
    """A result that quotes a traceback or a transcript would."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks" / "results").glob("*")]
    place = re.compile(r"(?<![\w.])/(?:tmp|work|root|home|mnt)/")
    found = {str(page.relative_to(ROOT)) for page in pages if place.search(page.read_text(encoding="utf-8"))}
    assert len(pages) > 50
    assert found == set()


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports a test file by its name: of two with one name, only the first would run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
