"""Fused kernels that a plan may assume: their parts are those of the traced operators, and what they save."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest

from fsdptool.errors import PlanError
from fsdptool.inspection import inspect
from fsdptool.memory.tracing.tracer import trace
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.units import as_trained
from fsdptool.planning.hardware import load_gpu, machine_for
from fsdptool.planning.plan import make_plan
from fsdptool.planning.request.inputs import read_request
from fsdptool.planning.request.options import Options
from fsdptool.planning.time.fused_kernels import fused_shares
from fsdptool.planning.time.operator_time import float8_seconds
from fsdptool.planning.time.step_time import owners_of
from fsdptool.records.recipe import Batch, Data, Lora, Method, ModelChoice, Recipe, Sharding
from fsdptool.records.sharding import FsdpSettings
from fsdptool.records.trace import Operation
from fsdptool.source import resolve_choice

NAMES = ("fused_norm", "fused_rope", "fused_glu", "fused_lora")
DATA = Path(__file__).parents[2] / "fsdptool" / "planning" / "data" / "fused_kernels.json"
TOKENS, WIDTH = 512, 256
SIZES = {
    "num_hidden_layers": 1, "hidden_size": WIDTH, "intermediate_size": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 500,
}  # fmt: skip


def small(method: Method) -> Recipe:
    return Recipe(
        ModelChoice("llama3.1:8b", overrides=SIZES, dtype="bfloat16" if method.lora else "auto"),
        method=method,
        data=Data(document_mask=False),
        batch=Batch(sequence_length=TOKENS),
        sharding=Sharding(compile=False),
    )


@pytest.fixture(scope="module")
def moved() -> dict[str, list[float]]:
    """Bytes that the operators of each module move per number of the hidden states, products apart."""
    recipe = small(Method("lora", Lora(rank=4, targets=("o_proj",))))
    run = resolve_run(recipe, FsdpSettings(mixed_precision="bf16", num_processes=2))
    found = trace(resolve_choice(recipe.model), run, profile="cuda", use_cache=False)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    backward = False
    for owner, segment in owners_of(found):
        backward |= segment.marker == "backward"
        products = sum(found.operations[number].bytes_moved for number in segment.operations)
        sums[owner][backward] += (segment.bytes_moved - products) / TOKENS / WIDTH
    return sums


def test_eager_parts_are_those_of_the_traced_operators(moved: dict[str, list[float]]) -> None:
    """In forward: two norms and two sums, queries and keys of half of them, four widths of the MLP."""
    parts = json.loads(DATA.read_text())["parts"]
    eager = {name: part["eager"]["bytes"][0] for name, part in parts.items()}
    block = "model.layers.0"
    assert moved[block][0] == pytest.approx(2 * eager["fused_norm"] + 2 * eager["residual"], rel=0.02)
    assert moved[f"{block}.self_attn"][0] == pytest.approx(1.5 * eager["fused_rope"], rel=0.1)  # and angles
    assert moved[f"{block}.mlp"][0] == pytest.approx(4 * eager["fused_glu"], rel=0.02)
    assert moved[f"{block}.self_attn.o_proj"][0] == pytest.approx(eager["fused_lora"], rel=0.05)


def test_each_module_keeps_the_ratio_of_its_parts() -> None:
    recipe = small(Method("lora", Lora(rank=4, targets=("o_proj",))))
    anatomy = as_trained(inspect(resolve_choice(recipe.model)), recipe).anatomy
    found = fused_shares(anatomy, NAMES)
    block = "model.layers.0"
    assert set(found) == {block, f"{block}.self_attn", f"{block}.self_attn.o_proj", f"{block}.mlp"}
    assert found[block].traffic[0] == pytest.approx((2 * 4 + 2 * 6) / (2 * 36 + 2 * 6))
    assert found[f"{block}.self_attn.o_proj"].traffic == (0.0, 0.0)
    assert fused_shares(anatomy, ("compile",)) == {}
    only = fused_shares(anatomy, ("fused_norm",))
    assert set(only) == {block}
    assert found[block].narrowed(0.1).traffic == (0.1, 0.1)


def test_a_plan_that_assumes_them_is_faster_and_holds_as_much() -> None:
    common = Options(reference="llama3.1:8b", overrides=SIZES, gpu="H100-80GB-SXM", gpus=1, search=False)
    common |= Options(sequence_length=4096, precision="bf16", compile=False)
    plain, fused = (
        make_plan(read_request(Options(**common, assume=names))).candidates[0]
        for names in ((), ("fused_norm", "fused_rope", "fused_glu"))
    )
    assert fused.seconds["compute"] < plain.seconds["compute"]
    assert fused.allocated_peak_bytes == plain.allocated_peak_bytes
    with pytest.raises(PlanError, match="says how float8 products are scaled"):
        read_request(Options(**common, assume=("mxfp8",)))


def test_scales_of_rows_slow_products_and_those_of_blocks_save_a_pass() -> None:
    gpu = load_gpu("B200")
    machine = machine_for(gpu)
    large = Operation("product", "bfloat16", 2.0 * 8192**3, 3 * 8192**2 * 2)
    thin = Operation("product", "bfloat16", 2.0 * 8192 * 8192 * 16, 8192 * 8192 * 2)
    seconds = {name: float8_seconds(large, gpu, machine, name) for name in ("tensor", "row", "block")}
    assert seconds["block"] < seconds["tensor"] < seconds["row"]
    assert float8_seconds(thin, gpu, machine, "row") == float8_seconds(thin, gpu, machine)
