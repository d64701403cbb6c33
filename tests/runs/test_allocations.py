"""A failed allocation in terms of the model and the file of its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run as fsdptool

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 5000,
    "hidden_size": 1536,
    "intermediate_size": 3584,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}
AXOLOTL = """\
base_model: ./model
sequence_len: 4096
micro_batch_size: 3
gradient_accumulation_steps: 1
optimizer: adamw_torch
bf16: true
datasets: [{path: a.jsonl, type: chat_template}]
"""
FUSED = "plugins: [axolotl.integrations.liger.LigerPlugin]\nliger_fused_linear_cross_entropy: true\n"
TOKENS = 3 * 4096


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "run.yml").write_text(AXOLOTL)
    monkeypatch.chdir(tmp_path)


def log_of(size: int) -> None:
    """Write what torch 2.13 logs of a request: rounded up to 2 MiB, and to two decimals."""
    asked = -(-size // 2**21) * 2**21
    shown = f"{asked / 2**30:.2f} GiB" if asked >= 2**30 else f"{asked / 2**20:.2f} MiB"
    Path("train.log").write_text(
        f"[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {shown}. GPU 1 has a total"
        " capacity of 79.11 GiB of which 12.00 MiB is free. Of the allocated memory 76.02 GiB is allocated by"
        " PyTorch, and 1.00 MiB is reserved by PyTorch but unallocated.\n"
    )


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert fsdptool(["diagnose", "train.log", *arguments, "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["allocation"]


@pytest.mark.parametrize(
    ("width", "elements"), [("vocabulary", 5000), ("hidden", 1536), ("intermediate", 3584)]
)
@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_a_request_is_the_tensor_whose_size_it_has(
    width: str, elements: int, dtype: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    log_of(TOKENS * elements * size)
    (tensor,) = explained(capsys, "--config", "run.yml")["tensors"]
    assert tensor == {
        "width": width,
        "elements": elements,
        "micro_batch": 3,
        "sequence_length": 4096,
        "tokens": TOKENS,
        "dtype": dtype,
        "bytes": TOKENS * elements * size,
    }


def test_the_answer_names_the_logits_and_the_switch_of_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_of(TOKENS * 5000 * 4)
    assert fsdptool(["diagnose", "train.log", "--config", "run.yml"]) == 0
    text = capsys.readouterr().out
    assert "request: 236.0 MiB is 3 × 4,096 tokens × 5,000 words in fp32: the logits\n" in text
    assert "liger_fused_linear_cross_entropy: true" in text
    Path("run.yml").write_text(AXOLOTL + FUSED)
    assert fsdptool(["diagnose", "train.log", "--config", "run.yml"]) == 0
    text = capsys.readouterr().out
    assert "liger" not in text
    assert "smaller micro-batch" in text


def test_another_size_is_not_explained(capsys: pytest.CaptureFixture[str]) -> None:
    log_of(TOKENS * 5000 * 4 + 2**21)
    assert explained(capsys, "--config", "run.yml")["tensors"] == []
    log_of(2**20)
    assert explained(capsys, "--config", "run.yml")["tensors"] == [], (
        "PyTorch asks for 2 MiB whatever is needed"
    )
    assert fsdptool(["diagnose", "train.log", "--config", "run.yml"]) == 0
    assert "is not recognised as logits" in capsys.readouterr().out


def test_a_model_alone_and_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    Path("large").mkdir()
    Path("large/config.json").write_text(json.dumps({**MODEL, "vocab_size": 151_936}))
    log_of(16_384 * 151_936 * 4)
    found = explained(capsys, "--model", "large")["tensors"]
    assert [(item["tokens"], item["dtype"]) for item in found] == [(16_384, "float32"), (32_768, "bfloat16")]
    assert {(item["width"], item["micro_batch"]) for item in found} == {("vocabulary", None)}
    recipe = "model: {reference: ./large}\nbatch: {micro_batch: 2, sequence_length: 8192}\nsteps: 2\n"
    Path("recipe.yaml").write_text(recipe)
    (tensor,) = explained(capsys, "--config", "recipe.yaml")["tensors"]
    assert (tensor["micro_batch"], tensor["sequence_length"], tensor["dtype"]) == (2, 8192, "float32")


def test_what_cannot_be_explained_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    log_of(TOKENS * 5000 * 4)
    Path("other.yml").write_text(AXOLOTL.replace("./model", "somebody/unknown-model"))
    Path("fine.log").write_text("step 1 loss 2.0\n")
    for arguments, said in (
        (("fine.log", "--model", "model"), 'fine.log has no "Tried to allocate"'),
        (("train.log", "--config", "other.yml"), "other.yml trains somebody/unknown-model"),
        (("train.log", "--config", "absent.yml"), "absent.yml"),
    ):
        assert fsdptool(["diagnose", *arguments]) == 2
        assert said in capsys.readouterr().err.splitlines()[0]


@pytest.mark.parametrize("figure", ["9" * 400, "9." + "9" * 400, "9" * 30])
def test_a_figure_that_no_allocator_prints_is_no_internal_error(
    figure: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {figure} GiB. GPU 0 has a total"
    Path("train.log").write_text(text)
    assert fsdptool(["diagnose", "train.log", "--config", "run.yml"]) in (0, 2)
    assert "inf" not in capsys.readouterr().out
