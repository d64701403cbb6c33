"""The device mesh: sizes against a world size, and the ranks of a group as torch's own mesh has them."""

from __future__ import annotations

import dataclasses

import pytest

from fsdptool.records.mesh import DIMENSIONS, TRAINED, ParallelDims

SHAPES = [(1, 4, 1), (2, 4, 1), (2, 1, 2), (3, 2, 2), (1, 1, 1)]


def test_the_record_has_the_dimensions_in_their_order() -> None:
    # ``ep`` is no dimension of the mesh: experts are shared out over ranks of the others.
    assert tuple(field.name for field in dataclasses.fields(ParallelDims)) == (*DIMENSIONS, "ep")
    assert tuple(name for name in DIMENSIONS if name in TRAINED) == TRAINED


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_are_those_of_torchs_mesh(shape: tuple[int, int, int]) -> None:
    import torch

    replicate, shard, cp = shape
    dims = ParallelDims(replicate, shard, cp)
    ranks = torch.arange(replicate * shard * cp).view(shape)
    for index, name in enumerate(TRAINED[:3]):
        for group in ranks.movedim(index, -1).reshape(-1, shape[index]).tolist():
            assert {dims.group(rank, name) for rank in group} == {tuple(group)}
    # Ranks of one context-parallel group share their samples; all others have their own.
    assert [dims.data_rank(rank) for rank in ranks.flatten().tolist()] == [
        number for number in range(dims.data_ranks) for _ in range(cp)
    ]
    assert dims.shard_degree * dims.dp_replicate == ranks.numel()
    assert list(dims.parameter_mesh().values())[-1] == dims.shard_degree


def test_an_open_shard_size_takes_what_the_others_leave() -> None:
    assert ParallelDims(dp_replicate=2, cp=2).resolve(16) == ParallelDims(2, 4, 2)
    assert ParallelDims(2, 4, 2).resolve(16) == ParallelDims(2, 4, 2)


@pytest.mark.parametrize(
    ("dims", "world", "lines"),
    [
        (ParallelDims(), 4, []),
        (ParallelDims(dp_replicate=3), 4, ["does not multiply to 4 processes"]),
        (ParallelDims(2, 2), 8, ["dp_replicate 2 x dp_shard 2 x cp 1 x tp 1 x sp 1 = 4 does not multiply"]),
        (ParallelDims(0, 2, cp=-1), 8, ["dp_replicate is 0", "cp is -1"]),
    ],
)
def test_each_violation_is_one_line(dims: ParallelDims, world: int, lines: list[str]) -> None:
    violations = list(dims.violations(world))
    assert len(violations) == len(lines)
    assert all(words in line and "\n" not in line for words, line in zip(lines, violations, strict=True))
    if lines:
        with pytest.raises(ValueError, match=lines[0]):
            dims.resolve(world)


def test_parameters_reshard_to_proper_divisors_only() -> None:
    dims = ParallelDims(2, 4, 2)
    assert [ranks for ranks in range(10) if dims.reshard_violation(ranks) is None] == [2, 4]
