"""``-`` is standard input for commands that read a file, as often as they read it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from fsdptool.cli.app import run
from fsdptool.files import text
from fsdptool.planning.request.file_run import read_file_run

AXOLOTL = b"""\
base_model: Qwen/Qwen3-0.6B
adapter: lora
lora_r: 8
sequence_len: 512
micro_batch_size: 1
fsdp_version: 2
fsdp_config:
  auto_wrap_policy: TRANSFORMER_BASED_WRAP
  transformer_layer_cls_to_wrap: Qwen3DecoderLayer
"""


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_given", None)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(AXOLOTL)))


def test_a_file_is_read_from_a_pipe(piped: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "-"]) == 0
    assert "1 file, " in capsys.readouterr().out
    with pytest.raises(text.UnreadableError):
        text.read_source("-")
    text.take_standard_input(AXOLOTL)
    for _ in range(2):
        found = read_file_run("-")
        assert found is not None
        assert (found.program, found.model) == ("axolotl", "Qwen/Qwen3-0.6B")


def test_an_output_or_another_command_does_not_wait_for_it(piped: None) -> None:
    run(["families", "-"])
    run(["plan", "no-such:model", "-o", "-"])
    run(["plan", "no-such:model", "--", "python", "train.py", "-"])
    assert sys.stdin.buffer.read() == AXOLOTL


@pytest.mark.parametrize("command", ["train", "launch", "precompute", "queue add"])
def test_what_needs_the_file_again_takes_a_path(
    command: str, piped: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.split(), "-", "--config", "accelerate.yaml"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith("does not read standard input: it needs the file again later")
    assert len(said) == 2


def test_an_output_is_standard_output_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["emit-config", "--preset", "single-node", "-o", "-"]) == 0
    written = capsys.readouterr().out
    assert run(["emit-config", "--preset", "single-node"]) == 0
    assert capsys.readouterr().out == written
    old = "fsdp_config:\n  fsdp_version: 1\n  fsdp_sharding_strategy: FULL_SHARD\ndistributed_type: FSDP\n"
    (tmp_path / "old.yaml").write_text(old)
    assert run(["migrate", "old.yaml", "-o", "-"]) == 0
    assert "fsdp_version: 2\n" in capsys.readouterr().out
    assert run(["calibrate", "--gpu", "L4", "--context", "1GiB", "-o", "-"]) == 2
    assert "give the path of a file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["old.yaml"]
    assert (tmp_path / "old.yaml").read_text() == old


def test_a_path_in_the_library_is_a_path(piped: None) -> None:
    with pytest.raises(text.UnreadableError):
        text.read_source("-")


def test_closed_standard_input_is_an_error(
    piped: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["plan", "-"]) == 2
    assert "standard input is closed" in capsys.readouterr().err
