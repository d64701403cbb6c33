"""What a footprint says, and what it refuses to say."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from memory_cases import LLAMA, Case

from fsdptool.inspection import inspect
from fsdptool.memory import footprint
from fsdptool.memory.simulation.collective_bytes import DEVICES
from fsdptool.memory.simulation.simulate import prepare
from fsdptool.memory.tracing.make_trace import without_activations
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.units import plan_units
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Batch, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.records.trace import Trace
from fsdptool.source import resolve


def states_of(reference: str, ranks: int) -> tuple[Anatomy, dict[str, int | None]]:
    """Return the states of fp32 AdamW training, from a trace that knows nothing else."""
    spec = resolve(reference)
    anatomy = inspect(spec, use_cache=False)
    recipe = Recipe(ModelChoice(reference), batch=Batch(sequence_length=128))
    settings = FsdpSettings(num_processes=ranks, mixed_precision="no")
    trace = without_activations(anatomy, recipe, "cuda", "not traced")
    made = footprint(
        trace, plan_units(anatomy, resolve_run(recipe, settings)), ParallelDims().resolve(ranks), recipe
    )
    assert made.allocated_peak_bytes is None
    assert made.unknowns
    return anatomy, {component.name: component.bytes for component in made.components}


@pytest.mark.parametrize(("ranks", "share"), [(1, 1.0), (4, 0.25)])
def test_124_million_parameters_come_out_as_in_the_tables(ranks: int, share: float) -> None:
    """496 MB of parameters and 992 MB of AdamW states on one GPU, a quarter each on four."""
    anatomy, live = states_of("gpt2:small", ranks)
    assert anatomy.total_parameters == 124_439_808
    assert live["parameters"] == pytest.approx(share * 4 * 124_439_808, rel=0.001)
    assert live["optimizer"] == pytest.approx(share * 8 * 124_439_808, rel=0.001)


def test_seven_billion_parameters_take_14_gb_on_eight() -> None:
    """28 + 28 + 56 GB over eight ranks: parameters and states here, gradients a third of the rest."""
    anatomy, live = states_of("llama2:7b", 8)
    parameters, states = live["parameters"], live["optimizer"]
    assert parameters is not None and states is not None
    whole = parameters * 2 + states
    assert whole == pytest.approx(16 * anatomy.total_parameters / 8, rel=0.001)
    assert whole / 1e9 == pytest.approx(13.5, abs=0.5)


@pytest.mark.slow
def test_the_peak_is_the_sum_of_its_components() -> None:
    case = Case()
    made = footprint(case.trace(), case.plan(), ParallelDims().resolve(8), case.recipe())
    assert made.allocated_peak_bytes == sum(component.bytes or 0 for component in made.components)
    assert made.peak is not None
    assert made.allocated_peak_bytes == sum(holding.bytes for holding in made.peak.live)
    assert max(moment.allocated_bytes for moment in made.timeline) <= made.allocated_peak_bytes
    for moment in made.timeline:
        assert sum(moment.components.values()) == sum(moment.groups.values()) == moment.allocated_bytes
    assert made.confidence == "verified"


@pytest.mark.slow
def test_gloo_staging_is_a_line_of_its_own() -> None:
    """The copy that gloo sums adds to the CPU profile over gloo and to no other."""
    case = Case(
        ranks=2,
        settings={"mixed_precision": "bf16"},
        batch={"sequence_length": 8},
        overrides={**LLAMA, "num_hidden_layers": 2, "vocab_size": 100},
    )
    trace, plan, mesh, recipe = case.trace(), case.plan(), ParallelDims().resolve(2), case.recipe()
    over = {
        profile: footprint(trace, plan, mesh, recipe, profile=profile, timeline=False)
        for profile in ("cpu-fake", "cpu-gloo", "cuda")
    }
    staged = {
        profile: sum(c.bytes or 0 for c in made.components if c.name == "gloo staging")
        for profile, made in over.items()
    }
    assert staged["cpu-fake"] == staged["cuda"] == 0
    block = next(unit for unit in plan.units if unit.kind == "block")
    assert staged["cpu-gloo"] == sum(parameter.numel for parameter in block.parameters) * 4
    fake, gloo = over["cpu-fake"].allocated_peak_bytes, over["cpu-gloo"].allocated_peak_bytes
    assert fake is not None and gloo is not None and fake <= gloo <= fake + staged["cpu-gloo"]


def test_optimizers_keep_no_states_for_parameters_without_a_gradient() -> None:
    """As for a vision tower in training on text: its shards stay, its AdamW states (8 bytes) do not exist."""
    case = Case()
    trace, plan, mesh, recipe = case.trace(), case.plan(), ParallelDims().resolve(8), case.recipe()
    silent = "model.layers.2.self_attn.q_proj.weight"
    partial = dataclasses.replace(
        trace, gradients={name: number for name, number in trace.gradients.items() if name != silent}
    )
    all_states, fewer = (
        prepare(plan, mesh, recipe, device=DEVICES["cpu-fake"], trace=seen).states
        for seen in (trace, partial)
    )
    differences = [sum(a.sizes) - sum(b.sizes) for a, b in zip(all_states.device, fewer.device, strict=True)]
    hidden = LLAMA["hidden_size"]
    # Exponential averages and the step count.
    assert [size for size in differences if size] == [8 * hidden * hidden // 8 + 4]


def test_reserved_is_at_least_allocated() -> None:
    case = Case()
    made = footprint(case.trace(), case.plan(), ParallelDims().resolve(8), case.recipe())
    assert made.reserved_peak_bytes is not None and made.allocated_peak_bytes is not None
    assert made.reserved_peak_bytes >= made.allocated_peak_bytes


def test_gradients_join_the_peak_when_they_stay() -> None:
    """A second micro-batch meets the first one's sharded gradients."""
    one, two = Case(ranks=1), Case(ranks=1, batch={"accumulation": 2})
    trace = one.trace()
    first, _ = one.simulate(trace)
    second, live = two.simulate(trace)
    assert second > first
    assert live["gradients"] >= 4 * inspect(one.spec()).total_parameters


