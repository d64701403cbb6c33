"""How models are split over a tensor-parallel group: the plan, the placements and one rank's local model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from fsdptool.errors import ConfigError
from fsdptool.inspection import inspect
from fsdptool.records.anatomy import Anatomy, Parameter
from fsdptool.records.tensor_plan import Placement, TensorPlan
from fsdptool.source import resolve
from fsdptool.tensor.division import localise, plan_expert_parallel, plan_tensor_parallel
from fsdptool.tensor.placements import placements


@cache
def anatomy_of(reference: str) -> Anatomy:
    """Return the anatomy of a flavour at its published size."""
    return inspect(resolve(reference))


def placed(anatomy: Anatomy, plan: TensorPlan) -> dict[str, Placement]:
    """Return the placements by name."""
    return {placement.fqn: placement for placement in placements(anatomy.parameters, plan)}


def test_a_decoder_with_grouped_queries() -> None:
    anatomy = anatomy_of("qwen3:0.6b")
    plan = plan_tensor_parallel(anatomy, 4)
    assert not plan.indivisible
    assert plan.heads["model.layers.0.self_attn"] == (16, 8)
    assert {"model.layers.0.self_attn", "model.layers.0.mlp"} <= set(plan.regions)
    where = placed(anatomy, plan)
    assert where["model.layers.0.self_attn.k_proj.weight"].local_shape(4) == (256, 1024)
    assert where["model.layers.0.self_attn.o_proj.weight"].local_shape(4) == (1024, 512)
    assert where["model.layers.0.mlp.down_proj.weight"].dim == 1
    norm = where["model.layers.0.self_attn.q_norm.weight"]
    assert (norm.dim, norm.partial_gradient, norm.reason) == (None, True, "norm")
    outside = where["model.layers.0.input_layernorm.weight"]
    assert (outside.dim, outside.partial_gradient, outside.reason) == (None, False, "norm")
    # Tied: the head is an alias of the embedding, and both modules are split.
    assert where["model.embed_tokens.weight"].dim == 0
    assert {m.path for m in plan.modules if m.style == "vocabulary"} == {"model.embed_tokens", "lm_head"}


def test_key_heads_are_not_repeated() -> None:
    found = plan_tensor_parallel(anatomy_of("qwen3:0.6b"), 16).indivisible
    assert [(item.what, item.count, item.valid) for item in found] == [("key and value heads", 8, (8,))]


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    anatomy = anatomy_of("gpt2:small")
    plan = plan_tensor_parallel(anatomy, 2)
    assert not plan.indivisible
    assert placed(anatomy, plan)["transformer.wte.weight"].reason == "embedding"
    assert plan.notes == ("transformer.wte stays whole: 2 does not divide its 50257 rows (1 or 29 does)",)


def test_fused_projections_are_cut_in_sections() -> None:
    anatomy = anatomy_of("gpt2:small")
    plan = plan_tensor_parallel(anatomy, 2)
    fused = placed(anatomy, plan)["transformer.h.0.attn.c_attn.weight"]
    assert (fused.dim, fused.sections) == (1, (768, 768, 768))
    assert list(fused.pieces(2, 1)) == [(0, 384, 384), (384, 1152, 384), (768, 1920, 384)]
    sizes = plan.attributes["transformer.h.0.attn"]
    assert sizes == {"embed_dim": 768, "num_heads": 12, "split_size": 768}
    assert placed(anatomy, plan)["transformer.h.0.attn.c_proj.bias"].reason == "after_sum"


def test_an_encoder_decoder_with_relative_positions() -> None:
    anatomy = anatomy_of("t5:small")
    plan = plan_tensor_parallel(anatomy, 4)
    where = placed(anatomy, plan)
    bias = where["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
    assert bias.local_shape(4) == (32, 2)
    assert plan.divided_arguments == ("position_bias",)
    assert "decoder.block.0.layer.1.EncDecAttention" in plan.regions
    assert "decoder.block.0.layer.2.DenseReluDense.wo" in plan.sums
    # Every module that holds the shared table is split with it.
    tables = {m.path for m in plan.modules if m.style == "vocabulary"}
    assert tables == {"shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head"}


@pytest.mark.parametrize("reference", ["mixtral:8x7b", "qwen3-moe:30b-a3b"])
def test_fused_experts(reference: str) -> None:
    anatomy = anatomy_of(reference)
    plan = plan_tensor_parallel(anatomy, 4)
    where = placed(anatomy, plan)
    first = where["model.layers.0.mlp.experts.gate_up_proj"]
    second = where["model.layers.0.mlp.experts.down_proj"]
    width = second.shape[2]
    assert (first.dim, first.sections, second.dim) == (1, (width, width), 2)
    assert "model.layers.0.mlp.experts" in plan.regions
    assert "model.layers.0.mlp.experts" in plan.sums
    router = where["model.layers.0.mlp.gate.weight"]
    assert (router.dim, router.partial_gradient, router.reason) == (None, False, "router")


def test_whole_experts_on_ranks() -> None:
    anatomy = anatomy_of("mixtral:8x7b")
    plan = plan_expert_parallel(anatomy, 8)
    first = placed(anatomy, plan)["model.layers.0.mlp.experts.gate_up_proj"]
    assert (first.dim, first.local_shape(8)) == (0, (1, 28672, 4096))
    found = plan_expert_parallel(anatomy, 3).indivisible
    assert [(item.what, item.count, item.valid) for item in found] == [("experts", 8, (2, 4))]


def test_a_local_model_holds_its_share() -> None:
    anatomy = anatomy_of("qwen3:0.6b")
    plan = plan_tensor_parallel(anatomy, 2)
    local = localise(anatomy, plan)
    assert [p.fqn for p in local.parameters] == [p.fqn for p in anatomy.parameters]
    divided = sum(p.numel for p in anatomy.parameters) - sum(p.numel for p in local.parameters)
    halves = sum(p.numel for p in anatomy.parameters if "norm" not in p.fqn)
    assert divided * 2 == halves


def adapters(path: str, inputs: int, outputs: int) -> list[Parameter]:
    """Return the parameters of a layer with LoRA of rank 8, under PEFT's names."""
    return [
        Parameter(f"{path}.base_layer.weight", (outputs, inputs), "bfloat16", False),
        Parameter(f"{path}.lora_A.default.weight", (8, inputs), "float32"),
        Parameter(f"{path}.lora_B.default.weight", (outputs, 8), "float32"),
    ]


