"""What the command line says to people who mistype, and that it never pretends to have listened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from fsdptool.cli.app import COMMANDS, build_app, run
from fsdptool.cli.options import override_values

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("line", "said", "advice"),
    [
        ("plna llama3:8b", "fsdptool: no such command 'plna'", "did you mean plan?"),
        ("cache lst", "fsdptool cache: no such command 'lst'", "did you mean ls?"),
        ("cache", "fsdptool cache: missing command", "see `fsdptool cache --help`"),
        ("detect", "fsdptool detect: missing argument", "see `fsdptool detect --help`"),
        ("detect a:b --laout x", "fsdptool detect: no such option: --laout", "did you mean --layout"),
        ("plan a:b --gpus x", "fsdptool plan: invalid value for '--gpus'", "see `fsdptool plan --help`"),
        ("detect a:b --format yaml", "'yaml' is not one of 'text', 'json'", "`fsdptool detect --help`"),
    ],
)
def test_a_usage_error_is_one_line_and_its_advice(
    line: str, said: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    streams = capsys.readouterr()
    error, next_step = streams.err.splitlines()
    assert error.startswith("error: ") and said in error
    assert next_step.startswith("help: ") and advice in next_step
    assert not streams.out


def test_all_mistakes_of_a_recipe_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.yaml").write_text("model: {refrence: llama3:8b}\nlr: 3\n")
    (tmp_path / "c.yaml").write_text("distributed_type: FSDP\n")
    assert run(["train", str(tmp_path / "r.yaml"), "--config", str(tmp_path / "c.yaml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error", "help", "error", "help"]


def test_families_are_searched_and_flavours_sorted_by_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["families", "235b", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["families"][0]["name"] == "qwen3-moe"
    assert run(["families", "qwen3", "--format", "json"]) == 0
    names = [flavour["name"] for flavour in json.loads(capsys.readouterr().out)["flavours"]]
    assert names == [f"qwen3:{size}" for size in ("tiny", "0.6b", "1.7b", "4b", "8b", "14b", "32b")]
    assert run(["families", "dinov2", "--format", "csv"]) == 0
    rows = [line.split(",") for line in capsys.readouterr().out.splitlines()]
    assert rows[0][:2] == ["name", "class"]
    assert [row[0] for row in rows[1:]] == [f"dinov2:{size}" for size in ("small", "base", "large", "giant")]
    assert run(["detect", "llama3:tiny", "--format", "tsv"]) == 0
    heads, *classes = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    chosen = [dict(zip(heads, row, strict=True)) for row in classes]
    assert [row["name"] for row in chosen if row["chosen"] == "True"] == ["LlamaDecoderLayer"]
    assert run(["families", "nothing-like-it"]) == 2
    assert "unknown family" in capsys.readouterr().err
    assert run(["plan", "qwen3:235b-a22b", "--gpu", "H100-80GB-SXM", "--gpus", "8"]) == 2
    assert "did you mean qwen3-moe:235b-a22b or qwen3-vl-moe:235b-a22b?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan llama3:8b --check p.json", "--check"),
        ("plan --check p.json -o q.json", "--output"),
        ("plan a:b --cluster c.yaml --nodes 2", "--nodes"),
        ("plan a:b --cluster c.yaml --network 50GB/s", "--network"),
        ("plan a:b --cluster c.yaml --host-memory 1TiB", "--host-memory"),
        ("plan a:b --cluster c.yaml --price 2", "--price"),
        ("launch r.yaml --config c.yaml --script x.sh", "--script"),
        ("launch r.yaml --config c.yaml --time 1:00", "--time"),
    ],
)
def test_an_option_that_would_not_count_is_refused(
    line: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.split()) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2 and said in error[0], error


def test_overrides_are_json_then_yaml_then_text_and_reach_into_parts() -> None:
    items = ["a.b=2", "a.c=1e-4", "tie=False", "sizes=[1, 2]", 'name="x"', "word=[1", "url=http://h/a=b"]
    assert override_values(items) == {
        "a": {"b": 2, "c": 1e-4},
        "tie": False,
        "sizes": [1, 2],
        "name": "x",
        "word": "[1",
        "url": "http://h/a=b",
    }


HOSTILE = "a\x1b[31mb"


def test_no_name_drives_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / HOSTILE
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "hidden_sizes\x1b]0;x\x07": 3}))
    assert run(["detect", str(folder), "--no-cache"]) == 0
    assert run(["detect", str(folder / "absent\x07.json")]) == 2
    streams = capsys.readouterr()
    assert "DET121" in streams.out and "absent" in streams.err
    assert not any(mark in streams.out + streams.err for mark in "\x1b\x07")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_every_encoding_of_a_terminal_takes_the_answer(encoding: str, tmp_path: Path) -> None:
    """In a process of its own: the streams are the interpreter's."""
    name = tmp_path / os.fsdecode(b"\xff\xe9\xf0")
    name.mkdir()
    (name / "config.json").write_text(json.dumps(LLAMA))
    command = [sys.executable, "-m", "fsdptool", "detect", str(name), "--format"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "FSDPTOOL_CACHE": str(tmp_path / "cache")}
    for form in ("text", "json"):
        done = subprocess.run([*command, form], env=environment, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.decode(encoding))["reference"]["id"] == str(name)


def test_what_cannot_be_written_is_said_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run(["plan", "no:model", "--gpu", "H100", "-o", str(tmp_path / "file" / "plan.json")]) == 2
    assert "takes no files" in capsys.readouterr().err
    assert run(["export", str(tmp_path)]) == 2
    assert f"{tmp_path} is not a run folder" in capsys.readouterr().err
    assert run(["emit-config", "--preset", "cpu", "-o", str(tmp_path), "--force"]) == 2
    assert f"{tmp_path} is a folder" in capsys.readouterr().err


def test_no_help_text_is_taken_for_markup() -> None:
    """Typer hands help to rich, which swallows what stands in brackets."""
    commands = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    texts = [str(getattr(item, "help", None)) for command in commands.values() for item in command.params]
    assert len(texts) > 100
    assert not [text for text in texts if "[" in text]
    assert list(commands)[:5] == list(COMMANDS)


@pytest.mark.slow
def test_closed_standard_streams_change_no_status() -> None:
    """As under some daemons; a file of ours must not get the number of a missing stream either."""
    command = f"exec {sys.executable} -m fsdptool rule FSD301 <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False, timeout=60).returncode == 0
    wrong = f"exec {sys.executable} -m fsdptool rule NONE1 >&-"
    done = subprocess.run(["sh", "-c", wrong], check=False, timeout=60, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ")