@pytest.mark.slow
def test_offloaded_gradients_leave_the_device_as_they_are_reduced() -> None:
    """On a GPU at most one unit's are there; on CPU the device is the host, and nothing changes."""
    kept, moved = Case(), Case(settings={"cpu_offload": True})
    trace = kept.trace()
    assert moved.plan().cpu_offload
    at = {
        (name, profile): footprint(
            trace, case.plan(), ParallelDims().resolve(8), case.recipe(), profile=profile
        )
        for name, case in (("kept", kept), ("moved", moved))
        for profile in ("cuda", "cpu-fake")
    }
    assert "gradients" not in {c.name for c in at["moved", "cuda"].components}
    assert (at["moved", "cuda"].allocated_peak_bytes or 0) < (at["kept", "cuda"].allocated_peak_bytes or 0)
    assert at["moved", "cuda"].host_bytes_per_rank > 0
    assert at["moved", "cpu-fake"].allocated_peak_bytes == at["kept", "cpu-fake"].allocated_peak_bytes


def test_an_unchecked_torch_is_unverified() -> None:
    case = Case()
    trace = dataclasses.replace(case.trace(), torch="9.9.0")
    made = footprint(trace, case.plan(), ParallelDims().resolve(8), case.recipe(), timeline=False)
    assert made.confidence == "unverified"


@pytest.mark.slow
def test_shortened_and_full_depth_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty blocks from four are forty blocks traced, to the byte."""
    from fsdptool.memory.tracing import reduced_depth

    case = Case(overrides={**LLAMA, "num_hidden_layers": 40})
    short = case.trace()
    assert [(repeat.traced, repeat.total) for repeat in short.repeats] == [(4, 40)]
    monkeypatch.setattr(reduced_depth, "repeats", lambda model: False)
    full = case.trace()
    assert not full.repeats
    assert case.simulate(short) == case.simulate(full)


@pytest.mark.slow
def test_alternating_blocks_are_one_period() -> None:
    overrides = {
        "num_hidden_layers": 16,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1000,
        "layer_types": None,
    }
    trace = Case("gemma2:2b", overrides).trace()
    assert trace.known, trace.unknowns
    assert [(repeat.period, repeat.traced, repeat.total) for repeat in trace.repeats] == [(2, 8, 16)]


def test_a_trace_does_not_depend_on_what_the_caller_has_set() -> None:
    import torch

    usual = Case().trace()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.no_grad():
            assert Case().trace() == usual
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_trace_survives_json() -> None:
    trace = Case().trace()
    assert from_json(Trace, to_json(trace)) == trace


@pytest.mark.slow
def test_a_cached_trace_and_its_footprint_need_no_torch(tmp_path: Path) -> None:
    script = f"""
import sys
from fsdptool.memory import footprint, trace
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.recipe import Batch, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.source import resolve
overrides = {LLAMA!r}
recipe = Recipe(ModelChoice("llama3:8b", overrides=overrides), batch=Batch(sequence_length=64))
made = trace(resolve("llama3:8b", overrides=overrides), resolve_run(recipe, FsdpSettings(num_processes=8)))
print(made.known, "torch" in sys.modules)
"""
    said = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "FSDPTOOL_CACHE": str(tmp_path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        for _ in range(2)
    ]
    assert said == [["True", "True"], ["True", "False"]]
