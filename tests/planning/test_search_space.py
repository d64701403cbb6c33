"""The search space: meshes with tensor parallelism, and when they are looked at."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_choice import POINT

from fsdptool.inspection import inspect
from fsdptool.planning.clusters import make_cluster
from fsdptool.planning.hardware import load_gpu
from fsdptool.planning.search.space import enumerate_space, expert_sizes, tensor_sizes
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.plan import SearchPoint
from fsdptool.report.plan_words import mesh
from fsdptool.source import resolve

NODES = make_cluster(load_gpu("H100-80GB-SXM"), 8, 4)
START = replace(POINT, dp_shard=32)


@pytest.fixture(scope="module")
def anatomy() -> Anatomy:
    return inspect(resolve("llama3:tiny"))


def space(anatomy: Anatomy, *tensor: int, start: SearchPoint = START) -> list[SearchPoint]:
    points = enumerate_space(
        start,
        NODES,
        anatomy,
        fixed=(),
        wide=False,
        sequence_length=4096,
        hardware=True,
        kernels=("fused",),
        tensor=tensor,
    )
    return list(points)[1:]


def test_every_mesh_uses_all_ranks_and_keeps_the_global_batch(anatomy: Anatomy) -> None:
    points = space(anatomy, 2, 8)
    assert {point.tp for point in points} == {2, 8}
    assert {point.ranks for point in points} == {32}
    assert {point.global_batch for point in points} == {START.global_batch}
    # Ranks that share their samples may take larger micro-batches, or hybrid sharding.
    assert max(point.micro_batch for point in points if point.tp == 8) == 8
    assert {(p.dp_replicate, p.dp_shard) for p in points if p.tp == 8} == {(1, 4), (2, 2), (4, 1)}
    assert {point.tp for point in space(anatomy)} == {1}
    divided = replace(START, tp=2, dp_shard=16, micro_batch=3, accumulation=2)
    assert {point.micro_batch for point in space(anatomy, 2, start=divided)} == {1, 2, 3, 6}


def test_groups_stay_inside_a_node_and_given_sizes_are_kept() -> None:
    assert tensor_sizes(START, NODES, ()) == [2, 4, 8]
    assert tensor_sizes(replace(START, tp=16, dp_shard=2), NODES, ()) == [1, 2, 4, 8]
    assert tensor_sizes(START, replace(NODES, gpus_per_node=4), ()) == [2, 4]
    pair = replace(NODES, nodes=1, gpus_per_node=2)
    assert tensor_sizes(START, pair, ()) == [], "nothing would remain to shard over"
    assert tensor_sizes(START, NODES, ("tp",)) == tensor_sizes(START, NODES, ("mesh",)) == []
    assert tensor_sizes(START, make_cluster(None, 8), ()) == []
    assert tensor_sizes(replace(START, layout="accelerate"), NODES, ()) == []


def test_experts_are_shared_out_in_whole_nodes(anatomy: Anatomy) -> None:
    assert expert_sizes(START, NODES, (), 128) == [8, 16, 32]
    assert expert_sizes(START, NODES, (), 8) == [8]
    assert expert_sizes(replace(START, ep=8), NODES, (), 128) == [16, 32]
    assert expert_sizes(START, NODES, ("ep",), 128) == expert_sizes(START, NODES, (), None) == []
    # What the trainer refuses is not proposed: replicas of less than a group, or an integer reshard.
    points = space(anatomy, start=replace(START, ep=16))
    assert {point.ep for point in points} == {16}
    assert {(point.dp_replicate, point.dp_shard) for point in points} == {(1, 32), (2, 16)}
    assert {point.reshard_after_forward for point in points} == {True, False}


def test_a_mesh_in_words_names_the_tensor_parallel_ranks() -> None:
    assert mesh(replace(START, dp_shard=4, dp_replicate=1, cp=2, tp=8)) == "shard 4 x context 2 x tensor 8"
    assert mesh(replace(START, dp_shard=4, dp_replicate=1, cp=1, tp=1)) == "shard 4"
