"""Ranks whose samples use different parameters train as one rank does, or stop with an error."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import reference
import torch
from cases import CASES
from pool import Pool
from sweeps import kept
from uneven_cases import UNEVEN, WAYS, Batch, Way, micro_batch, on_one_rank, on_ranks, recipe, train

from fsdptool.records.recipe import Optimizer, Recipe

pytestmark = pytest.mark.distributed

STEPS = 6
BOUND = 1e-6
RUNS = [
    ("experts", "two ranks"),
    ("experts", "unsharded accumulation"),
    ("experts", "replicated LoRA"),
    ("experts", "hybrid, accumulation"),
    ("experts", "replicas alone"),
    ("experts", "resume"),
    ("experts alone", "hybrid, unsharded accumulation"),
    ("experts alone", "no reshard"),
    ("experts alone", "reshard to two"),
    ("experts alone", "prefetch two"),
    ("experts alone", "checkpointing"),
    ("tower", "accumulation"),
    ("tower", "reshard to two"),
    ("tower", "hybrid, resume"),
    ("switch", "clipping"),
    ("switch", "hybrid"),
    ("llava", "accumulation"),
    ("llava", "LoRA"),
    ("qwen2-vl", "hybrid"),
]
"""One of each kind; benchmarks/training/uneven_parameters.py runs the rest, thirty steps."""
OFTEN = (
    ("experts", "replicated LoRA"),
    ("experts", "hybrid, accumulation"),
    ("experts alone", "reshard to two"),
    ("experts alone", "checkpointing"),
    ("tower", "hybrid, resume"),
    ("switch", "clipping"),
    ("llava", "accumulation"),
)
"""What is not left to a sweep."""


@pytest.mark.parametrize(("name", "way"), kept(RUNS, *OFTEN))
def test_ranks_that_use_different_parameters_equal_one_rank(
    pool: Pool, tmp_path: Path, name: str, way: str
) -> None:
    """Losses, norms, weights, and which parameters no step has touched."""
    chosen = recipe(name, WAYS[way], tmp_path)
    results = on_ranks(pool, name, WAYS[way], tmp_path, chosen, STEPS)
    expected = on_one_rank(pool, name, WAYS[way], tmp_path, chosen, STEPS)
    assert len({result["hash"] for result in results}) == 1
    losses, weights, _ = reference.compare(results[0], expected)
    assert losses <= BOUND
    assert weights <= BOUND
    assert results[0]["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert results[0]["unused"] == expected["unused"]
    if name.startswith("experts") and WAYS[way].method == "full":
        # The last expert of each block: weight decay would have moved it.
        assert len(expected["unused"]) == 2
        for parameter in expected["unused"]:
            assert torch.equal(results[0]["after"][parameter], results[0]["before"][parameter])


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor", "muon"])
def test_every_optimizer_leaves_unused_parameters_alone(pool: Pool, tmp_path: Path, optimizer: str) -> None:
    way = dataclasses.replace(
        WAYS["resume"],
        optimizer=Optimizer(
            name=optimizer, learning_rate=1e-2, momentum=0.9, weight_decay=0.05, clip_grad_norm=None
        ),
    )
    chosen = recipe("experts", way, tmp_path)
    results = on_ranks(pool, "experts", way, tmp_path, chosen, STEPS)
    expected = on_one_rank(pool, "experts", way, tmp_path, chosen, STEPS)
    losses, weights, _ = reference.compare(results[0], expected)
    # Muon's products are in bfloat16.
    assert losses <= (1e-3 if optimizer == "muon" else BOUND)
    assert weights <= (1e-3 if optimizer == "muon" else BOUND)
    for block in (0, 1):
        name = f"layers.{block}.experts.3.weight"
        assert torch.equal(results[0]["after"][name], results[0]["before"][name])


def test_bf16_gradients_that_come_late_are_summed_with_earlier_ones(pool: Pool, tmp_path: Path) -> None:
    """Sums that wait are fp32, a parameter's first gradient in the last micro-batch is bf16."""
    way = dataclasses.replace(WAYS["unsharded accumulation"], settings={"mixed_precision": "bf16"})
    chosen = recipe("experts", way, tmp_path)
    results = on_ranks(pool, "experts", way, tmp_path, chosen, STEPS)
    alone = Way(1, way.count, optimizer=way.optimizer, sharding=way.sharding, settings=way.settings)
    expected = pool.run(train, 1, "experts", alone, tmp_path, chosen, STEPS)[0]
    losses, weights, _ = reference.compare(results[0], expected)
    assert losses <= 1e-2
    assert weights <= 1e-2
    assert results[0]["unused"] == expected["unused"]


