"""A run moves to another mesh, and its export computes what was trained there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import context_cases
import pytest
import reference
import torch
from cases import CASES, inputs_for, micro_batch, prepare_case
from pool import Pool
from sweeps import kept

from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Data, Sharding
from fsdptool.runs.folder import write_inputs
from fsdptool.training.export.api import export_run

pytestmark = pytest.mark.distributed

Mesh = tuple[int, ParallelDims, int]
"""Ranks, their mesh, and how many of them the experts are distributed over."""
RUNS: dict[str, tuple[str, Mesh, Mesh]] = {
    "encoder and decoder": (
        "seq2seq",
        (2, ParallelDims(dp_shard=1, tp=2), 1),
        (4, ParallelDims(dp_shard=2, tp=2), 1),
    ),
    "denoiser": ("flow", (4, ParallelDims(dp_shard=1, tp=4), 1), (2, ParallelDims(dp_shard=1, tp=2), 1)),
    "experts": (
        "qwen3 moe",
        (4, ParallelDims(dp_shard=2, tp=2), 4),
        (4, ParallelDims(dp_shard=2, cp=2), 2),
    ),
    "latent attention, experts": (
        "deepseek",
        (4, ParallelDims(dp_shard=2, tp=2), 1),
        (2, ParallelDims(dp_shard=2), 2),
    ),
}


@pytest.mark.parametrize("name", kept(RUNS, "encoder and decoder", "experts"))
def test_an_export_after_a_move_computes_what_was_trained(pool: Pool, tmp_path: Path, name: str) -> None:
    case_name, *meshes = RUNS[name]
    case = CASES[case_name]
    recipe, folder = prepare_case(case, tmp_path, "full", data=Data(source="synthetic"))
    alone = ParallelDims()
    undisturbed = pool.run(context_cases.resumed, 1, folder, recipe, alone, None, 4, case_name)[0]
    run = tmp_path / "run"
    run.mkdir()
    losses: list[float] = []
    for until, (world, mesh, experts) in zip((2, 4), meshes, strict=True):
        divided = dataclasses.replace(recipe, sharding=Sharding(expert_parallel=experts))
        trained = pool.run(context_cases.resumed, world, folder, divided, mesh, str(run), until, case_name)[0]
        losses += trained["losses"]
        write_inputs(inputs_for(case, run, divided, mesh=mesh, num_processes=world))
    assert losses == pytest.approx(undisturbed["losses"], rel=1e-5)
    whole = reference.plain_model(case, case.config, torch.float32)
    reference.load(whole, trained["after"])
    library: Any = type(whole)
    exported = library.from_pretrained(export_run(run).folder)
    with torch.no_grad():
        expected, found = (
            reference.forward(case, model.eval(), micro_batch(case, 0, 0))[0] for model in (whole, exported)
        )
    assert torch.equal(found, expected)
