"""Write the answers of real Python sessions into two pages, below the lines that are typed there.

    python benchmarks/python/capture.py [NAME ...]      default: every block

A block begins with ``<!-- capture: NAME -->`` and ends with ``<!-- end -->``. The lines after ``>>>`` run in
order, in one session for both pages and in an empty folder. ``proof`` and ``refusal`` come from a launch
of two processes (tests/api/prove_launch.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import tempfile
import traceback
from code import compile_command
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs/how-to/use-from-python.md", ROOT / "docs/how-to/prove-sharding.md")
BLOCK = re.compile(
    r"(<!-- capture: (?P<name>[a-z-]+) -->\n```(?P<kind>python|text)\n)(?P<body>.*?)(```\n<!-- end -->)",
    re.DOTALL,
)
WIDTH = 110


def typed(body: str) -> Iterator[str]:
    """Yield the statements of a block, without prompts and answers."""
    statement: list[str] = []
    for line in body.splitlines():
        if line.startswith(">>> "):
            if statement:
                yield "\n".join(statement)
            statement = [line[4:]]
        elif line.startswith("... ") and statement:
            statement.append(line[4:])
    if statement:
        yield "\n".join(statement)


def answer(statement: str, session: dict[str, Any]) -> str:
    """Run a statement and return what an interactive session shows of it."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
        try:
            program = compile_command(statement + "\n", symbol="single")
            assert program is not None, f"incomplete: {statement}"
            exec(program, session)  # noqa: S102 - the page's own lines
        except Exception as error:
            lines = traceback.format_exception_only(error)
            shown.write("".join(lines))
    return shown.getvalue().rstrip("\n")


def replay(body: str, session: dict[str, Any]) -> str:
    """Return a block's lines with today's answers."""
    lines = []
    for statement in typed(body):
        first, *rest = statement.split("\n")
        lines += [f">>> {first}", *(f"... {line}" for line in rest)]
        if text := answer(statement, session):
            lines.append(text)
    return "\n".join(lines) + "\n"


def launch() -> dict[str, Any]:
    """Return what rank 0 of two saw when it proved models of Trainer, TRL and accelerate."""
    script = runpy.run_path(str(ROOT / "tests" / "api" / "prove_launch.py"))
    with tempfile.TemporaryDirectory() as name:
        seen: dict[str, Any] = script["launch"](Path(name))[0]
    return seen


def main(names: list[str]) -> None:
    """Rewrite the named blocks, or all of them."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    wanted = set(names) or {match["name"] for text in texts.values() for match in BLOCK.finditer(text)}
    seen = launch()["trainer"] if wanted & {"proof", "refusal"} else {}
    session: dict[str, Any] = {}
    os.environ["COLUMNS"] = str(WIDTH)

    def fill(match: re.Match[str]) -> str:
        body = match["body"]
        if match["kind"] == "python":
            body = replay(body, session)
        elif match["name"] in wanted:
            message, advice = seen["refused"]["unit"] if match["name"] == "refusal" else (seen["shown"], "")
            name = "fsdptool.errors.ShardingError: " if advice else ""
            body = f"{name}{message}\n" + (f"help: {advice}\n" if advice else "")
        return f"{match[1]}{body}{match[5]}" if match["name"] in wanted else match[0]

    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            texts = {page: BLOCK.sub(fill, text) for page, text in texts.items()}
        finally:
            os.chdir(home)
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
