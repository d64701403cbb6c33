"""The page on security names tests that exist, and every command."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

from fsdptool.cli.app import build_app

HERE = Path(__file__).parent
PAGE = (HERE.parents[1] / "docs" / "explanation" / "security.md").read_text(encoding="utf-8")


def test_the_page_names_tests_that_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    defined = {
        name
        for path in HERE.parent.rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert len(named) > 30
    assert named <= defined, named - defined


def test_the_page_says_what_each_command_reads_and_writes() -> None:
    table = PAGE.partition("## What each command")[2]
    commands = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    assert len(commands) > 20
    assert not [name for name in commands if f"`{name}`" not in table]
