"""Why a script of commands has no plan: which Python file it starts, and what is wrong with that."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdptool.config.no_run import why_no_run

BROKEN = "def main(:\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("python -m venv .venv\npython -m pip install torch\n", None),
        ("torchrun -m torchtune.absent --x 1\n", None),
        ("python -m pip install x\npython train.py --x 1\n", "it starts train.py, which is not found"),
        ("python -m build\n", None),  # a folder without a program in it
        ("torchrun -m mine.absent --x 1\n", "it starts mine/absent.py, which is not found"),
        ("python -m mine.broken --x 1\n", "mine/broken.py:1: the script does not parse"),
        ("python -m mine --x 1\n", "mine/__main__.py:1: the script does not parse"),
        ("python data.py --x 1\npython train.py --x 1\n", "it starts train.py, which is not found"),
        ("torchrun mine/broken.py --x 1\npython eval.py --x 1\n", "mine/broken.py:1: the script does not"),
        ("python $SCRIPT --x 1\n", "it starts $SCRIPT, whose name holds a variable that is not known here"),
        ("SCRIPT=train.py\npython $SCRIPT --x 1\n", "it starts train.py, which is not found"),
    ],
)
def test_the_last_file_of_the_project_says_why(
    text: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "mine").mkdir()
    for name in ("broken.py", "__main__.py"):
        (tmp_path / "mine" / name).write_text(BROKEN)
    path = tmp_path / "run.sh"
    path.write_text(text)
    found = why_no_run(path)
    assert found == why if why is None else found is not None and why in found


def test_yaml_is_not_a_script_of_commands(tmp_path: Path) -> None:
    path = tmp_path / "ci.yaml"
    path.write_text("jobs:\n  test:\n    run: |\n      torchrun train.py --x 1\n")
    assert why_no_run(path) is None
