"""Placements on a tensor-parallel group: what each rank holds of a parameter that is cut in sections."""

from __future__ import annotations

import pytest

from fsdptool.records.recipe import Sharding
from fsdptool.records.tensor_plan import Placement


@pytest.mark.parametrize(("sections", "size"), [((12,), 3), ((8, 2, 2), 2), ((8, 4, 4), 4)])
def test_the_pieces_of_all_ranks_are_the_whole_once(sections: tuple[int, ...], size: int) -> None:
    placement = Placement("qkv.weight", (sum(sections), 5), 0, sections)
    covered: list[int] = []
    for rank in range(size):
        pieces = list(placement.pieces(size, rank))
        # A rank holds its pieces one behind the other, one of each section.
        assert [inside for inside, _, _ in pieces] == [
            sum(s // size for s in sections[:n]) for n in range(len(sections))
        ]
        assert sum(length for _, _, length in pieces) == placement.local_shape(size)[0]
        covered += [place for _, whole, length in pieces for place in range(whole, whole + length)]
    assert sorted(covered) == list(range(sum(sections)))


def test_a_whole_parameter_keeps_its_shape() -> None:
    assert Placement("norm.weight", (16,), reason="norm").local_shape(4) == (16,)


@pytest.mark.parametrize(
    ("sharding", "units"),
    [
        (Sharding(), 1),
        (Sharding(expert_parallel=2), 2),
        (Sharding(expert_parallel=2, prefetch=1), 1),
        (Sharding(prefetch=3), 3),
    ],
)
def test_two_units_are_prefetched_where_an_exchange_of_tokens_makes_the_host_wait(
    sharding: Sharding, units: int
) -> None:
    assert sharding.units_ahead == units
