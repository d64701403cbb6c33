"""Tables: aligned in a pipe, fitted to a terminal without breaking words, rows for programs."""

from __future__ import annotations

import io
import sys

import pytest

from fsdptool.report.console import tables
from fsdptool.report.console.tables import cell_len, layout_table, print_rows, print_table

CELLS = [
    ("class", "instances", "parameters", "reason"),
    ("LlamaDecoderLayer", "32", "218,112,000", "repeats 32 times and holds 91 % of all parameters"),
    ("Qwen3MoeSparseMoeBlock", "94", "2,418,540,544", "experts of a layer; not wrapped by itself"),
]


def test_a_pipe_gets_aligned_text() -> None:
    stream = io.StringIO()
    print_table(CELLS[0], CELLS[1:], numeric=(1, 2), stream=stream)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert "\t" not in stream.getvalue()
    starts = {line.index(word) for line, word in zip(lines, ("reason", "repeats", "experts"), strict=True)}
    ends = {
        line.index(word) + len(word) for line, word in zip(lines, ("instances", " 32", " 94"), strict=True)
    }
    assert len(starts) == len(ends) == 1


@pytest.mark.parametrize("width", range(36, 140, 7))
def test_words_are_never_broken_and_lines_fit(width: int) -> None:
    lines = layout_table(CELLS, numeric=(1, 2), optional=(1,), width=width)
    words = {word for row in CELLS for cell in row for word in cell.split()}
    shown = {word for line in lines if line.kind != "note" for word in line.text.split()}
    assert shown <= words
    optional = {"class"} | {word for row in CELLS for word in row[1].split()}
    assert words - shown <= optional
    assert all(cell_len(line.text) <= width for line in lines)


def test_a_narrow_terminal_leaves_out_optional_columns_then_lists_cells() -> None:
    wide, narrow, list_of_cells = (
        layout_table(CELLS, numeric=(1, 2), optional=(1,), width=width) for width in (80, 56, 40)
    )
    assert "instances" in wide[0].text
    assert "instances" not in narrow[0].text
    assert "parameters" in narrow[0].text
    assert list_of_cells[0].text == "LlamaDecoderLayer"
    assert list_of_cells[1].text.split() == ["instances", "32"]


def test_rows_for_programs_are_quoted_and_unknown_figures_are_empty() -> None:
    rows = [("a, b", 1.5, None), ('say "x"', 2, True)]
    texts = {}
    for separator in ("csv", "tsv"):
        stream = io.StringIO()
        print_rows(("name", "figure", "known"), rows, separator=separator, stream=stream)
        texts[separator] = stream.getvalue()
    assert texts["csv"] == 'name,figure,known\n"a, b",1.5,\n"say ""x""",2,True\n'
    assert texts["tsv"].splitlines()[1] == "a, b\t1.5\t"


def test_one_log_of_both_streams_keeps_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(log, encoding="utf-8"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(log, encoding="utf-8", write_through=True))
    tables.print_line("the answer")
    tables.print_line("wrote plan.json", stream=sys.stderr)
    assert log.getvalue() == b"the answer\nwrote plan.json\n"


def test_a_path_that_is_too_long_has_a_line_of_its_own() -> None:
    path = "site-packages/transformers/models/llama/modeling_llama.py:410"
    lines = layout_table([("class", "defined in"), ("LlamaForCausalLM", path)], width=66)
    assert [line.text for line in lines] == ["LlamaForCausalLM", "  defined in", f"    {path}"]
