"""A head that computes the loss trains as one that returns logits does, and as a plain loop does."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import reference
from cases import CASES, prepare_case
from pool import Pool
from ranks import train

from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Lora, Method, Objective, Recipe, Sharding

pytestmark = pytest.mark.distributed

STEPS = 6
CHUNK = 5
"""Of 24 tokens: products of 20 and of 4 rows, and chunks of 5 and of 4."""
SAVED = Method("lora", lora=Lora(rank=4, targets=("q_proj",), modules_to_save=("lm_head",)))
UNSHARDED = Sharding(accumulation="unsharded")

AGAINST_LOGITS: dict[str, tuple[str, dict[str, Any], ParallelDims]] = {
    "the head of adapters, saved": ("causal", {"method": SAVED}, ParallelDims()),
    "adapters, tied tables": ("packed", {"method": Method("lora", lora=Lora(rank=4))}, ParallelDims()),
    "unsharded accumulation": ("packed", {"sharding": UNSHARDED}, ParallelDims()),
    "divided sequences": ("causal", {}, ParallelDims(dp_shard=1, cp=2)),
}


def fused(recipe: Recipe) -> Recipe:
    """Return the recipe with a head that computes the loss."""
    objective = Objective(recipe.objective.name, {**recipe.objective.options, "chunk": CHUNK}, fused=True)
    return dataclasses.replace(recipe, objective=objective)


def count_and_train(*arguments: Any) -> dict[str, Any]:
    from fsdptool.families.objectives import fused_head

    calls, original = [], fused_head.fused_cross_entropy

    def counted(*given: Any) -> Any:
        calls.append(given)
        return original(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_head, "fused_cross_entropy", counted)
        return train(*arguments) | {"fused": len(calls)}


@pytest.mark.parametrize(
    ("name", "method"),
    [("causal", "full"), ("packed", "full"), ("moe", "full"), ("seq2seq", "full"), ("causal", "lora")],
)
def test_steps_equal_a_plain_loop(pool: Pool, tmp_path: Path, name: str, method: str) -> None:
    """Untied and tied heads, the loss of routers, two stacks, a frozen head; two micro-batches a rank."""
    recipe, folder = prepare_case(CASES[name], tmp_path, method)
    results = pool.run(count_and_train, 2, name, folder, fused(recipe), None, STEPS)
    assert {result["fused"] for result in results} == {2 * STEPS}
    assert len({result["hash"] for result in results}) == 1
    found = results[0]
    expected = reference.run(name, recipe, found["before"], {}, steps=STEPS)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
    losses, weights, _ = reference.compare(found, expected)
    assert losses <= 1e-5
    assert weights <= 1e-5


@pytest.mark.parametrize("name", ["causal", "packed", "seq2seq"])
def test_double_precision_agrees_with_a_plain_loop(pool: Pool, tmp_path: Path, name: str) -> None:
    recipe, folder = prepare_case(CASES[name], tmp_path, "full")
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, dtype="float64"))
    found = pool.run(count_and_train, 2, name, folder, fused(recipe), None, STEPS)[0]
    expected = reference.run(name, recipe, found["before"], {}, steps=STEPS)
    losses, weights, worst = reference.compare(found, expected)
    assert losses <= 1e-12
    assert weights <= 1e-12
    assert worst <= 1e-11


@pytest.mark.parametrize("what", AGAINST_LOGITS)
def test_steps_equal_those_with_logits(pool: Pool, tmp_path: Path, what: str) -> None:
    name, changes, mesh = AGAINST_LOGITS[what]
    recipe, folder = prepare_case(CASES[name], tmp_path, "full")
    recipe = dataclasses.replace(recipe, **changes)
    plain, own = (
        pool.run(count_and_train, 2, name, folder, one, mesh, STEPS)[0] for one in (recipe, fused(recipe))
    )
    assert plain["fused"] == 0
    assert own["fused"] >= 2 * STEPS
    assert own["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert own["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    for key, weight in own["after"].items():
        assert float((weight - plain["after"][key]).abs().max()) <= 1e-5
