"""What compiled blocks keep and allocate, from Inductor's programs on fake tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from memory_cases import LLAMA, Case

import fsdptool.memory.tracing.make_trace as building
from fsdptool.memory import footprint
from fsdptool.memory.tracing.compiled_blocks import REMAINS, trace_compiled
from fsdptool.memory.tracing.tracer import traced_configuration
from fsdptool.modeling.compilation import MEASURED_TORCH
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.trace import KINDS, Trace

SMALL = {**LLAMA, "num_hidden_layers": 2}
FP32 = {"mixed_precision": "no"}
supported = pytest.mark.skipif(
    torch.__version__.split("+")[0].rpartition(".")[0] not in MEASURED_TORCH,
    reason="blocks are traced uncompiled on this torch",
)


def trace_on_cpu(**changes: Any) -> Trace:
    """Return the trace of two blocks as a CPU computes them."""
    case = Case(overrides=SMALL, settings=FP32, **changes)
    return building.make_trace(case.spec(), case.run(), "cpu")


def kept(trace: Trace, path: str) -> int:
    """Return the bytes of activations that are alive when the segments of one block's forward end."""
    alive = 0
    for segment in trace.segments:
        if segment.marker in ("enter", "leave") and (segment.path + ".").startswith(path + "."):
            for event in segment.events:
                number = abs(event) - 1
                if KINDS[trace.kinds[number]] == "activation":
                    alive += trace.sizes[number] if event > 0 else -trace.sizes[number]
    return alive


@supported
@pytest.mark.slow
def test_compiled_blocks_keep_what_the_partitioner_saves() -> None:
    case = Case(overrides=SMALL, settings=FP32, sharding={"compile": True})
    compiled = building.make_trace(case.spec(), case.run(), "cpu")
    eager = trace_on_cpu()
    # Per token, as torch 2.13 partitions: two reciprocal norms and the logarithms of attention; gate, up and
    # their product; eight tensors of the model's width (the normed inputs, queries, repeated keys and values,
    # attention's output and its input to the residual sum, the block's output); one of the keys' width.
    tokens, wide, narrow, keys, heads = 64, 352, 128, 64, 4
    assert kept(compiled, "model.layers.1") == 4 * tokens * (2 + heads + 3 * wide + 8 * narrow + keys)
    assert kept(compiled, "model.layers.1") < 0.8 * kept(eager, "model.layers.1")
    assert compiled.gradients.keys() == eager.gradients.keys()
    assert REMAINS in compiled.unknowns
    assert sum(s.kernels for s in compiled.segments) == sum(s.kernels for s in eager.segments)

    mesh = ParallelDims(dp_shard=8)
    predicted = footprint(compiled, case.plan(), mesh, case.recipe(), profile="cpu-fake")
    uncompiled = footprint(eager, case.plan(), mesh, case.recipe(), profile="cpu-fake")
    assert predicted.allocated_peak_range_bytes is not None
    low, high = predicted.allocated_peak_range_bytes
    assert predicted.allocated_peak_bytes == low <= high
    assert uncompiled.allocated_peak_range_bytes is None

    def fail(_: object) -> Trace:
        raise RuntimeError("a kernel without a shape rule")

    fallback = trace_compiled(eager, fail)
    assert fallback.segments == eager.segments
    assert "a kernel without a shape rule" in fallback.unknowns[-1]


def test_what_cannot_be_compiled_is_traced_eagerly_and_said() -> None:
    case = Case(
        overrides=SMALL,
        sharding={"compile": True},
        settings={**FP32, "activation_checkpointing": True, "activation_checkpointing_offload": True},
    )
    offloaded = building.make_trace(case.spec(), case.run(), "cpu")
    assert offloaded.known and offloaded.upper is None
    assert any("moves their inputs to the host" in why for why in offloaded.unknowns)


def test_compiled_traces_have_keys_of_their_own() -> None:
    case = Case(overrides=SMALL)
    recipe, settings = case.recipe(), case.yaml()
    compiled = dataclasses.replace(recipe, sharding=dataclasses.replace(recipe.sharding, compile=True))
    other = dataclasses.replace(settings, wrap_classes=("LlamaMLP",))
    keys = [
        traced_configuration(resolve_run(*pair))
        for pair in ((recipe, settings), (compiled, settings), (compiled, other))
    ]
    assert keys[0] != keys[1] != keys[2]
