"""Experts shared out over ranks: the same losses and weights as whole mixtures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, prepare_case
from pool import Pool
from ranks import train
from test_numerics import hold
from variants import CLIPPED

from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import ParallelDims

STEPS = 12
RUNS: dict[str, tuple[str, str, int, int, ParallelDims | None, dict[str, Any]]] = {
    "each rank its own experts": ("qwen3 moe", "full", 2, 2, None, {}),
    "beside sharded experts": ("mixtral", "full", 4, 2, None, {"optimizer": CLIPPED}),
    "shared experts, four ranks": ("deepseek", "full", 4, 4, None, {}),
    "beside replicas": ("gpt-oss", "full", 4, 2, ParallelDims(dp_replicate=2), {"optimizer": CLIPPED}),
    "frozen experts": ("mixtral", "lora", 2, 2, None, {}),
}


def spread(recipe: Recipe, ranks: int, **changes: Any) -> Recipe:
    """Return a recipe whose experts are shared out over ``ranks``."""
    sharding = dataclasses.replace(recipe.sharding, expert_parallel=ranks, **changes)
    return dataclasses.replace(recipe, sharding=sharding)


@pytest.mark.distributed
@pytest.mark.parametrize("run", RUNS)
def test_experts_of_other_ranks_train_as_ones_own(pool: Pool, tmp_path: Path, run: str) -> None:
    name, method, world, ranks, mesh, changes = RUNS[run]
    recipe, folder = prepare_case(CASES[name], tmp_path, method, **changes)
    recipe = spread(recipe, ranks)
    results = pool.run(train, world, name, folder, recipe, mesh, STEPS)
    losses, weights, _ = hold(results, name, recipe, steps=STEPS)
    assert losses <= 1e-5
    assert weights <= 1e-5