def test_adapters_lie_with_their_layers() -> None:
    plan = plan_tensor_parallel(anatomy_of("qwen3:0.6b"), 2)
    base, first, second = placements(adapters("model.layers.0.mlp.up_proj", 1024, 3072), plan)
    assert (base.dim, first.dim, second.dim) == (0, None, 0)
    assert first.partial_gradient
    base, first, second = placements(adapters("model.layers.0.mlp.down_proj", 3072, 1024), plan)
    assert (base.dim, first.dim, second.dim) == (1, 1, None)
    assert not second.partial_gradient


def test_adapters_of_fused_projections_have_the_same_sections() -> None:
    plan = plan_tensor_parallel(anatomy_of("gpt2:small"), 2)
    first, second, *_ = placements(adapters("transformer.h.0.attn.c_attn", 768, 2304)[1:], plan)
    assert (first.dim, second.dim, second.sections) == (None, 0, (768, 768, 768))
    first, second, *_ = placements(adapters("transformer.h.0.attn.c_proj", 768, 768)[1:], plan)
    assert (first.dim, second.dim) == (1, None)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.layers.0.mlp.up_proj.lora_magnitude_vector.default.weight", (3072,), "float32"),
        ("model.embed_tokens.lora_embedding_A.default", (8, 151936), "float32"),
        ("model.layers.0.mlp.up_proj.base_layer.weight", (1572864, 1), "uint8"),
    ],
)
def test_other_adapters_are_refused(name: str, shape: tuple[int, ...], dtype: str) -> None:
    plan = plan_tensor_parallel(anatomy_of("qwen3:0.6b"), 2)
    with pytest.raises(ConfigError, match="cannot be divided") as error:
        placements([Parameter(name, shape, dtype)], plan)
    assert error.value.help


def test_a_plan_of_another_configuration_is_refused() -> None:
    anatomy = anatomy_of("gpt2:small")
    plan = plan_tensor_parallel(anatomy, 2)
    shorter = replace(anatomy.parameters[4], shape=(768, 2000))
    assert shorter.fqn.endswith("c_attn.weight")
    with pytest.raises(ConfigError, match="2000 elements"):
        placements([shorter], plan)
