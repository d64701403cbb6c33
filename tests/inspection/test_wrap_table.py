"""The reviewed table: for every published flavour, its exact total and the units that are right.

Totals and units were established independently of the tool and reviewed by hand; ``why`` says what
is not obvious, ``unsuitable_or_absent`` and ``unlisted`` where the class's own ``_no_split_modules``
disagrees.
"""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from fsdptool.inspection import examine
from fsdptool.source import resolve

ROWS = [json.loads(line) for line in (Path(__file__).parent / "wrap_table.jsonl").read_text().splitlines()]


def test_the_table_is_whole() -> None:
    assert len(ROWS) == 225
    assert len({row["reference"] for row in ROWS}) == 225
    odd = [
        row for row in ROWS if len(row["wrap"]) != 1 or row.get("unlisted") or row.get("unsuitable_or_absent")
    ]
    assert not [row["reference"] for row in odd if not row.get("why")], "what is not obvious has a reason"


@pytest.mark.sampled(every=12, whole=3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["reference"])
def test_total_and_units_are_right(row: dict[str, Any]) -> None:
    anatomy = examine(resolve(row["reference"]), use_cache=False).anatomy
    assert anatomy.spec.model_class == row["class"]
    assert anatomy.total_parameters == row["parameters"]
    assert set(anatomy.wrap.classes) == set(row["wrap"])
    instances = {item.name: item.instances for item in anatomy.wrap.candidates if item.chosen}
    assert instances == row["wrap"]
    judged = {entry.name: entry.status for entry in anatomy.wrap.no_split_modules}
    assert {k: v for k, v in judged.items() if v != "right"} == row.get("unsuitable_or_absent", {})
    assert sorted(set(row["wrap"]) - set(judged)) == row.get("unlisted", [])
    gc.collect(0)
