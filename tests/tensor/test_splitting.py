"""Plans of tensor and expert parallelism, run: loss and gradients of a split model equal the whole one's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from fsdptool.families.registry import load_registry
from fsdptool.inspection.api import describe
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.tensor_plan import TensorPlan
from fsdptool.tensor.division import plan_expert_parallel, plan_tensor_parallel
from fsdptool.testing.families import SmallModel, compare, small_model


def small(reference: str) -> SmallModel:
    """Return a flavour's shrunk copy in evaluation mode, with norms and biases that are not constant."""
    family, _, flavour = reference.partition(":")
    found = load_registry().get(family)
    copy = small_model(found, found.flavours()[flavour])
    copy.model.eval()
    with torch.no_grad():
        for parameter in copy.model.parameters():
            if parameter.dim() <= 1 or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return copy


def differences(
    reference: str,
    derive: Callable[..., TensorPlan],
    change: Callable[[TensorPlan], TensorPlan] = lambda plan: plan,
) -> list[str]:
    """Return where a flavour's split copy differs from the whole one."""
    copy = small(reference)
    anatomy = describe(copy.model, copy.spec)
    plan = change(derive(anatomy))
    assert not plan.indivisible
    assert plan.modules

    def loss_of(model: nn.Module) -> torch.Tensor:
        return copy.objective.loss(copy.objective.predict(model, copy.batch), copy.batch)

    return list(compare(copy.model, anatomy.parameters, plan, loss_of))


def halves(anatomy: Anatomy) -> TensorPlan:
    """Return the plan over two ranks, with the vocabulary whole."""
    return plan_tensor_parallel(anatomy, 2, vocabulary=False)


@pytest.mark.parametrize(
    "reference",
    [
        *("qwen3:0.6b", "gpt2:small", "t5:small", "phi3:mini-4k", "gpt-neox:20b", "bert:base-uncased"),
        *("qwen3-moe:30b-a3b", "gpt-oss:20b", "deepseek-v3:671b", "vit:base-patch16-224"),
        *("flux.1:dev", "flux.2:dev", "ovis-image:default", "pixart-sigma:xl-1024"),
    ],
)
def test_split_over_two_ranks(reference: str) -> None:
    assert differences(reference, halves) == []


@pytest.mark.parametrize("reference", ["mixtral:8x7b", "gpt-oss:20b"])
def test_experts_shared_out_over_two_ranks(reference: str) -> None:
    assert differences(reference, lambda anatomy: plan_expert_parallel(anatomy, 2)) == []


def without_regions(plan: TensorPlan) -> TensorPlan:
    """Norms inside lose their mark: their gradients are partial."""
    return replace(plan, regions=())


def without_a_sum(plan: TensorPlan) -> TensorPlan:
    """One row layer's output stays partial."""
    return replace(plan, sums=plan.sums[1:])


def without_sections(plan: TensorPlan) -> TensorPlan:
    """Fused projections are cut as if they were one."""
    return replace(plan, modules=tuple(replace(module, sections=()) for module in plan.modules))


def without_sizes(plan: TensorPlan) -> TensorPlan:
    """Modules compute with the whole model's sizes."""
    return replace(plan, attributes={})


def summed_positions(plan: TensorPlan) -> TensorPlan:
    """Gradients of T5's divided position bias are summed."""
    return replace(plan, divided_arguments=())


@pytest.mark.parametrize(
    ("reference", "wrong"),
    [
        ("qwen3:0.6b", without_regions),
        ("qwen3:0.6b", without_a_sum),
        ("phi3:mini-4k", without_sections),
        ("gpt2:small", without_sizes),
        ("t5:small", summed_positions),
    ],
)
def test_a_wrong_plan_is_found(reference: str, wrong: Callable[[TensorPlan], TensorPlan]) -> None:
    assert differences(reference, halves, wrong)


def overruled(anatomy: Anatomy) -> TensorPlan:
    """Return the plan of a family that keeps attention whole and splits the feed-forward layers by name."""
    layers = "model.layers.*"
    family_plan = {f"{layers}.self_attn": "whole", f"{layers}.mlp.down_proj": "row"}
    family_plan |= {f"{layers}.mlp.{name}_proj": "column" for name in ("gate", "up")}
    plan = plan_tensor_parallel(replace(anatomy, family_plan=family_plan), 2, vocabulary=False)
    assert plan.regions == ()
    assert {module.origin for module in plan.modules} == {"family"}
    assert plan.whole["model.layers.0.self_attn.q_proj.weight"] == "overridden"
    return plan


def test_a_family_overrules_structure_and_library() -> None:
    assert differences("qwen3:0.6b", overruled) == []
