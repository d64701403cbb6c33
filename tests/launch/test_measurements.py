"""``doctor --gpu``: rehearsed for real on two processes, and refused where there is nothing to measure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import LlamaConfig

from fsdptool.cli.app import run
from fsdptool.files.values import load_schema
from fsdptool.launch import doctor
from fsdptool.source import resolve
from fsdptool.training.measuring import measure_products


def test_a_machine_without_gpus_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--gpu", "-o", str(tmp_path / "measured.json")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "error: GPUs are measured but this machine has none",
        "help: run it on a machine with GPUs, or rehearse it with --cpu",
    ]
    assert run(["doctor", "--cpu"]) == 2


def test_a_gpu_computes_the_products_of_an_8b_decoder() -> None:
    """Of what a GPU gets, only the shapes matter here: the device ``meta`` computes nothing."""
    config = LlamaConfig.from_dict(resolve("llama3:8b").config)
    width, inner, words = config.hidden_size, config.intermediate_size, config.vocab_size
    rates = list(measure_products(torch.device("meta")))
    assert all(rate.m == rate.k == rate.n for rate in rates if rate.m != 2048)
    shapes = [(rate.k, rate.n) for rate in rates if rate.m == 2048 != rate.k]
    assert shapes == [(width, width), (width, inner), (inner, width), (width, words)]


@pytest.mark.distributed
@pytest.mark.slow
def test_a_rehearsal_measures_everything_and_calibrates_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.json"
    assert run(["doctor", "--gpu", "--cpu", "-o", str(path)]) == 0, capsys.readouterr().err
    document = json.loads(path.read_text())
    Draft202012Validator(load_schema("measurements")).validate(document)
    ranks = document["ranks"]
    assert (document["error"], ranks["backend"], ranks["processes"]) == (None, "gloo", 2)
    assert [(attempt["kind"], attempt["ok"]) for attempt in ranks["attempts"]] == [
        ("offload", True),
        ("asynchronous_save", True),
        ("full_save", True),
    ]
    kernels = {(row["masking"], row["repeated"]) for row in ranks["attention"]}
    assert kernels == {
        ("causal", False),
        ("causal", True),
        ("documents", False),
        ("mask", False),
        ("mask", True),
    }
    # torch has a kernel for packed documents on GPUs alone.
    timed = [row for row in ranks["attention"] if row["chosen"] and row["masking"] != "documents"]
    assert [row for row in timed if row["refused"] or row["backward_seconds"] is None] == []
    assert all(row["seconds"] > 0 for row in (*ranks["products"], *ranks["copies"], *ranks["collectives"]))
    assert run(["calibrate", "--measured", str(path)]) == 2
    assert "is a rehearsal on the CPU" in capsys.readouterr().err


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ("import os; os.abort()", "Signal 6 (SIGABRT) received by PID "),
        ("raise ValueError('no such place')", "ValueError: no such place"),
    ],
)
def test_a_worker_that_ends_is_named_by_its_own_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, reason: str
) -> None:
    (tmp_path / "failing_worker.py").write_text(fails, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    answer = doctor._start("failing_worker", "cpu", 2, tmp_path, 120.0)
    assert answer is not None
    assert answer.startswith(reason)
