"""Files of somebody else come in through ``fsdptool/files/text.py`` alone: no other code opens one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fsdptool"

OPENED: dict[str, str] = {
    "cache.py": "the user's own cache, a folder of mode 0700",
    "cli/app.py": "/dev/null, for streams that the caller closed",
    "distributed/devices.py:_has_intel": "/sys",
    "distributed/devices.py:driver_gpus": "/proc",
    "distributed/session.py:bind_to_gpu": "/sys",
    "families/bases/catalogue.py": "data of an installed package",
    "families/bases/families.py:_tables": "the text of an installed library",
    "families/registry.py": "the text of an installed plugin",
    "files/safetensors_writer.py:open_safetensors": "safetensors opens the path itself, after open_regular",
    "files/safetensors_writer.py:write_stream": "a file that is written",
    "files/text.py:open_regular": "the way in",
    "files/text.py:open_for_writing": "a file that is written, never through a link",
    "files/text.py:create_file": "a new file",
    "files/text.py:read_csv": "lines that open_regular yields",
    "files/lengths.py:_table": "a table whose size was checked; numpy opens the path itself",
    "files/values.py:read_data": "data of this package",
    "files/values.py:load_json": "the way in of JSON texts",
    "inspection/document.py:_line": "the text of an installed library",
    "inspection/source_reads.py:_source": "the text of an installed library",
    "launch/doctor.py:_probe": "a temporary folder of mode 0700",
    "launch/processes.py": "/proc, and the log of a process that is started",
    "launch/queue/file.py:read_row": "the user's own queue, a folder of mode 0700",
    "cli/calibrate.py:command": "a text that was just made",
    "cli/options.py:_value": "the command line",
    "cli/options.py:write_file": "a new file",
    "report/page/parts.py": "style sheets of this package",
    "runs/folder.py:write_text": "a new file",
    "runs/manifest.py:sync_folder": "a folder, to flush it",
    "runs/watchdog.py:_state": "/proc",
    "runs/view.py:lock_holder": "/proc",
    "source/config_checks.py:library_source": "the text of an installed library",
    "source/references.py:read_config": "a text that read_bytes returned",
    "source/hub.py:fetch_code": "code in the Hub's cache that the user agreed to run",
    "testing/families.py": "a text that was just made",
    "training/data/images.py:_open": "Pillow opens the path itself, after a look",
    "training/data/ragged.py": "the user's own data cache, a folder of mode 0700",
    "training/data/tokenizer.py:_digest": "a text of the tokenizers library",
    "training/data/videos.py:_opened": "PyAV opens the path itself, after open_regular",
    "training/data/workers.py:_unpack": "a message of a process that this one started",
    "training/export/adapters.py": "a text that was just made",
    "training/export/api.py:__init__": "the header of a checkpoint that its manifest was compared with",
    "web/jobs.py": "a message of a process that this one started",
    "web/server.py:_open_browser": "a browser, not a file",
    "web/server.py:style": "data of this package",
    "web/worker.py": "a message of the process that started this one",
}
"""Where files are opened, or texts parsed, in another way, and why that is safe."""

_METHODS = {"open", "read_text", "read_bytes", "fdopen"}
_FUNCTIONS = {
    *("open", "os.open", "io.open", "json.load", "json.loads", "csv.reader", "csv.DictReader"),
    *("np.load", "np.memmap", "np.fromfile", "safe_open", "torch.load", "pickle.load", "yaml.safe_load"),
    *("tomllib.load", "mmap.mmap"),
}
_LAST = _METHODS | {function.rpartition(".")[2] for function in _FUNCTIONS}
_LOOKS = {"exists", "is_file", "is_dir"}
_NAMES = re.compile(rf"\b(?:{'|'.join(sorted(_LAST | _LOOKS))})\b")


def calls(text: str) -> list[tuple[str, ast.Call]]:
    """Return every call of a module with the name of the function around it."""
    found: list[tuple[str, ast.Call]] = []
    left: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while left:
        scope, node = left.pop()
        if isinstance(node, ast.Call):
            found.append((scope, node))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope = node.name
        left += [(scope, child) for child in ast.iter_child_nodes(node)]
    return found


@cache
def calls_of(path: Path) -> list[tuple[str, ast.Call]]:
    """Return the calls of a file that the tests look at; only texts with one of the names are parsed."""
    text = path.read_text(encoding="utf-8")
    if not _NAMES.search(text):
        return []
    return [(scope, call) for scope, call in calls(text) if last_name(call) in _LAST | _LOOKS]


def last_name(call: ast.Call) -> str:
    """Return the name of what is called, without what stands before a dot; empty where it has none."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def opens(call: ast.Call) -> bool:
    """Say whether a call opens a file or parses what was read."""
    last = last_name(call)
    if last not in _LAST:
        return False
    text = ast.unparse(call.func)
    if text == "os.fdopen":
        return False  # of a descriptor that was opened by one of the others
    return (isinstance(call.func, ast.Attribute) and last in _METHODS) or text in _FUNCTIONS


def looks(call: ast.Call) -> bool:
    """Say whether a call asks a path whether it exists, which fails for a name that no file can have."""
    return isinstance(call.func, ast.Attribute) and call.func.attr in _LOOKS and not call.args


MODULES = sorted(PACKAGE.rglob("*.py"))


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def others(path: Path, found: list[tuple[str, ast.Call]]) -> list[str]:
    """Return the places of a module that open files in a way of their own."""
    places = [(f"{name(path)}:{scope}", call) for scope, call in found if opens(call)]
    return [
        f"{place}, line {call.lineno}: {ast.unparse(call)[:60]}"
        for place, call in places
        if place not in OPENED and name(path) not in OPENED
    ]


def test_files_are_opened_in_one_place() -> None:
    found = [place for path in MODULES for place in others(path, calls_of(path))]
    assert found == [], "use open_regular, read_bytes, read_lines, read_ends or load_json"


def test_every_exception_is_still_needed() -> None:
    used = set()
    for path in MODULES:
        for scope, call in calls_of(path):
            used |= {name(path), f"{name(path)}:{scope}"} if opens(call) else set()
    assert set(OPENED) <= used


def test_names_of_a_command_line_and_a_page_are_looked_at_safely() -> None:
    """``exists``, ``is_file`` and ``is_folder`` of ``files/text.py`` take any name; a path's own do not."""
    modules = [path for path in MODULES if path.parts[-2] in ("cli", "pages", "web")]
    found = {
        f"{name(path)}: {ast.unparse(call)}" for path in modules for _, call in calls_of(path) if looks(call)
    }
    assert len(modules) > 50
    assert found == {"cli/completion.py: root.is_dir()"}


@pytest.mark.parametrize(
    "text",
    [
        "def f(path):\n    return path.read_text()",
        "def f(path):\n    return open(path)",
        "class A:\n    def f(self):\n        with self.path.open('rb') as s: pass",
        "import json\ndef f(s):\n    return json.load(s)",
        "import os\nx = os.open('a', 0)",
        "import csv\nrows = list(csv.reader(s))",
    ],
)
def test_this_test_sees_another_way(text: str) -> None:
    assert others(PACKAGE / "new.py", calls(text))
