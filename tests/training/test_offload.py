"""CPU offload on a mesh of GPUs: shards, states and averages stay on the CPU; a resume continues them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import offload_cases as cases
import pytest
from pool import Pool

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("policy", [{}, {"mode": "sync"}, {"kind": "full"}], ids=["async", "sync", "full"])
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_an_offloaded_run_continues_with_its_own_states(
    pool: Pool, tmp_path: Path, optimizer: str, policy: dict[str, Any]
) -> None:
    for found in pool.run(cases.continued, 2, str(tmp_path), optimizer, policy):
        assert found["loaded"] == 2
        assert found["devices"] == {"cpu"}
        assert found["live"]
        assert found["equal"] and all(found["equal"].values())
