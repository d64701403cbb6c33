"""A plugin that prints, sleeps or ends the process costs itself, never the command's answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attacks import Cli

pytestmark = pytest.mark.slow


def install(folder: Path, code: str, group: str = "fsdptool.families") -> str:
    """Put a plugin on the path as an installer would; return the path."""
    folder.mkdir()
    (folder / "bad_plugin.py").write_text(code)
    info = folder / "bad_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bad-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nbad = bad_plugin:families\n")
    return str(folder)


PRINTS = """\
import os, sys
print("loading, please wait")
sys.__stdout__.write("past the redirection")
os.write(1, b"from below")
os.system("echo from a child")
def families():
    print("still loading")
    return []
"""


@pytest.mark.parametrize("group", ["fsdptool.families", "fsdptool.dialects"])
def test_one_that_prints_breaks_no_json(cli: Cli, tmp_path: Path, group: str) -> None:
    path = install(tmp_path / "plugin", PRINTS, group)
    (tmp_path / "a.yaml").write_text("fsdp_config: {fsdp_version: 2}\n")
    for arguments in (("families",), ("validate", tmp_path / "a.yaml"), ("detect", "albert:base-v2")):
        answer = cli(*arguments, "--format", "json", PYTHONPATH=path)
        assert answer.clean, answer
        json.loads(answer.out)


@pytest.mark.parametrize("group", ["fsdptool.families", "fsdptool.dialects"])
@pytest.mark.parametrize(
    "code",
    [
        "import time\ntime.sleep(100_000)\n",
        "def families():\n    import time\n    time.sleep(100_000)\n",
        "import sys\nsys.exit(0)\n",
        "raise KeyboardInterrupt\n",
    ],
    ids=["sleeps", "sleeps-later", "exits", "interrupts"],
)
def test_one_that_hangs_or_ends_the_process_is_named(cli: Cli, tmp_path: Path, code: str, group: str) -> None:
    path = install(tmp_path / "plugin", code, group)
    (tmp_path / "a.yaml").write_text("fsdp_config: {fsdp_version: 2}\n")
    command = ("families",) if group.endswith("families") else ("validate", tmp_path / "a.yaml")
    answer = cli(*command, "--format", "json", PYTHONPATH=path, FSDPTOOL_PLUGIN_SECONDS="3")
    assert answer.clean, answer
    json.loads(answer.out)
    assert "bad-plugin 1.0" in answer.out
