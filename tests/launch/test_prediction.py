"""What a run says of its predicted memory before it starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fsdptool.errors import ConfigError
from fsdptool.launch.prepare import prepare

CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "two_cpu_processes.yaml"
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("padding", "packing", "told"), [("longest", "false", True), ("length", "false", False)]
)
def test_a_prediction_for_the_full_length_says_so(
    padding: str, packing: str, told: bool, tmp_path: Path
) -> None:
    """Micro-batches that are cut to their longest sample need less than the prediction."""
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{reference: {tmp_path / 'config.json'}, weights: random}}\n"
        f"data: {{source: synthetic, packing: {packing}, padding: {padding}}}\n"
        "batch: {sequence_length: 24}\nsteps: 1\n"
    )
    prepared = prepare(tmp_path / "recipe.yaml", CONFIG, with_data=False)
    assert prepared.prediction is not None
    assert any("predicted for sequences of 24 tokens" in note for note in prepared.notes) is told


def test_flash_attention_is_refused_where_it_would_join_packed_documents(tmp_path: Path) -> None:
    """transformers reads where documents begin from the positions of a single row, and ignores several."""
    from transformers.modeling_flash_attention_utils import _is_packed_sequence

    positions = torch.tensor([[0, 1, 2, 0, 1]])
    assert _is_packed_sequence(positions, 1)
    assert not _is_packed_sequence(positions.expand(2, -1), 2)
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 300}))
    (tmp_path / "text.txt").write_text("one document\n\nand another\n")
    config = tmp_path / "gpus.yaml"
    config.write_text(
        "{compute_environment: LOCAL_MACHINE, distributed_type: FSDP, mixed_precision: bf16,"
        " num_processes: 2, num_machines: 1, machine_rank: 0, fsdp_config: {fsdp_version: 2}}"
    )

    def prepared(attention: str, size: int) -> None:
        (tmp_path / "recipe.yaml").write_text(
            f"model: {{reference: {tmp_path / 'config.json'}, weights: random, attention: {attention}}}\n"
            f"data: {{source: text, path: {tmp_path / 'text.txt'}, tokenizer: bytes}}\n"
            f"batch: {{micro_batch: {size}, sequence_length: 8}}\nsteps: 1\n"
        )
        prepare(tmp_path / "recipe.yaml", config, with_prediction=False, dry_run=True)

    with pytest.raises(ConfigError, match=r"micro-batches of one sequence alone, .*micro_batch is 2"):
        prepared("flash_attention_2", 2)
    prepared("flash_attention_2", 1)


def test_attention_by_a_kernel_of_gpus_is_refused_on_cpus(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "recipe.yaml").write_text(
        f"model: {{reference: {tmp_path / 'config.json'}, weights: random, attention: flash_attention_3}}\n"
        "data: {source: synthetic}\nbatch: {sequence_length: 24}\nsteps: 1\n"
    )
    with pytest.raises(ConfigError, match="flash_attention_3 runs on GPUs alone") as refused:
        prepare(tmp_path / "recipe.yaml", CONFIG, with_data=False)
    assert refused.value.help == "set model.attention: sdpa"
