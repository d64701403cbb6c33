"""Experts shared out over ranks: the same losses and weights as whole mixtures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import context_cases
import pytest
from cases import CASES, FEW, inputs_for, prepare_case
from pool import Pool
from ranks import train
from sweeps import kept
from test_numerics import hold
from variants import CLIPPED

from fsdptool.errors import ConfigError
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Recipe

ADAFACTOR = dataclasses.replace(CLIPPED, name="adafactor")
RUNS: dict[str, tuple[str, str, int, int, ParallelDims | None, dict[str, Any]]] = {
    "each rank its own experts": ("qwen3 moe", "full", 2, 2, None, {}),
    "beside sharded experts": ("mixtral", "full", 4, 2, None, {"optimizer": CLIPPED}),
    "shared experts, four ranks": ("deepseek", "full", 4, 4, None, {}),
    "beside replicas": ("gpt-oss", "full", 4, 2, ParallelDims(dp_replicate=2), {"optimizer": CLIPPED}),
    "frozen experts": ("mixtral", "lora", 2, 2, None, {}),
    "one expert on two ranks": ("two experts", "full", 4, 2, None, {"optimizer": CLIPPED}),
    "over a sequence's ranks": ("mixtral", "full", 2, 2, ParallelDims(cp=2), {}),
    "over more than a sequence's ranks": (
        "mixtral",
        "full",
        4,
        4,
        ParallelDims(cp=2),
        {"optimizer": CLIPPED},
    ),
    "over divided layers": ("gpt-oss", "full", 2, 2, ParallelDims(tp=2), {}),
    "over more than divided layers": (
        "qwen3 moe",
        "full",
        4,
        4,
        ParallelDims(tp=2),
        {"optimizer": CLIPPED},
    ),
    "beside divided layers": ("deepseek", "full", 4, 2, ParallelDims(tp=2), {}),
    "fewer than divided layers": ("deepseek", "full", 4, 2, ParallelDims(tp=4), {}),
    "divided sequences": ("qwen3 moe", "full", 4, 4, ParallelDims(tp=2), {"sequence": True}),
    "beside both": ("mixtral", "lora", 4, 2, ParallelDims(cp=2, tp=2), {}),
    "parts of experts": ("moe", "full", 4, 1, None, {"optimizer": CLIPPED}),
    "parts of experts, Adafactor": ("moe", "full", 4, 1, None, {"optimizer": ADAFACTOR}),
    "parts of experts, adapters": ("moe", "lora_parameters", 4, 1, None, {}),
}


def spread(recipe: Recipe, ranks: int, **changes: Any) -> Recipe:
    """Return a recipe whose experts are shared out over ``ranks``."""
    sharding = dataclasses.replace(recipe.sharding, expert_parallel=ranks, **changes)
    return dataclasses.replace(recipe, sharding=sharding)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "run",
    kept(
        RUNS,
        "each rank its own experts",
        "beside sharded experts",
        "frozen experts",
        "one expert on two ranks",
        "over more than a sequence's ranks",
        "over divided layers",
        "divided sequences",
        "parts of experts, Adafactor",
    ),
)
def test_experts_of_other_ranks_train_as_ones_own(pool: Pool, tmp_path: Path, run: str) -> None:
    name, method, world, ranks, mesh, changes = RUNS[run]
    sequence = changes.pop("sequence", False) if (changes := dict(changes)) else False
    recipe, folder = prepare_case(CASES[name], tmp_path, method, **changes)
    recipe = spread(recipe, ranks, sequence_parallel=sequence)
    results = pool.run(train, world, name, folder, recipe, mesh, FEW)
    losses, weights, _ = hold(results, name, recipe, steps=FEW)
    assert losses <= 1e-5
    assert weights <= 1e-5
    # Where ranks outnumber the experts that they share, each holds a part of every expert.
    parts = any("dim=1" in placed for placed in results[0]["proof"]["placements"])
    assert parts == run.startswith(("one expert", "parts"))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("mixtral", ((4, 2, 2), (2, 2, 3), (4, 4, 4), (1, 1, 5), (4, 2, 6))),
        ("two experts", ((4, 1, 2), (2, 1, 3), (4, 2, 4), (1, 1, 5), (4, 1, 6))),
    ],
)
def test_a_run_goes_on_with_its_experts_on_other_ranks(
    pool: Pool, tmp_path: Path, name: str, order: tuple[tuple[int, int, int], ...]
) -> None:
    recipe, folder = prepare_case(CASES[name], tmp_path, "full", optimizer=CLIPPED)
    undisturbed = pool.run(context_cases.resumed, 1, folder, recipe, ParallelDims(), None, 6, name)[0]
    run = tmp_path / "run"
    run.mkdir()
    for world, ranks, until in order:
        later = pool.run(
            context_cases.resumed, world, folder, spread(recipe, ranks), ParallelDims(), str(run), until, name
        )[0]
        expected = undisturbed["losses"][until - later["steps"] : until]
        assert later["losses"] == pytest.approx(expected, rel=1e-5)


def test_adapters_of_shared_out_experts_are_refused_by_name(tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["moe"], tmp_path, "lora_parameters")
    with pytest.raises(ConfigError, match="cannot be divided over an expert-parallel group") as error:
        inputs_for(CASES["moe"], folder, spread(recipe, 3), num_processes=3)
    assert error.value.help and error.value.help.endswith("set sharding.expert_parallel to 1")


@pytest.mark.parametrize(
    ("name", "ranks", "mesh", "changes", "words"),
    [
        ("moe", 2, {}, {}, "2 does not divide the 3 experts of model.layers.0.mlp.experts"),
        ("causal", 2, {}, {}, "the model has no fused experts"),
        ("mixtral", 3, {}, {}, "3 does not divide the 4 ranks of one copy of the model"),
        ("mixtral", 2, {}, {"compile": True}, "compiled blocks"),
        ("mixtral", 2, {}, {"layout": "accelerate"}, "the accelerate layout has no units of experts"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_by_name(
    tmp_path: Path, name: str, ranks: int, mesh: dict[str, int], changes: dict[str, Any], words: str
) -> None:
    recipe, folder = prepare_case(CASES[name], tmp_path, "full")
    recipe = spread(recipe, ranks, **changes)
    with pytest.raises(ConfigError, match=words) as error:
        inputs_for(CASES[name], folder, recipe, mesh=ParallelDims(**mesh), num_processes=4)
    assert "sharding.expert_parallel" in error.value.message
    assert error.value.help
