"""Reviewed tables of where every parameter of 38 flavours lies on a tensor-parallel group.

``benchmarks/detect/split_tables.py`` writes them, without what is empty.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdptool.inspection import inspect
from fsdptool.inspection.document import summary
from fsdptool.records.codec import to_json
from fsdptool.source import resolve
from fsdptool.tensor.division import plan_tensor_parallel

TABLES = [
    json.loads(line)
    for line in (Path(__file__).parent / "split_tables.jsonl").read_text(encoding="utf-8").splitlines()
]


def test_the_tables_cover_all_kinds_of_models() -> None:
    references = {item["reference"] for item in TABLES}
    assert len(references) == len(TABLES) >= 38
    assert {"llama3:8b", "mixtral:8x7b", "t5:small", "vit:base-patch16-224", "flux.1:dev"} <= references


@pytest.mark.slow
@pytest.mark.parametrize("reviewed", TABLES, ids=lambda item: item["reference"])
def test_the_derived_table_is_the_reviewed_one(reviewed: dict[str, Any]) -> None:
    expected = dict(reviewed)
    anatomy = inspect(resolve(expected.pop("reference")))
    split = summary(anatomy, plan_tensor_parallel(anatomy, reviewed["size"]))
    derived = json.loads(json.dumps(to_json(split)))
    for row, wanted in zip(derived["parameters"], reviewed["parameters"], strict=True):
        assert {key: value for key, value in row.items() if key in wanted or value} == wanted
    assert {**derived, "parameters": reviewed["parameters"]} == expected
