"""Compiled blocks train as eager ones do."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from cases import CASES, inputs_for, prepare_case
from pool import Pool
from ranks import share, weights_of
from sweeps import kept

from fsdptool.distributed.session import open_session
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Recipe, Sharding
from fsdptool.training.trainer import assemble

pytestmark = pytest.mark.distributed

STEPS = 3
DIVIDED = ParallelDims(dp_shard=1, tp=2)
RUNS: dict[str, tuple[str, int, ParallelDims, Sharding]] = {
    "causal": ("causal", 2, ParallelDims(), Sharding()),
    "masked": ("masked", 1, ParallelDims(), Sharding()),
    "divided layers": ("causal", 2, DIVIDED, Sharding()),
    "divided sequences": ("causal", 2, DIVIDED, Sharding(sequence_parallel=True)),
}


def run(name: str, folder: Path, recipe: Recipe, mesh: ParallelDims) -> dict[str, Any]:
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(recipe.seed)
    inputs = inputs_for(CASES[name], folder, recipe, mesh=mesh)
    session = open_session(inputs.settings)
    made = assemble(inputs, session)
    losses = [
        made.stepper.run(share(session, step, name, 2, torch.float32), rate=2e-3).loss
        for step in range(STEPS)
    ]
    graphs, breaks = int(counters["stats"]["unique_graphs"]), sum(counters["graph_break"].values())
    torch._dynamo.reset()
    return {"losses": losses, "graphs": graphs, "breaks": breaks, "names": list(weights_of(made))}


@pytest.mark.parametrize(
    "what",
    kept(RUNS, "causal", "divided layers"),
)
def test_compiled_blocks_train_as_eager_ones(pool: Pool, tmp_path: Path, what: str) -> None:
    name, world, mesh, sharding = RUNS[what]
    recipe, folder = prepare_case(CASES[name], tmp_path, "full", sharding=sharding)
    plain = pool.run(run, world, name, folder, recipe, mesh)[0]
    compiled = dataclasses.replace(recipe, sharding=dataclasses.replace(sharding, compile=True))
    for found in pool.run(run, world, name, folder, compiled, mesh, timeout=400.0):
        assert found["graphs"] > 0, "something was compiled"
        assert found["breaks"] == 0, "a block is one graph"
        assert found["losses"] == pytest.approx(plain["losses"], rel=1e-5)
        assert found["names"] == plain["names"], "parameters keep their names"
    assert plain["graphs"] == 0
