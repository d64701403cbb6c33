"""Fifty steps on two and four ranks equal a plain single-process loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import reference
from cases import CASES, _DEEPER, prepare_case
from pool import Pool
from ranks import train

from fsdptool.records import Recipe

pytestmark = pytest.mark.distributed


def teacher_config(name: str) -> dict[str, Any]:
    config = CASES[name].config
    key, value = _DEEPER[config.get("model_type") or config["_class_name"]]
    return {**config, key: value}


def hold(pool: Pool, name: str, folder: Path, recipe: Recipe, world: int, **options: Any) -> dict[str, Any]:
    """Train on ranks, train plainly, compare; returns what the ranks found."""
    results = pool.run(train, world, name, folder, recipe, *options.get("args", ()))
    found = results[0]
    assert len({result["hash"] for result in results}) == 1
    expected = reference.run(name, recipe, found["before"], found["teacher"], teacher_config(name))
    losses, weights, _ = reference.compare(found, expected)
    assert losses <= 1e-5
    assert weights <= 1e-5
    assert found["losses"][-1] != found["losses"][0]
    return found


@pytest.mark.parametrize("method", ["full", "lora", "distillation"])
@pytest.mark.parametrize("name", CASES)
def test_fifty_steps_equal_a_plain_loop(pool: Pool, tmp_path: Path, name: str, method: str) -> None:
    recipe, folder = prepare_case(CASES[name], tmp_path, method)
    for world in (2, 4):
        hold(pool, name, folder, recipe, world)
