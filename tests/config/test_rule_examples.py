"""Every rule on configuration files finds something in its first example, and nothing in the second."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from fsdptool.cli.app import run
from fsdptool.config.rules import file_rules
from fsdptool.records.diagnostic import Example

SHOWN = {
    code: rule.example
    for code, rule in file_rules().items()
    if rule.example is not None and rule.family != "scripts"  # tests/scripts
}


def codes(text: str, options: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """Return the codes that ``validate`` finds in a text."""
    (folder / "file").write_text(text, encoding="utf-8")
    run(["validate", str(folder / "file"), "--isolated", "--format", "json", *shlex.split(options)])
    (file,) = json.loads(capsys.readouterr().out)["files"]
    return {item["code"] for item in file["findings"]}


def test_every_rule_that_a_text_can_show_has_an_example() -> None:
    # A file that is absent, too large or not UTF-8; a broken plugin; a model that no family ships.
    left = {code for code in file_rules().keys() - SHOWN.keys() if file_rules()[code].family != "scripts"}
    assert left == {"FSD101", "FSD102", "FSD103", "FSD115", "FSD413"}


@pytest.mark.parametrize("code", SHOWN)
def test_the_example_is_what_the_rule_finds(
    code: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example: Example = SHOWN[code]
    assert code in codes(example.fails, example.options, tmp_path, capsys)
    passing = example.options if example.passing is None else example.passing
    found = codes(example.passes, passing, tmp_path, capsys)
    assert code not in found
    rules = [file_rules()[item] for item in found]
    unreadable = [item for item in rules if item.family == "parse" and item.severity == "error"]
    assert not unreadable, "the file is judged at all"
