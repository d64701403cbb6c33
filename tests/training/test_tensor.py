"""Layers divided over ranks: the same losses and weights as whole ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import context_cases
import pytest
import torch
from cases import CASES, FEW, LLAMA, inputs_for, prepare_case
from pool import Pool
from ranks import train
from sweeps import kept
from test_numerics import hold

from fsdptool.errors import ConfigError
from fsdptool.memory import footprint, trace
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Batch, Optimizer, Sharding
from fsdptool.runs.manifest import read_manifest
from fsdptool.training.export.api import Saved

pytestmark = pytest.mark.distributed

SEQUENCE = Sharding(sequence_parallel=True)
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


@pytest.mark.parametrize(
    "run",
    kept(
        RUNS,
        "lora, two ranks",
        "beside data parallel",
        "beside context",
        "tied, norms of heads",
        "fused, transposed",
        "experts, mixtral",
        "latent attention, adapters",
        "joint attention",
    ),
)
def test_divided_layers_train_as_whole_ones(pool: Pool, tmp_path: Path, run: str) -> None:
    name, method, world, mesh = RUNS[run]
    recipe, folder = prepare_case(CASES[name], tmp_path, method)
    results = pool.run(train, world, name, folder, recipe, mesh, FEW)
    losses, weights, _ = hold(results, name, recipe, steps=FEW)
    assert losses <= 1e-5
    assert weights <= 1e-5


SEQUENCE_RUNS: dict[str, tuple[str, str, int, ParallelDims]] = {
    "full": ("causal", "full", 2, ParallelDims(dp_shard=1, tp=2)),
    "adapters": ("causal", "lora", 4, ParallelDims(dp_shard=2, tp=2)),
    "beside context": ("causal", "full", 4, ParallelDims(dp_shard=1, cp=2, tp=2)),
    "tied, norms of heads": ("qwen3 tied", "full", 4, ParallelDims(dp_shard=2, tp=2)),
    "fused, transposed": ("gpt2", "full", 4, ParallelDims(dp_shard=1, tp=4)),
    "fused, adapters": ("gpt2", "lora", 2, ParallelDims(dp_shard=1, tp=2)),
    "experts": ("moe", "full", 4, ParallelDims(dp_shard=2, tp=2)),
    "experts, frozen": ("moe", "lora", 2, ParallelDims(dp_shard=1, tp=2)),
    "latent attention": ("deepseek", "full", 2, ParallelDims(dp_shard=1, tp=2)),
    "sinks and biases": ("gpt-oss", "full", 2, ParallelDims(dp_shard=1, tp=2)),
    "a head behind the gathered norm": ("modern bert", "full", 2, ParallelDims(dp_shard=1, tp=2)),
}


@pytest.mark.parametrize(
    "run",
    kept(SEQUENCE_RUNS, "adapters", "fused, transposed", "experts", "a head behind the gathered norm"),
)
def test_divided_sequences_train_as_whole_ones(pool: Pool, tmp_path: Path, run: str) -> None:
    name, method, world, mesh = SEQUENCE_RUNS[run]
    recipe, folder = prepare_case(CASES[name], tmp_path, method, sharding=SEQUENCE)
    results = pool.run(train, world, name, folder, recipe, mesh, FEW)
    losses, weights, _ = hold(results, name, recipe, steps=FEW)
    assert losses <= 1e-5
    assert weights <= 1e-5


def test_a_run_continues_on_every_other_mesh(pool: Pool, tmp_path: Path) -> None:
    """Fused projections are saved in chunks, and read by other divisions and by none.

    Dividing sequences changes nothing of what is saved.
    """
    recipe, folder = prepare_case(CASES["gpt2"], tmp_path, "full")
    divided = dataclasses.replace(recipe, sharding=SEQUENCE)
    undisturbed = pool.run(context_cases.resumed, 1, folder, recipe, ParallelDims(), None, 8, "gpt2")[0]
    run = tmp_path / "run"
    run.mkdir()
    for world, mesh, until, chosen in (
        (2, ParallelDims(dp_shard=1, tp=2), 2, recipe),
        (4, ParallelDims(dp_shard=1, tp=4), 4, divided),
        (1, ParallelDims(), 5, recipe),
        (4, ParallelDims(dp_shard=2, tp=2), 7, divided),
        (2, ParallelDims(dp_shard=2), 8, recipe),
    ):
        later = pool.run(context_cases.resumed, world, folder, chosen, mesh, str(run), until, "gpt2")[0]
        assert later["losses"] == pytest.approx(
            undisturbed["losses"][until - later["steps"] : until], rel=1e-5
        )


def test_a_full_checkpoint_is_whole(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["gpt2"], tmp_path, "full")
    run = tmp_path / "run"
    run.mkdir()
    mesh = ParallelDims(dp_shard=1, tp=2)
    divided = dataclasses.replace(recipe, sharding=SEQUENCE)
    pool.run(context_cases.resumed, 2, folder, divided, mesh, str(run), 2, "gpt2", "full")
    chunks = tmp_path / "chunks"
    chunks.mkdir()
    pool.run(context_cases.resumed, 2, folder, divided, mesh, str(chunks), 2, "gpt2")
    # What an export reads.
    full, sharded = (
        Saved(path, read_manifest(path))
        for path in (next((root / "checkpoints").glob("step-*")) for root in (run, chunks))
    )
    names = sorted(full.names("model/"))
    assert names == sorted(sharded.names("model/"))
    assert all(torch.equal(full.get(f"model/{n}"), sharded.get(f"model/{n}")) for n in names)
    first = pool.run(context_cases.resumed, 1, folder, recipe, ParallelDims(), None, 4, "gpt2")[0]
    later = pool.run(context_cases.resumed, 1, folder, recipe, ParallelDims(), str(run), 4, "gpt2", "full")[0]
    assert later["losses"] == pytest.approx(first["losses"][2:], rel=1e-5)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("mesh", "accumulation"), [(ParallelDims(dp_shard=1, tp=2), 2), (ParallelDims(dp_shard=2, tp=2), 1)]
)
def test_memory_is_what_was_predicted(
    pool: Pool, tmp_path: Path, mesh: ParallelDims, accumulation: int, sequence: bool
) -> None:
    wide = dataclasses.replace(
        CASES["causal"],
        config={**LLAMA, "hidden_size": 192, "intermediate_size": 320, "max_position_embeddings": 512},
    )
    sharding = Sharding(sequence_parallel=sequence)
    recipe, folder = prepare_case(wide, tmp_path, "full", sharding=sharding)
    batch = dataclasses.replace(recipe.batch, accumulation=accumulation)
    recipe = dataclasses.replace(recipe, batch=batch)
    world = mesh.size("dp_shard") * mesh.tp
    inputs = inputs_for(wide, folder, recipe, mesh=mesh, num_processes=world)
    settings = inputs.settings
    found = trace(inputs.spec, resolve_run(recipe, settings), use_cache=False)
    expected = footprint(found, inputs.units, settings.mesh, recipe, profile="cpu-gloo").allocated_peak_bytes
    assert pool.run(context_cases.measured, world, folder, recipe, mesh)[0] == pytest.approx(
        expected, rel=0.01
    )


def test_samples_are_those_of_a_whole_model(pool: Pool, tmp_path: Path) -> None:
    """The whole vocabulary is chosen from, also where a group does not divide the sequence so far."""
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full")
    whole = pool.run(context_cases.continued, 1, folder, recipe, ParallelDims())[0]
    recipe = dataclasses.replace(recipe, sharding=SEQUENCE)
    assert (
        pool.run(context_cases.continued, 2, folder, recipe, ParallelDims(dp_shard=1, tp=2))[0] == whole != ""
    )


def test_validation_counts_a_sample_once(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["moe"], tmp_path, "full")
    whole = pool.run(context_cases.validated, 1, folder, recipe, ParallelDims())[0]
    found = pool.run(context_cases.validated, 4, folder, recipe, ParallelDims(dp_shard=2, tp=2))[0]
    assert found["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert (found["items"], found["weight"], found["load"]) == (
        whole["items"],
        whole["weight"],
        whole["load"],
    )


BESIDE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a teacher": ("distillation", {}, {}),
    "offload": ("full", {}, {"cpu_offload": True}),
    "accelerate's layout": ("full", {"sharding": Sharding(layout="accelerate")}, {}),
}


@pytest.mark.parametrize("what", BESIDE)
def test_other_settings_beside_divided_layers(pool: Pool, tmp_path: Path, what: str) -> None:
    method, changes, settings = BESIDE[what]
    recipe, folder = prepare_case(CASES["causal"], tmp_path, method, **changes)
    mesh = ParallelDims(dp_shard=2, tp=2)
    results = pool.run(train, 4, "causal", folder, recipe, mesh, 4, 4, settings)
    losses, weights, _ = hold(results, "causal", recipe, steps=4)
    assert losses <= 1e-5
    assert weights <= 1e-5


def test_ranks_drop_the_same_of_whole_tensors_only(pool: Pool, tmp_path: Path) -> None:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)
    case = dataclasses.replace(CASES["gpt2"], config={**CASES["gpt2"].config, **rates})
    recipe, folder = prepare_case(case, tmp_path, "full")
    mesh = ParallelDims(dp_shard=1, tp=2)
    kept, other = pool.run(context_cases.dropping, 2, folder, recipe, mesh, False)
    assert kept["losses"] == other["losses"]
    assert kept["whole"] == other["whole"]
    assert kept["numbers"]["whole"] == other["numbers"]["whole"]
    assert not set(kept["numbers"]["divided"]) & set(other["numbers"]["divided"])
    # Recomputation draws the same numbers again.
    again = pool.run(context_cases.dropping, 2, folder, recipe, mesh, True)[0]
    assert again["losses"] == kept["losses"]
    parts = dataclasses.replace(recipe, sharding=SEQUENCE)
    first, second = pool.run(context_cases.dropping, 2, folder, parts, mesh, True)
    assert first["whole"] == second["whole"]
    # Behind the sum of a region, too, each rank has other positions.
    assert not set(first["numbers"]["whole"]) & set(second["numbers"]["whole"])
    without = pool.run(context_cases.dropping, 1, folder, recipe, ParallelDims(), False)[0]
    assert without["losses"] != kept["losses"]


@pytest.mark.parametrize(
    ("name", "size", "changes", "words"),
    [
        ("causal", 4, {}, "tp_size 4 does not divide the 2 key and value heads of model.layers.0.self_attn"),
        ("causal", 2, {"optimizer": Optimizer(name="muon")}, "optimizer muon needs whole matrices"),
        ("causal", 2, {"base": "nf4"}, "stored as nf4"),
        ("causal", 1, {"sharding": SEQUENCE}, "needs a tensor-parallel group"),
        (
            "causal",
            2,
            {"sharding": SEQUENCE, "batch": Batch(2, 15)},
            "2 ranks cannot divide the 15 positions",
        ),
        ("seq2seq", 2, {"sharding": SEQUENCE}, "do not lie in one list of blocks"),
        ("masked", 2, {"sharding": SEQUENCE}, "no norm follows bert.encoder.layer"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_name(
    tmp_path: Path, name: str, size: int, changes: dict[str, Any], words: str
) -> None:
    base = changes.pop("base", None)
    recipe, folder = prepare_case(CASES[name], tmp_path, "full" if base is None else "lora", **changes)
    if base is not None:
        assert recipe.method.lora is not None
        lora = dataclasses.replace(recipe.method.lora, base=base)
        recipe = dataclasses.replace(recipe, method=dataclasses.replace(recipe.method, lora=lora))
    with pytest.raises(ConfigError, match=words):
        inputs_for(CASES[name], folder, recipe, mesh=ParallelDims(dp_shard=1, tp=size))
