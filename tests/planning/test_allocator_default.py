"""Whose loop has expandable segments, and what the environment changes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from fsdptool.planning.hardware import expands, find_gpu
from fsdptool.records.cluster import Cluster
from fsdptool.records.plan import OWN_LOOP, TrainingLoop


@pytest.mark.parametrize(
    ("environment", "own", "others"),
    [
        ({}, True, False),
        ({"NCCL_IB_HCA": "mlx5"}, True, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False, False),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, False, False),
    ],
)
def test_segments_grow_where_train_or_the_environment_says_so(
    environment: Mapping[str, str], own: bool, others: bool
) -> None:
    cluster = Cluster(find_gpu("H100-80GB-SXM").gpu, 8, 1, environment=environment)
    assert expands(cluster, OWN_LOOP) is own
    assert expands(cluster, TrainingLoop(program="trainer")) is others