def test_an_evaluation_skips_towers_on_some_ranks(pool: Pool, tmp_path: Path) -> None:
    chosen = recipe("tower", WAYS["two ranks"], tmp_path)
    way = dataclasses.replace(WAYS["two ranks"], count=4)
    results = pool.run(train, 2, "tower", way, tmp_path, chosen, 4, None, True)
    alone = dataclasses.replace(way, ranks=1)
    expected = pool.run(train, 1, "tower", alone, tmp_path, chosen, 4, None, True)[0]
    assert results[0]["evaluations"] == pytest.approx(expected["evaluations"], rel=BOUND)
    assert results[0]["evaluations"] == results[1]["evaluations"]


def test_ranks_that_run_alike_stop_to_send_messages(pool: Pool, tmp_path: Path) -> None:
    """Two steps settle the order. What rank 1 then leaves out it stands in for, without a message."""
    way = WAYS["two ranks"]
    chosen = recipe("tower", way, tmp_path)
    results = pool.run(train, 2, "tower", way, tmp_path, chosen, STEPS, None, False, pictures_until(3))
    alone = dataclasses.replace(way, ranks=1)
    expected = pool.run(train, 1, "tower", alone, tmp_path, chosen, STEPS, None, False, pictures_until(3))[0]
    assert results[0]["messages"][0] > 0
    assert results[0]["messages"][2:] == [0] * (STEPS - 2)
    losses, weights, _ = reference.compare(results[0], expected)
    assert losses <= BOUND
    assert weights <= BOUND


class pictures_until:
    """Every sample has a picture, those of rank 1 until a step only."""

    def __init__(self, step: int, turns: int = 1) -> None:
        self.step, self.turns = step, turns

    def __call__(self, name: str, step: int, index: int) -> Batch:
        batch = micro_batch("experts", step, index)
        if step < self.step or index % 2 == 0:
            turns = 1 if step < self.step else self.turns
            batch["turns"] = torch.full((2,), turns)
        return batch


def test_a_unit_that_runs_more_often_than_before_stops_the_run(pool: Pool, tmp_path: Path) -> None:
    """Not silently: the other rank would gather something else."""
    chosen = recipe("tower", WAYS["two ranks"], tmp_path)
    batches = pictures_until(3, turns=2)
    missing = "rank 0 would gather tower.blocks.0 where no rank did in the steps before"
    with pytest.raises(AssertionError, match=missing):
        pool.run(train, 2, "tower", WAYS["two ranks"], tmp_path, chosen, STEPS, None, False, batches)


def test_a_model_without_such_parameters_has_the_collectives_it_had(pool: Pool, tmp_path: Path) -> None:
    """From the third step on: one each for the weight, the results, and stops with unused parameters."""
    from cases import prepare_case

    chosen, folder = prepare_case(CASES["causal"], tmp_path, "full")
    for counts in pool.run(counted_messages, 2, folder, chosen):
        assert counts[2:] == [3] * (len(counts) - 2)


def counted_messages(folder: Path, chosen: Recipe) -> list[int]:
    """Return how many messages other than those of units each step sends."""
    from unittest import mock

    import torch.distributed as dist
    from cases import inputs_for
    from ranks import share

    from fsdptool.distributed.session import open_session
    from fsdptool.training.trainer import assemble

    inputs = inputs_for(CASES["causal"], folder, chosen)
    session = open_session(inputs.settings)
    assembled = assemble(inputs, session)
    counts = []
    sums = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)
    gathers = mock.patch.object(dist, "all_gather", wraps=dist.all_gather)
    with sums as summed, gathers as gathered:
        for step in range(5):
            summed.reset_mock()
            gathered.reset_mock()
            batches = share(session, step, "causal", 4, torch.float32)
            assembled.stepper.run(batches, rate=assembled.rate)
            counts.append(summed.call_count + gathered.call_count)
    return counts


def test_every_model_of_the_sweep_is_in_these_tests() -> None:
    assert {name for name, _ in RUNS} == set(UNEVEN)
