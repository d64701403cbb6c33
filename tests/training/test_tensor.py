"""Layers divided over ranks: the same losses and weights as whole ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import CASES, prepare_case
from pool import Pool
from ranks import train
from test_numerics import hold

from fsdptool.records.sharding import ParallelDims

pytestmark = pytest.mark.distributed

STEPS = 12
RUNS: dict[str, tuple[str, str, int, ParallelDims]] = {
    "full, two ranks": ("causal", "full", 2, ParallelDims(dp_shard=1, tp=2)),
    "lora, two ranks": ("causal", "lora", 2, ParallelDims(dp_shard=1, tp=2)),
    "beside data parallel": ("causal", "full", 4, ParallelDims(dp_shard=2, tp=2)),
    "replicated adapters": ("causal", "lora_replicated", 4, ParallelDims(dp_shard=2, tp=2)),
    "beside replicas": ("causal", "full", 4, ParallelDims(dp_replicate=2, dp_shard=1, tp=2)),
    "beside context": ("causal", "full", 4, ParallelDims(dp_shard=1, cp=2, tp=2)),
    "tied, norms of heads": ("qwen3 tied", "full", 2, ParallelDims(dp_shard=1, tp=2)),
    "fused, transposed": ("gpt2", "full", 4, ParallelDims(dp_shard=1, tp=4)),
    "fused, adapters": ("gpt2", "lora", 4, ParallelDims(dp_shard=2, tp=2)),
    "position bias": ("seq2seq", "full", 4, ParallelDims(dp_shard=2, tp=2)),
    "masked": ("masked", "full", 2, ParallelDims(dp_shard=1, tp=2)),
    "experts": ("moe", "full", 2, ParallelDims(dp_shard=1, tp=2)),
    "experts, mixtral": ("mixtral", "full", 4, ParallelDims(dp_shard=2, tp=2)),
    "latent attention": ("deepseek", "full", 2, ParallelDims(dp_shard=1, tp=2)),
    "latent attention, adapters": ("deepseek", "lora", 2, ParallelDims(dp_shard=1, tp=2)),
    "sinks and biases": ("gpt-oss", "full", 2, ParallelDims(dp_shard=1, tp=2)),
    "joint attention": ("flow", "full", 2, ParallelDims(dp_shard=1, tp=2)),
    "convolutions": ("epsilon", "full", 2, ParallelDims(dp_shard=1, tp=2)),
}


@pytest.mark.parametrize("run", RUNS)
def test_divided_layers_train_as_whole_ones(pool: Pool, tmp_path: Path, run: str) -> None:
    name, method, world, mesh = RUNS[run]
    recipe, folder = prepare_case(CASES[name], tmp_path, method)
    results = pool.run(train, world, name, folder, recipe, mesh, STEPS)
    losses, weights, _ = hold(results, name, recipe, steps=STEPS)
    assert losses <= 1e-5
    assert weights <= 1e-5
