"""What a search leaves out before it simulates: nothing that could have been chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest

from fsdptool.modeling.resolve import resolve_run
from fsdptool.planning import Options, make_plan, read_request
from fsdptool.planning import plan as planning
from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.candidate.point import point_of
from fsdptool.planning.search.bounds import is_bounded
from fsdptool.planning.search.search import run_search
from fsdptool.records.plan import Candidate, Plan, RejectionKind, SearchPoint

H100, RTX = "H100-80GB-SXM", "RTX-4090-24GB"
ONE_TRACE = {"micro_batch": 1, "tp": 1, "ep": 1}
CASES: dict[str, Mapping[str, Any]] = {
    "few meshes fit": {"reference": "llama3:70b", "gpu": H100, "gpus": 8, "nodes": 4, **ONE_TRACE},
    "nothing fits": {"reference": "llama3:70b", "gpu": RTX, "gpus": 2, **ONE_TRACE},
    "only offloaded": {"reference": "llama3:8b", "gpu": RTX, "gpus": 4},
    "everything fits": {"reference": "qwen2.5:0.5b", "gpu": H100, "gpus": 2},
    "experts": {"reference": "mixtral:8x7b", "gpu": H100, "gpus": 8},
    "adapters": {"reference": "qwen2.5:7b", "gpu": RTX, "gpus": 2, "method": "lora", "global_batch": 8},
}
SEVERAL = [
    pytest.param(name, marks=pytest.mark.slow if name == "few meshes fit" else pytest.mark.sweep)
    for name in CASES
]


def search(name: str) -> Plan:
    """Return the plan of a case."""
    return make_plan(
        read_request(cast("Options", {"sequence_length": 2048, "compile": False, **CASES[name]}))
    )


def described(plan: Plan, name: str | None) -> Candidate | None:
    """Return a candidate of a plan, without the number that depends on how many were evaluated."""
    found = next((item for item in plan.candidates if item.id == name), None)
    return replace(found, id="", rejected_by=None) if found is not None else None


@pytest.mark.parametrize("name", SEVERAL)
def test_the_same_is_chosen_as_when_everything_is_simulated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = search(name)
    monkeypatch.setattr(planning, "run_search", partial(run_search, bounded=False))
    whole = search(name)
    left_out = [item for item in bounded.candidates if is_bounded(item)]
    assert bool(left_out) == (name != "everything fits")
    assert not any(is_bounded(item) for item in whole.candidates)
    assert bounded.verdict == whole.verdict
    assert described(bounded, bounded.chosen) == described(whole, whole.chosen)
    assert bounded.next_steps == whole.next_steps
    if bounded.shortfall is not None and whole.shortfall is not None:
        assert bounded.shortfall.needed_bytes == whole.shortfall.needed_bytes
    simulated = {item.settings: item for item in whole.candidates}
    for item in left_out:
        other = simulated.get(item.settings)
        assert other is None or (other.rejected_by is not None and other.rejected_by.kind.does_not_fit), item


@pytest.mark.slow
def test_what_is_left_out_says_how_much_is_missing_at_least() -> None:
    plan = search("few meshes fit")
    item = next(item for item in plan.candidates if is_bounded(item))
    assert item.rejected_by is not None
    assert item.rejected_by.kind is RejectionKind.DEVICE_MEMORY
    assert item.rejected_by.detail.startswith("needs at least ")
    assert item.step_seconds is None


def test_the_least_of_a_point_does_not_depend_on_the_points_before_it() -> None:
    """What an estimator keeps for further points is kept by the number of shards, too."""
    options = {"reference": "llama3:tiny", "gpu": H100, "gpus": 8, "sequence_length": 64, "compile": False}
    inputs = read_request(cast("Options", options)).inputs
    spec, anatomy = planning.inspect_model(inputs)
    cluster, machine = inputs.clusters[0], inputs.machines[0]
    run = resolve_run(inputs.recipe, inputs.settings, ranks=cluster.world_size)
    start = point_of(run)
    points = [
        replace(start, dp_shard=8 // copies, dp_replicate=copies, reshard_after_forward=reshard)
        for copies in (1, 2, 4)
        for reshard in (True, False)
    ]

    def least(estimator: Estimator, point: SearchPoint) -> int | None:
        estimator.trace_of(start, cluster)
        return estimator.least_bytes(point, cluster, machine)

    shared = Estimator(spec, anatomy, run)
    found = [least(shared, point) for point in points]
    assert found == [least(Estimator(spec, anatomy, run), point) for point in points]
    assert found[0] is not None
    assert len(set(found)) == 6
