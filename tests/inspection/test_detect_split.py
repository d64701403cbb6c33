"""``fsdptool detect --tp`` and ``--ep``: tables, documents and exit codes."""

from __future__ import annotations

import json

import pytest

from fsdptool.cli.app import run


def test_a_mixture_is_divided(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["detect", "mixtral:8x7b", "--tp", "8", "--ep", "4", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    split = document["tensor_parallel"]
    rows = {row["name"]: row for row in split["parameters"]}
    first = rows["model.layers.*.mlp.experts.gate_up_proj"]
    assert (first["count"], first["local_shape"]) == (32, [8, 3584, 4096])
    assert (first["style"], first["sections"], first["origin"]) == ("column", [14336, 14336], "library")
    assert rows["model.layers.*.mlp.gate.weight"]["reason"] == "router"
    assert split["regions"] == ["model.layers.*.self_attn", "model.layers.*.mlp.experts"]
    total = document["parameters"]["total"]
    assert total / 8 < split["local_parameters"] < total / 7.9
    experts = {row["name"]: row for row in document["expert_parallel"]["parameters"] if row["style"]}
    assert {row["local_shape"][0] for row in experts.values()} == {2}


def test_the_table_says_why_a_parameter_stays_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["detect", "qwen3:0.6b", "--tp", "4"]) == 0
    shown = capsys.readouterr().out
    assert "tensor parallelism over 4 ranks" in shown
    (norm,) = [line for line in shown.splitlines() if "self_attn.q_norm" in line]
    assert "whole, gradients summed" in norm


def test_heads_that_do_not_divide_are_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["detect", "qwen3:0.6b", "--tp", "16", "--format", "json"]) == 1
    findings = json.loads(capsys.readouterr().out)["diagnostics"]
    (found,) = [item for item in findings if item["code"] == "DET140"]
    assert found["message"] == (
        "--tp 16 does not divide the 8 key and value heads of model.layers.0.self_attn"
    )
    assert found["help"] == "set --tp to 8"


def test_hidden_states_are_divided_along_the_sequence_or_it_says_why_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["detect", "qwen3:0.6b", "--tp", "4", "--sequence-parallel", "--format", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["sequence_parallel"] == {"blocks": "model.layers", "end": "model.norm"}
    rows = {row["name"]: row for row in document["tensor_parallel"]["parameters"]}
    assert rows["model.layers.*.input_layernorm.weight"]["partial_gradient"]
    assert run(["detect", "t5:small", "--tp", "2", "--sequence-parallel"]) == 1
    shown = capsys.readouterr().out
    assert "its divided layers do not lie in one list of blocks [DET141]" in shown
    assert "tensor parallelism over 2 ranks" in shown
    assert run(["detect", "qwen3:0.6b", "--sequence-parallel"]) == 2


def test_experts_are_needed_to_share_them_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["detect", "qwen3:0.6b", "--ep", "2", "--format", "json"]) == 1
    findings = json.loads(capsys.readouterr().out)["diagnostics"]
    assert [item["severity"] for item in findings if item["code"] == "DET140"] == ["error"]
