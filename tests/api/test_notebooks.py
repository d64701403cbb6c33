"""Progress below a notebook's cell, in a real kernel."""

from __future__ import annotations

from typing import Any

import pytest

from fsdptool.api.notebooks import notebook_progress

CELL = """\
import sys
import fsdptool
assert "IPython" in sys.modules
plan = fsdptool.plan("qwen3:tiny", gpu="H100-80GB-SXM", gpus=8, sequence_length=64, compile=False)
plan.verdict
"""


def test_a_script_shows_nothing() -> None:
    with notebook_progress() as progress:
        assert progress is None


def test_a_cell_shows_one_line_and_removes_it() -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks are run by nbclient and ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="notebooks are run by nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="notebooks are run by nbclient and ipykernel")
    lines: list[tuple[str, str]] = []

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
        def process_message(self, msg: Any, cell: Any, cell_index: int) -> Any:
            if "display_data" in msg["msg_type"]:
                lines.append((msg["msg_type"], msg["content"]["data"]["text/plain"]))
            return super().process_message(msg, cell, cell_index)

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    Client(notebook, timeout=120, kernel_name="python3").execute()
    kinds = [kind for kind, _ in lines]
    assert kinds == ["display_data", *["update_display_data"] * (len(kinds) - 1)]
    assert any("evaluated " in line for _, line in lines)
    assert lines[-1][1] == ""
    (result,) = (out for out in notebook.cells[0].outputs if out.output_type == "execute_result")
    assert result.data["text/plain"] == "'fits'"
