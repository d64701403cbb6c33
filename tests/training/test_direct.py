"""Collectives sent directly over gloo: what gloo itself would give, and an end when a rank has gone."""

from __future__ import annotations

import direct_cases as cases
import pytest
from pool import Pool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gathers_under_way_at_once_equal_gloos_own(pool: Pool, world: int, dtype: str) -> None:
    assert pool.run(cases.gathered_beside_gloo, world, dtype) == [(world, [True] * 3)] * world


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_gradients_are_summed_in_the_order_of_ranks(pool: Pool, world: int, dtype: str) -> None:
    assert pool.run(cases.reduced_in_order, world, dtype) == [True] * world


def test_only_sums_are_reduced(pool: Pool) -> None:
    assert all("not reduced by" in said for said in pool.run(cases.averaged, 2))


def test_a_rank_that_has_gone_ends_the_wait(pool: Pool) -> None:
    waited, gone = pool.run(cases.left_alone, 2, timeout=60)
    assert gone == "gone"
    assert "closed by peer" in waited.lower() or "reset by peer" in waited.lower()
