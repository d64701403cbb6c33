"""The checkpointing policy that is made for a budget, beside those that people use without a search."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from sweeps import kept

from fsdptool.inspection import inspect
from fsdptool.modeling.resolve import resolve_run
from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.candidate.point import point_of
from fsdptool.planning.clusters import make_cluster
from fsdptool.planning.hardware import find_gpu, machine_for
from fsdptool.planning.search.checkpointing import USUAL, BlockOption, make_ladder, optimal_candidates
from fsdptool.records.plan import Candidate
from fsdptool.records.recipe import Batch, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.source import resolve

FULL, SOME, NONE = BlockOption("full", 0, 4.0), BlockOption("selective", 2, 1.0), BlockOption("none", 9, 0.0)


def test_the_ladder_takes_what_saves_the_most_time_per_byte_first_and_late_blocks_before_early_ones() -> None:
    other = [BlockOption("full", 0, 1.0), BlockOption("none", 2, 0.0)]
    ladder = make_ladder([[FULL, SOME, NONE], [FULL, SOME, NONE], other])
    assert [rung.policy for rung in ladder] == [
        "full",
        "1*full+1*selective+1*full",
        "2*selective+1*full",
        "2*selective+1*none",
        "1*selective+2*none",
        "none",
    ]
    assert [rung.bytes for rung in ladder] == [0, 2, 4, 6, 13, 20]
    assert [rung.seconds for rung in ladder] == [9.0, 6.0, 3.0, 2.0, 1.0, 0.0]


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama3:8b",
        {
            "num_hidden_layers": 6,
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 1000,
        },
    ),
    "gpt2": ("gpt2:small", {"n_layer": 5, "n_embd": 512, "n_head": 8, "vocab_size": 1000}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", kept(MODELS, "gpt2"))
def test_no_usual_policy_is_faster_at_the_same_memory(name: str) -> None:
    reference, overrides = MODELS[name]
    spec = resolve(reference, overrides=overrides)
    cluster = make_cluster(find_gpu("H100-80GB-SXM").gpu, 8, 1)
    recipe = Recipe(
        ModelChoice(reference, overrides=overrides), batch=Batch(micro_batch=8, sequence_length=1024)
    )
    run = resolve_run(recipe, FsdpSettings(num_processes=8))
    estimator, start = Estimator(spec, inspect(spec), run), point_of(run)
    machine = machine_for(cluster.gpu)

    def evaluate(policy: str) -> Candidate:
        point = dataclasses.replace(start, checkpointing=policy)
        return estimator.candidate(policy, point, cluster, machine, detail=False, replay=False)

    usual = {policy: evaluate(policy) for policy in USUAL}
    peaks = {policy: item.allocated_peak_bytes or 0 for policy, item in usual.items()}
    assert peaks["full"] < peaks["selective"] < peaks["none"]
    faster = 0
    for share in (0.3, 0.7):
        budget = int(peaks["full"] + share * (peaks["none"] - peaks["full"]))
        best = optimal_candidates(
            estimator,
            dataclasses.replace(start, checkpointing="full"),
            cluster,
            machine,
            room=lambda candidate, b=budget: b - (candidate.allocated_peak_bytes or b + 1),  # type: ignore[misc]
            known=list(usual.values()),
        )[0]
        assert best.allocated_peak_bytes is not None
        assert best.step_seconds is not None
        assert best.allocated_peak_bytes <= budget
        rivals = [item.step_seconds or 0.0 for name, item in usual.items() if peaks[name] <= budget]
        assert best.step_seconds <= min(rivals)
        faster += best.step_seconds < min(rivals)
    assert faster, "the search found nothing that the usual policies do not do"
