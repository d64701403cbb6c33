"""Sequences split over ranks: the same losses and weights as whole ones, or a refusal by name."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import context_cases as cases
import pytest
from cases import CASES, FEW, LLAMA, inputs_for, prepare_case
from pool import Pool
from ranks import train
from sweeps import kept
from test_numerics import hold
from variants import CHECKPOINTED, CLIPPED

from fsdptool.memory import footprint, trace
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.checkpointing import Checkpointing
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Data, Sharding

pytestmark = pytest.mark.distributed

SPLIT = ParallelDims(dp_shard=1, cp=2)

RUNS: dict[str, tuple[str, str, int, ParallelDims]] = {
    "full, two ranks": ("causal", "full", 2, SPLIT),
    # Twelve tokens in eight chunks: sequences are filled up.
    "full, four ranks": ("causal", "full", 4, ParallelDims(dp_shard=1, cp=4)),
    "lora, four ranks": ("causal", "lora", 4, ParallelDims(dp_shard=1, cp=4)),
    "distillation, four ranks": ("causal", "distillation", 4, ParallelDims(dp_shard=1, cp=4)),
    "beside data parallel": ("causal", "full", 4, ParallelDims(dp_shard=2, cp=2)),
    "beside data parallel, replicated adapters": (
        "causal",
        "lora_replicated",
        4,
        ParallelDims(dp_shard=2, cp=2),
    ),
    "beside replicas": ("causal", "full", 4, ParallelDims(dp_replicate=2, dp_shard=1, cp=2)),
    "packed documents": ("packed", "full", 2, SPLIT),
    "packed documents, four ranks": ("packed", "distillation", 4, ParallelDims(dp_shard=1, cp=4)),
    "experts": ("moe", "full", 2, SPLIT),
    "sliding windows": ("windows", "full", 2, SPLIT),
}


@pytest.mark.parametrize(
    "run",
    kept(
        RUNS, "full, two ranks", "lora, four ranks", "beside replicas", "packed documents", "sliding windows"
    ),
)
def test_split_sequences_train_as_whole_ones(pool: Pool, tmp_path: Path, run: str) -> None:
    name, method, world, mesh = RUNS[run]
    recipe, folder = prepare_case(CASES[name], tmp_path, method)
    results = pool.run(train, world, name, folder, recipe, mesh, FEW)
    losses, weights, _ = hold(results, name, recipe, steps=FEW)
    assert losses <= 1e-5
    assert weights <= 1e-5


PASSED_ROUND: dict[str, tuple[str, str, int, ParallelDims, dict[str, Any]]] = {
    "full, four ranks": ("causal", "full", 4, ParallelDims(dp_shard=1, cp=4), {}),
    "lora, beside data parallel": ("causal", "lora", 4, ParallelDims(dp_shard=2, cp=2), {}),
    "distillation": ("causal", "distillation", 2, SPLIT, {}),
    "experts, checkpointing": ("moe", "full", 2, SPLIT, CHECKPOINTED),
}


@pytest.mark.parametrize(
    "run",
    kept(PASSED_ROUND, "lora, beside data parallel", "experts, checkpointing"),
)
def test_keys_and_values_passed_round_train_as_gathered_ones(pool: Pool, tmp_path: Path, run: str) -> None:
    name, method, world, mesh, changes = PASSED_ROUND[run]
    recipe, folder = prepare_case(CASES[name], tmp_path, method)
    recipe = dataclasses.replace(recipe, data=Data(packing=False))
    settings = {"cp_comm_strategy": "alltoall", **changes}
    results = pool.run(train, world, name, folder, recipe, mesh, FEW, 4, settings)
    losses, weights, _ = hold(results, name, recipe, steps=FEW)
    assert losses <= 1e-5
    assert weights <= 1e-5


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "checkpointing": ({}, CHECKPOINTED),
    "selective checkpointing": (
        {"sharding": Sharding(checkpointing=Checkpointing(mode="selective"))},
        CHECKPOINTED,
    ),
    "no reshard": ({}, {"reshard_after_forward": False}),
    "accumulation unsharded": ({"sharding": Sharding(accumulation="unsharded")}, {}),
    "accelerate's layout": ({"sharding": Sharding(layout="accelerate")}, {}),
    "clipped": ({"optimizer": CLIPPED}, {}),
}


@pytest.mark.parametrize(
    "variant",
    kept(VARIANTS, "selective checkpointing", "no reshard", "accelerate's layout"),
)
def test_every_way_to_shard_suits_split_sequences(pool: Pool, tmp_path: Path, variant: str) -> None:
    changes, settings = VARIANTS[variant]
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full", **changes)
    results = pool.run(train, 2, "causal", folder, recipe, SPLIT, FEW, 4, settings)
    losses, weights, _ = hold(results, "causal", recipe, steps=FEW)
    assert losses <= 1e-5
    assert weights <= 1e-5


def test_every_tensor_agrees_in_double_precision(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["packed"], tmp_path, "full")
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dtype="float64"))
    results = pool.run(train, 2, "packed", folder, recipe, SPLIT, FEW)
    losses, weights, worst = hold(results, "packed", recipe, steps=FEW)
    assert losses <= 1e-12
    assert weights <= 1e-12
    assert worst <= 1e-11


def test_parameters_shard_over_the_ranks_of_a_sequence_too(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full")
    for mesh, ranks in (
        (ParallelDims(dp_shard=2, cp=2), 4),
        (ParallelDims(dp_replicate=2, dp_shard=1, cp=2), 2),
    ):
        proof = pool.run(train, 4, "causal", folder, recipe, mesh, 1)[0]["proof"]
        assert proof["proven"]
        for example in proof["examples"]:
            rows = [shape[0] for shape in example["local_shapes"]]
            assert sum(rows) == example["shape"][0] * (4 // ranks)
            assert max(rows) == -(-example["shape"][0] // ranks)


def test_validation_and_tokens_count_a_sequence_once(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["moe"], tmp_path, "full")
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, attention="sdpa"))
    whole = pool.run(cases.validated, 1, folder, recipe, ParallelDims())[0]
    for world, mesh in ((2, SPLIT), (4, ParallelDims(dp_shard=2, cp=2))):
        found = pool.run(cases.validated, world, folder, recipe, mesh)
        assert found[0]["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert found[0]["items"] == whole["items"]
        assert found[0]["weight"] == whole["weight"]
        assert found[0]["load"] == whole["load"]


def test_memory_is_what_was_predicted(pool: Pool, tmp_path: Path) -> None:
    wide = dataclasses.replace(
        CASES["causal"],
        config={**LLAMA, "hidden_size": 192, "intermediate_size": 320, "max_position_embeddings": 512},
    )
    recipe, folder = prepare_case(wide, tmp_path, "full")
    recipe = dataclasses.replace(recipe, batch=dataclasses.replace(recipe.batch, accumulation=2))
    inputs = inputs_for(wide, folder, recipe, mesh=SPLIT, num_processes=2)
    settings = inputs.settings
    found = trace(inputs.spec, resolve_run(recipe, settings), use_cache=False)
    expected = footprint(found, inputs.units, settings.mesh, recipe, profile="cpu-gloo").allocated_peak_bytes
    assert pool.run(cases.measured, 2, folder, recipe, SPLIT)[0] == pytest.approx(expected, rel=0.01)


def test_samples_are_those_of_whole_sequences(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full")
    whole = pool.run(cases.continued, 1, folder, recipe, ParallelDims())[0]
    assert pool.run(cases.continued, 2, folder, recipe, SPLIT) == [whole, ""]


def test_a_run_continues_on_another_number_of_ranks_per_sequence(pool: Pool, tmp_path: Path) -> None:
    recipe, folder = prepare_case(CASES["causal"], tmp_path, "full")
    undisturbed = pool.run(cases.resumed, 1, folder, recipe, ParallelDims(), None, 8)[0]
    (tmp_path / "run").mkdir()
    pool.run(cases.resumed, 2, folder, recipe, SPLIT, str(tmp_path / "run"), 4)
    later = pool.run(
        cases.resumed, 4, folder, recipe, ParallelDims(dp_shard=1, cp=4), str(tmp_path / "run"), 8
    )[0]
    assert later["steps"] == 4
    assert later["losses"] == pytest.approx(undisturbed["losses"][4:], rel=1e-5)


REFUSED = {
    "recurrent": "MambaForCausalLM has layers of type linear_attention",
    "mixed": "JambaMambaDecoderLayer",
    "soft caps": "caps its attention scores",
    "sinks": "attention sinks",
    "encoder": "objective masked_lm",
    "seq2seq": "objective seq2seq",
    "denoiser": "objective flow_matching",
    "eager": "attention eager sees",
    "compiled": "sharding.compile",
    "long rope": "rope type dynamic",
    "no positions": "Bloom",
    "passed round, packed": "alltoall does not support the mask that separates packed documents",
    "passed round, windows": "alltoall does not support MistralAttention: it has a mask",
    "passed round, dropping": "alltoall does not support LlamaAttention: it drops attention",
    "experts, filled up": "multiple of 4",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_split_is_refused_by_name(pool: Pool, tmp_path: Path, what: str) -> None:
    for message in pool.run(cases.refused, 2, str(tmp_path), what):
        assert re.search(REFUSED[what], message), message
        assert "\n" not in message
