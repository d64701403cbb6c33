"""A model is cut before adapters are made for it, and is the one that would be cut afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from sweeps import kept

import fsdptool.memory.tracing.make_trace as building
from fsdptool.memory.tracing import early_cut, reduced_depth
from fsdptool.memory.tracing.tracer import trace
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.recipe import Batch, Lora, Method, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.records.trace import Trace
from fsdptool.source import resolve

SIZES = {"num_hidden_layers": 12, "hidden_size": 64, "intermediate_size": 96}
TARGETS: dict[str, tuple[Lora, set[bool]]] = {
    "all blocks": (Lora(targets=("q_proj", "down_proj")), {True}),
    # What is said of the base needs the full depth, which then serves every run.
    "quantised": (Lora(targets=("q_proj",), base="int8"), set()),
    "some blocks": (Lora(targets=("layers.2.self_attn.q_proj", "layers.9.self_attn.q_proj")), {False}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", kept(TARGETS, "quantised", "some blocks"))
def test_the_trace_is_that_of_a_model_that_is_cut_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lora, early = TARGETS[name]
    recipe = Recipe(
        ModelChoice("qwen3:tiny", overrides=SIZES),
        method=Method("lora", lora=lora),
        batch=Batch(micro_batch=1, sequence_length=16),
    )
    answers: list[bool] = []
    real = early_cut._stands_for

    def noted(*args: Any) -> bool:
        answers.append(real(*args))
        return answers[-1]

    def traced() -> Trace:
        reduced_depth._extrapolates.clear()
        settings = FsdpSettings(mixed_precision="bf16", activation_checkpointing=True)
        return trace(resolve("qwen3:tiny", overrides=SIZES), resolve_run(recipe, settings), use_cache=False)

    monkeypatch.setattr(early_cut, "_stands_for", noted)
    found = traced()
    assert set(answers) == early
    monkeypatch.setattr(building, "trained_model", uncut(building.trained_model))
    assert traced() == found


def uncut(make: Any) -> Any:
    """Return what builds models that are cut at the end."""
    return lambda spec, run, plan, cut=None, **options: make(spec, run, plan, **options)


def test_a_block_is_stood_for_by_the_one_a_whole_number_of_periods_before() -> None:
    from fsdptool.memory.tracing.layer_extrapolation import Shortened

    cuts = [Shortened("blocks", 2, 5, 9, 13), Shortened("blocks", 1, 12, 13, 16)]
    kept = [early_cut._kept_index(index, cuts) for index in range(16)]
    assert kept == [0, 1, 2, 3, 4, 3, 4, 3, 4, 5, 6, 7, 7, 7, 7, 8]
