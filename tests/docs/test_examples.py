"""Commands and files on the pages are accepted by the program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import typer.main

import fsdptool
from fsdptool.cli.app import build_app

ROOT = Path(__file__).parents[2]
PAGES = [
    *ROOT.glob("*.md"),
    *(path for path in (ROOT / "docs").rglob("*.md") if path.name != "rules.md"),
    *(ROOT / "examples").rglob("*.md"),
]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield every command line of fsdptool in a block of code, with its page."""
    for page in PAGES:
        for block in re.findall(
            r"^```(?:sh|console)?\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S
        ):
            text = re.sub(r"\\\n\s*", "", block)
            for line in text.splitlines():
                match = re.match(r"(?:\$ )?(fsdptool .*)", line)
                if match:
                    yield page.relative_to(ROOT).as_posix(), shlex.split(match[1], comments=True)


@cache
def application() -> Any:
    """Return the command line's parser, built once."""
    return typer.main.get_command(build_app())


def problem(words: list[str]) -> str | None:
    """Return what is wrong with a command line, or None."""
    command = application()
    # What follows the two dashes is another program's command line.
    rest = list(takewhile(lambda word: word != "--", words[1:]))
    while rest and getattr(command, "commands", {}).get(rest[0]):
        command, rest = command.commands[rest[0]], rest[1:]
    if (not rest and command.name == "fsdptool") or rest[:1] in (["--install-completion"], ["--version"]):
        return None
    if getattr(command, "commands", {}) and rest and not rest[0].startswith("-"):
        return f"unknown command {rest[0]}"
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    options = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)]
    unknown = [option for option in options if option not in known and option != "--help"]
    return f"unknown options {unknown}" if unknown else None


def test_commands_and_options_on_the_pages_exist() -> None:
    lines = list(commands())
    assert len(lines) > 80
    assert not [(page, " ".join(words), bad) for page, words in lines if (bad := problem(words))]


@pytest.mark.parametrize("line", ["fsdptool plna x", "fsdptool plan x --gpuz 1", "fsdptool queue ad x"])
def test_a_wrong_command_is_noticed(line: str) -> None:
    assert problem(line.split())


def test_the_recipe_on_its_page_is_accepted(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "write-a-recipe.md").read_text(encoding="utf-8")
    (recipe,) = re.findall(r"^```yaml\n(model:.*?)^```$", page, re.M | re.S)
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    assert fsdptool.read_recipe(tmp_path / "recipe.yaml").batch.accumulation == 8


def test_the_project_settings_on_the_pages_are_accepted(tmp_path: Path) -> None:
    from fsdptool.cli.app import run

    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\n", encoding="utf-8")
    blocks = []
    for page in PAGES:
        found = re.findall(
            r"^```toml\n(\[tool\.fsdptool\].*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S
        )
        blocks += found
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "pyproject.toml").write_text(block, encoding="utf-8")
        assert run(["validate", str(tmp_path / "fsdp.yaml"), "--write-baseline"]) == 0
