"""plan with LoRA's frozen base in fewer bits: exact states, what is left, the suggestion that offers it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdptool.cli.app import run

HIDDEN, MIDDLE, LAYERS, WORDS, RANK = 64, 160, 6, 512, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MIDDLE,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": LAYERS,
    "vocab_size": WORDS,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
ATTENTION, MLP = 4 * HIDDEN * HIDDEN, 3 * HIDDEN * MIDDLE
ROWS = 5 * HIDDEN + 2 * MIDDLE
PLAIN = 2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN
"""Embedding, head and norms, which are stored in the dtype that the model computes in."""

HELD = {
    "unchanged": LAYERS * 2 * (ATTENTION + MLP),
    "int8": LAYERS * (ATTENTION + MLP + 4 * ROWS),
    "float8": LAYERS * (ATTENTION + MLP + 4 * ROWS),
    # 160 is not a multiple of 64: the down projection stays in bf16.
    "nf4": LAYERS * (4.5 * (ATTENTION + 2 * HIDDEN * MIDDLE) / 8 + 2 * HIDDEN * MIDDLE),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    done = run(["plan", *arguments, "--seq-len", "64", "--no-search", "--format", "json"])
    assert done == status, capsys.readouterr().err
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("base", HELD)
def test_the_bytes_of_a_base_are_exact(model: str, capsys: pytest.CaptureFixture[str], base: str) -> None:
    options = ["--method", "lora", "--lora-base", base, "--lora-target", "q_proj", "--lora-rank", str(RANK)]
    plan = planned(capsys, model, "--gpu", "RTX-4090-24GB", "--gpus", "2", *options)
    parameters = next(c for c in plan["candidates"][0]["components"] if c["name"] == "parameters")
    adapters = LAYERS * 2 * RANK * HIDDEN
    assert parameters["basis"] == "exact"
    assert plan["details"]["states"]["parameters"] == (HELD[base] + 2 * PLAIN + 4 * adapters) / 2
    notes = [note for note in plan["details"]["notes"] if note.startswith(f"{base} base: ")]
    if base == "unchanged":
        assert not notes
    elif base == "nf4":
        assert (
            "6 layers whose row length is not a multiple of 64 (model.layers.0.mlp.down_proj.weight"
            in notes[0]
        )
    else:
        bits = 8 * (1 + 4 * ROWS / (ATTENTION + MLP))
        assert notes == [f"{base} base: 42 linear layers of the blocks at {bits:.3g} bits per weight"]


@pytest.mark.slow
def test_a_base_that_does_not_fit_is_offered_in_fewer_bits(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = tmp_path / "gpus.yaml"
    card.write_text(
        "gpus: [{name: Tiny, memory_bytes: 400000000, flops: {float32: 1.0e13, bfloat16: 1.0e14},"
        " memory_bandwidth: 1.0e12, link_bandwidth: 1.0e10, source: test}]\n"
    )
    hardware = ["--gpus-file", str(card), "--gpu", "Tiny", "--gpus", "2"]
    # Large enough for the allocator to need fewer of its segments.
    hardware += ["--override", "hidden_size=512", "--override", "intermediate_size=1280"]
    plan = planned(capsys, model, *hardware, "--method", "lora", status=1)
    suggestions = [step for step in plan["next_steps"] if step["kind"] == "quantised_base"]
    assert len(suggestions) == 1
    assert suggestions[0]["change"].startswith("store the frozen base in int8")
    assert suggestions[0]["settings"] == {"lora_base": "int8"}
    assert suggestions[0]["device_total_bytes"] < plan["candidates"][0]["device_total_bytes"]
    assert "rounded" in suggestions[0]["cost"]
    again = planned(capsys, model, *hardware, "--method", "lora", "--lora-base", "int8", status=1)
    assert not any("frozen base" in step["change"] for step in again["next_steps"])


@pytest.mark.slow
def test_fp8_is_said_to_be_planned_as_bf16_and_refused_for_adapters(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--gpu", "H100-80GB-SXM", "--gpus", "2", "--precision", "fp8", "--compile"]
    plan = planned(capsys, model, *options)
    assert any(note.startswith("fp8 is planned as bf16") for note in plan["details"]["notes"])
    capsys.readouterr()
    assert run(["plan", model, *options, "--seq-len", "64", "--no-search", "--method", "lora"]) == 2
    assert "fp8 trains whole weights" in capsys.readouterr().err
